"""From prompts to finished experience: rollout -> rewards -> log-probs -> KL -> advantages; LightRFT's names.

Invariant: the numbers of a rollout do not depend on how it is cut into batches, rows are grouped by id, and tokens are
the engine's own. Here `Experience` is the batch, as LightRFT's users import it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollbook.core.errors import explain_missing
from rollbook.models.actor import Actor
from rollbook.rollout.transformers import TransformersEngine

try:
    import torch
except ModuleNotFoundError as error:
    raise explain_missing(__name__, error) from None

from rollbook.algorithms.advantages import ESTIMATORS, cumulative_returns, gae
from rollbook.algorithms.filters import clip_filter_like_weight_func
from rollbook.algorithms.kl import KL, k1
from rollbook.algorithms.kl import kl as token_kl_values
from rollbook.algorithms.layout import Layout
from rollbook.algorithms.shaping import RunningNorm
from rollbook.batch.device import pin_memory, to
from rollbook.compat.lightrft import estimation
from rollbook.compat.lightrft.batch import ExperienceBatch as Experience
from rollbook.compat.lightrft.batch import ExperienceVL, Samples
from rollbook.compat.lightrft.config import MakerConfig
from rollbook.compat.lightrft.estimation import RolloutBatches, mean_by_row
from rollbook.compat.lightrft.passes import Passes, padded_experience
from rollbook.compat.lightrft.rewards import Scorer
from rollbook.compat.lightrft.samples import batch_of, if_any, maker_sampling, prompts_of, records_of, samples_of
from rollbook.core.checks import check_float, check_int, suggest
from rollbook.core.experience import Experience as Record
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.metrics import Progress, Stages, advise
from rollbook.core.process_group import SINGLE_PROCESS, current_process_group
from rollbook.core.rows import Rows
from rollbook.core.sampling import Prompt, RunInfo, Sample, Sampling
from rollbook.rollout.engine import BaseEngine

_HOT = 10.0
"""FIRE's temperature of the first token."""


class NaiveExperienceMaker:
    """Makes experience: LightRFT's constructor and methods, for text and vision, padded and packed.

    - `actor`: a `rollbook.models.Actor`, or any object with LightRFT's `generate(input_ids, attention_mask, **options)`
      and `actor(sequences, num_actions, attention_mask)`. `critic`, `initial_model`: such modules, or `None`.
    - `reward_model`: a module, a list of them (an empty one: rules only), or any `rollbook.rewards` source;
      `remote_rm_url`: one URL, several, or a `.py` file with `reward_func`; `reward_fn`, `reward_fn_label_map`,
      `reward_recipe`: LightRFT's, or a plain function of a response.
    - `kl_controller`: a number or an object with a `value`; `None` where `config` has the `kl_coef`. `strategy`: its
      `args` are read once; `None`: defaults.
    - `config`: a `MakerConfig`, in place of `strategy.args`. `engine`: another engine to sample with, such as a server.
      `processor`: of a vision-language model. `teacher`: a model whose log-probs distillation wants.

    Methods of a subclass are used wherever a call needs them: `tokenize_fn`, `generate_samples`, `make_experience`,
    `process_experiences`, `get_cumulative_returns` (estimators over rows, `reinforce`) and `get_advantages_and_returns`
    (`gae`, `ppo`), the last two once per batch.

    `metrics` has what the last call of `make_experience_list` measured: seconds, tokens and tokens per second of each
    stage, counts of what was treated specially, and means over the rollout.

    >>> from rollbook.rollout import ScriptedEngine
    >>> engine = ScriptedEngine({"1+1=": [[4, 2], [5, 2]]})
    >>> maker = NaiveExperienceMaker(
    ...     None, None, None, None, None, 16, None, reward_fn=lambda response_ids: float(response_ids[0] == 4),
    ...     config=MakerConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo"), engine=engine,
    ... )
    >>> batch, = maker.make_experience_list(["1+1="])
    >>> batch.info["reward"].tolist(), batch.advantages.tolist(), batch.action_log_probs.tolist()
    ([1.0, 0.0], [[0.5, 0.5], [-0.5, -0.5]], [[-1.0, -1.0], [-1.0, -1.0]])
    """

    def __init__(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        tokenizer: Any,
        prompt_max_len: int,
        kl_controller: Any,
        strategy: Any = None,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_fn: Any = None,
        reward_fn_label_map: Mapping[str, Any] | None = None,
        reward_recipe: Mapping[str, Any] | None = None,
        *,
        config: MakerConfig | None = None,
        engine: BaseEngine | None = None,
        processor: Any = None,
        teacher: Any = None,
    ) -> None:
        check_int("prompt_max_len", prompt_max_len, 1)
        self.actor, self.critic = actor, critic
        self.reward_model, self.initial_model = reward_model, initial_model
        self.tokenizer, self.processor = tokenizer, processor
        self.prompt_max_len = prompt_max_len
        self.kl_ctl = kl_controller
        self.strategy = strategy
        self.remote_rm_url = remote_rm_url
        self.reward_fn, self.reward_fn_label_map, self.reward_recipe = reward_fn, reward_fn_label_map, reward_recipe
        self.config = config if config is not None else MakerConfig.of(getattr(strategy, "args", None))
        self._kl_coef()  # a mistake is better known now than after the rollout
        self.advantage_estimator = self.config.advantage_estimator
        self.passes = Passes(
            actor, critic=critic, reference=initial_model, teacher=teacher, token_budget=self.config.token_budget
        )
        self.scorer = Scorer(
            reward_model,
            remote_rm_url=remote_rm_url,
            reward_fn=reward_fn,
            label_map=reward_fn_label_map,
            recipe=reward_recipe,
            tokenizer=tokenizer,
        )
        self.engine = engine if engine is not None else self._own_engine()
        running = self.config.reward_running_norm or self.config.reward_running_norm_minus_mean
        self.reward_norm = RunningNorm(minus_mean=self.config.reward_running_norm_minus_mean) if running else None
        self.metrics: dict[str, float] = {}
        self.rollouts_made = 0
        """How many rollouts there have been: the batch part of their samples' ids. Set it when a run is resumed."""
        self._stages = Stages()
        self._max_new_tokens: int | None = None
        self._scored: estimation.Scored | None = None
        self._samples: list[Samples] = []
        self._rows: list[list[Record]] | None = None
        """The records of `_samples` before anything was found out about them, on their way to `make_records`."""

    @property
    def run(self) -> RunInfo | None:
        """What made the samples: engine, model, fingerprints of tokenizer and chat template, seed; `None` of an actor
        that has LightRFT's `generate`, and says nothing of itself."""
        return None if self.engine is None else dataclasses.replace(self.engine.run, seed=self.config.seed)

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL penalty in the reward; 0 where the KL is left to the loss."""
        return 0.0 if self.config.use_kl_loss else max(self._kl_coef(), 0.0)

    def set_reference(self, model: Any) -> None:
        """Use `model` as the reference (`initial_model`) from here on."""
        self.initial_model = self.passes.models["reference"] = model

    def _own_engine(self) -> BaseEngine | None:
        """The actor as an engine, if it is one or has one; else it is asked by LightRFT's `generate`."""
        if isinstance(self.actor, BaseEngine):
            return self.actor
        if not isinstance(self.actor, Actor):
            return None
        if self.actor.tokenizer is None and self.actor.processor is None:
            self.actor.tokenizer, self.actor.processor = self.tokenizer, self.processor
        return TransformersEngine(self.actor)

    # --- prompts ------------------------------------------------------------------------------------------------

    def tokenize_fn(self, texts: Any, max_length: int, padding: bool = True, device: Any = None) -> Any:
        """Token ids of texts, cut to `max_length` on the tokenizer's truncation side, without special tokens.

        `padding=True`: a dict of tensors on `device`, padded on the tokenizer's side; `padding=False`: the tokenizer's
        mapping of lists.
        """
        if self.tokenizer is None:
            raise ValueError("tokenizer: got None, expected one, to read prompts with")
        options: dict[str, Any] = {"add_special_tokens": False, "max_length": max_length, "truncation": True}
        if not padding:
            return self.tokenizer(texts, **options)
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, **options)
        home = device if device is not None else self.passes.device
        return {name: value.to(home) for name, value in batch.items()}

    @torch.no_grad()
    def generate_samples(self, all_prompts: Any, **generate_kwargs: Any) -> list[Samples]:
        """Samples of each prompt, n of each after one another, in batches of `micro_rollout_batch_size`.

        `all_labels`, `all_references`, `all_images`, `all_videos` have an entry for each prompt; other options are the
        engine's. `gamma` and `lambd` are not, and are left out.
        """
        made = self._rollout(all_prompts, generate_kwargs, self.config.n_samples_per_prompt)
        self.rollouts_made += 1
        return made

    def _read(self, all_prompts: Any, generate_kwargs: Mapping[str, Any]) -> tuple[list[Prompt], dict[str, Any]]:
        """A call's prompts, each with its own columns, and the options of its sampling."""
        options = dict(generate_kwargs)
        for name in ("gamma", "lambd"):
            options.pop(name, None)
        columns = {name: options.pop(f"all_{name}", None) for name in ("labels", "references", "images", "videos")}
        for odd in ("images_num", "videos_num"):
            options.pop(odd, None)  # each prompt comes with its own
        for name in options:
            if name.startswith("all_"):
                raise ValueError(
                    f"{name}: there is no such column{suggest(name, [f'all_{known}' for known in columns])}"
                )
        prompts = prompts_of(all_prompts, **columns)
        if not prompts:
            raise ValueError("all_prompts: got none, expected at least one prompt")
        self.scorer.check(prompts)
        return prompts, options

    def _rollout(self, all_prompts: Any, generate_kwargs: Mapping[str, Any], n: int) -> list[Samples]:
        prompts, options = self._read(all_prompts, generate_kwargs)
        self._max_new_tokens = options.get("max_new_tokens", options.get("max_tokens", self._max_new_tokens))
        with self._stages("rollout") as stage:
            engine = self.engine
            if engine is None:
                made = self._asked(prompts, options, n)
            else:
                made = self._sampled(engine, prompts, options, n)
            stage["tokens"] = int(sum(float(one.response_length.sum()) for one in made))
        return made

    def _batch_id(self) -> int | str:
        """The rollout's number; with several processes also this one's, since each has prompts of its own."""
        ranks, name = current_process_group(), self.config.batch_name
        number: int | str = self.rollouts_made if ranks is SINGLE_PROCESS else f"{self.rollouts_made}.{ranks.rank}"
        return number if name is None else f"{name}-{number}"

    def _sampling(self, options: Mapping[str, Any], n: int, **defaults: Any) -> Sampling:
        """How this maker samples, as far as the options of a call do not say otherwise."""
        defaults |= {"n": n, "seed": self.config.seed}
        if self.config.use_fire:
            defaults["first_temperature"] = _HOT
        trained = self.passes.temperature
        if trained is not None:
            defaults["temperature"] = trained
        sampling = maker_sampling(options, self.prompt_max_len, **defaults)
        if trained is not None and sampling.temperature not in (0, trained):
            advise(
                f"temperature: samples are drawn at {sampling.temperature:g} and the actor's log-probs are at "
                f"{trained:g}; Actor(temperature={sampling.temperature:g}) makes them one"
            )
        return sampling

    def _named(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Prompts with ids: their own, or their place in this rollout."""
        return [
            prompt if prompt.eid is not None else prompt.replace(eid=EID(batch=self._batch_id(), task=i, suffix=""))
            for i, prompt in enumerate(prompts)
        ]

    def _sampled(self, engine: BaseEngine, prompts: list[Prompt], options: dict[str, Any], n: int) -> list[Samples]:
        """By an engine of `rollbook.rollout`: with its own ids, log-probs and reasons."""
        sampling = self._sampling(
            options,
            n,
            max_prompt_tokens=self.prompt_max_len,
            prompt_overflow=getattr(self.tokenizer, "truncation_side", "right"),
        )
        self._max_new_tokens = sampling.max_tokens
        named = self._named(prompts)
        asked = self._tokenized(named) if self._overrides("tokenize_fn") else named
        order = [one.eid.replace(run=one.eid.run + k).rid for one in named for k in range(sampling.n) if one.eid]
        found: dict[str, Sample] = {}
        with self._bar("rollout", len(order)) as bar:
            for sample in engine.stream(asked, sampling):
                found[sample.eid.rid] = sample
                bar.advance()
        rollouts = [found[rid] for rid in order]
        if asked is not named:  # samples keep the text that their prompt was given as
            rollouts = [one.replace(prompt=named[i // sampling.n]) for i, one in enumerate(rollouts)]
        if rollouts and all(one.failed for one in rollouts):
            advise(f"rollout: all {len(rollouts)} samples failed; the first: {rollouts[0].error}")
        return [self._collected(part) for part in _chunks(rollouts, self.config.micro_rollout_batch_size)]

    def _tokenized(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Plain texts as the token ids that `tokenize_fn` gives them; chats and prompts with media as they are."""

        def tokenized(prompt: Prompt) -> Prompt:
            if prompt.text is None or prompt.images or prompt.videos:
                return prompt
            (token_ids,) = self.tokenize_fn([prompt.text], self.prompt_max_len, padding=False)["input_ids"]
            return prompt.replace(text=None, token_ids=token_ids)

        return [tokenized(prompt) for prompt in prompts]

    def _collected(self, rollouts: list[Sample]) -> Samples:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        made = samples_of(rollouts, pad_token_id=pad or 0, packed=self.config.packing_samples)
        return made.to_device(self.passes.device)

    def _asked(self, prompts: list[Prompt], options: dict[str, Any], n: int) -> list[Samples]:
        """By an actor with LightRFT's `generate`: sequences and masks are all it says."""
        config = self.config
        for i, prompt in enumerate(prompts):
            if prompt.text is None or prompt.images or prompt.videos:
                raise ValueError(
                    f"all_prompts[{i}]: got a prompt that is not plain text, expected text: the actor has LightRFT's "
                    "generate; rollbook.models.Actor takes chats, token ids and media"
                )
        if not callable(getattr(self.actor, "generate", None)):
            got = "None" if self.actor is None else type(self.actor).__name__
            raise ValueError(f"actor: got {got}, expected one with generate, or an engine beside it")
        if config.use_fire:
            raise ValueError("use_fire: needs an engine of rollbook.rollout, such as that of rollbook.models.Actor")
        repeated = [(i, run) for i in range(len(prompts)) for run in range(n)]
        if hasattr(self.actor, "eval"):
            self.actor.eval()
        made = []
        with self._bar("rollout", len(repeated)) as bar:
            for part in _chunks(repeated, config.micro_rollout_batch_size):
                texts = [prompts[i].text for i, _ in part]
                inputs = self.tokenize_fn(texts, self.prompt_max_len, device=self.passes.device)
                given = self.actor.generate(**inputs, **options)
                if not isinstance(given, (tuple, list)) or len(given) != 3:
                    got = f"{len(given)} results" if isinstance(given, (tuple, list)) else type(given).__name__
                    raise ValueError(
                        f"actor.generate: got {got} back, expected (sequences, attention_mask, action_mask)"
                    )
                sequences, attention_mask, action_mask = given
                action_mask = action_mask != 0
                samples = Samples(
                    sequences=sequences,
                    attention_mask=attention_mask,
                    action_mask=action_mask,
                    num_actions=action_mask.size(1),
                    packed_seq_lens=None,
                    response_length=action_mask.float().sum(dim=-1),
                    total_length=attention_mask.float().sum(dim=-1),
                    prompts=texts,
                    labels=if_any([prompts[i].label for i, _ in part]),
                    pad_len=None,
                    references=if_any([prompts[i].reference for i, _ in part]),
                    ids=[EID(batch=self._batch_id(), task=i, run=run) for i, run in part],
                )
                made.append(samples)
                bar.advance(len(part))
        return made

    # --- experience ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def make_experience(self, samples: Samples) -> Experience:
        """Samples with everything the models and the reward source say of them; advantages come later.

        Gives `action_log_probs`, `base_action_log_probs`, `values` (B, A) where there are models for them, `kl` (B, A),
        and `info`: `kl` (B,), the mean over actions, `reward` (B,), `response_length`, `total_length`, `num_actions`,
        and `reward_metrics`, by name (B,), where the source has parts.
        """
        return self._experiences([samples])[0]

    def _experiences(
        self, many: Sequence[Samples], records: Sequence[Sequence[Record]] | None = None
    ) -> list[Experience]:
        batch = self._padded_experience(many[0]) if len(many) == 1 else None
        if batch is not None:
            batches = [batch]
        else:
            known: Sequence[Any] = [None] * len(many) if records is None else records
            batches = [batch_of(samples, rows) for samples, rows in zip(many, known, strict=True)]
            self._pass(batches)
        with self._stages("reward"), self._bar("reward", sum(map(len, batches))) as bar:
            self.scorer.score(many, batches, bar)
        for samples, batch in zip(many, batches, strict=True):
            info = {**(batch.info or {}), "num_actions": samples.num_actions}
            batch.info = {**{name: info[name] for name in _FIRST if name in info}, **info}
        return batches

    def _pass(self, batches: Sequence[Experience]) -> None:
        """Have the models say what they have to say of every token, and measure the KL."""
        with self._bar("log-probs", 1 if not self.passes.models else len(self.passes.models)) as bar:
            results = self.passes.run(batches, entropy=self.config.wants_entropy, stages=self._stages, bar=bar)
        self._measure_kl(*results)
        self._resume_training()

    def _padded_experience(self, samples: Samples) -> Experience | None:
        """The batch after `_pass`, by the short path for padded tensors where it applies."""
        if self.config.wants_entropy or KL[self.config.kl_estimator].function is not k1:
            return None
        with self._bar("log-probs", len(self.passes.models)) as bar:
            batch = padded_experience(samples, self.passes, self._stages, bar)
        if batch is not None:
            self._resume_training()
        return batch

    def _resume_training(self) -> None:
        for model in (self.actor, self.critic):
            if _trains(model):
                model.train()

    def _measure_kl(self, whole: RolloutBatches, columns: Mapping[str, torch.Tensor], lengths: list[int]) -> None:
        """The KL of each token, 0 on what does not count, and its mean over each row's actions."""
        mask, ours, base = map(columns.get, ("action_mask", "action_log_probs", "base_action_log_probs"))
        if mask is None:
            raise ValueError("action_mask: got none, and no other response-axis field, expected one")
        if base is None and self.kl_coef > 0:
            advise(f"kl_controller: got {self.kl_coef:g}, and no initial_model: there is no KL penalty")
        layout = Layout((len(mask),), lengths, mask)
        if ours is not None and base is not None:
            kl = layout.masked(token_kl_values(self.config.kl_estimator, layout.masked(ours), layout.masked(base)))
        else:
            kl = torch.zeros(len(mask))
        whole.put_column("kl", kl, lengths)
        whole.put_numbers(
            "kl", mean_by_row(kl.double().numpy(), np.array(lengths, dtype=np.int64), layout.counts.numpy())
        )

    def process_experiences(
        self, experiences: Sequence[Experience], max_new_tokens: int | None = None
    ) -> tuple[list[Experience], list[torch.Tensor]]:
        """Return the experiences, and for each the rewards (B,) that go on its rows' last actions: shaped, and compared
        within groups if that is what the estimator does. A missing reward is NaN.

        Groups are those of the rows' ids; rows without ids are grouped by place, `n_samples_per_prompt` after one
        another. `max_new_tokens` is what an overlong buffer counts from: unless given, that of the last rollout.

        A subclass may override this: `make_experience_list` goes on with the experiences and rewards it returns, which
        may be fewer, smaller or in another order, and clips the rewards afterwards.
        """
        for i, one in enumerate(experiences):
            if not isinstance(one, Experience):
                raise ValueError(f"experiences[{i}]: got {type(one).__name__}, expected an Experience")
        whole = RolloutBatches(experiences)
        longest = max_new_tokens if max_new_tokens is not None else self._max_new_tokens
        scored = self._scored = estimation.score(whole, self.config, self.reward_norm, longest)
        rewards = whole.split(scored.rewards)
        return list(experiences), [part.to(_home(one)) for part, one in zip(rewards, experiences, strict=True)]

    def get_advantages_and_returns(
        self, values: Any, rewards: Any, action_mask: Any, gamma: float, lambd: float
    ) -> tuple[Any, Any]:
        """GAE: advantages and returns, (B, A), or lists of 1-D tensors for lists of them. Slots that do not count are
        skipped by the recursion, and 0.

        >>> maker = NaiveExperienceMaker(None, None, None, None, None, 8, None)
        >>> advantages, returns = maker.get_advantages_and_returns(
        ...     torch.tensor([[0.5, 0.4, 0.3]]), torch.tensor([[0.0, 0.0, 1.0]]), None, 1.0, 0.95)
        >>> advantages, returns
        (tensor([[0.4367, 0.5650, 0.7000]]), tensor([[0.9367, 0.9650, 1.0000]]))
        """
        found = gae(rewards, values, action_mask, gamma=gamma, lam=lambd)
        if isinstance(values, list) and not isinstance(values, Rows):
            return list(found.advantages), list(found.returns)
        return found.advantages, found.returns

    def get_cumulative_returns(self, rewards: Any, action_mask: Any, gamma: float) -> Any:
        """The return to go of each slot, (B, A), or a list of 1-D tensors for such a list.

        >>> maker = NaiveExperienceMaker(None, None, None, None, None, 8, None)
        >>> maker.get_cumulative_returns(torch.tensor([[0.0, 0.0, 1.0]]), None, 0.5)
        tensor([[0.2500, 0.5000, 1.0000]])
        """
        found = cumulative_returns(rewards, action_mask, gamma=gamma)
        return list(found) if isinstance(rewards, list) and not isinstance(rewards, Rows) else found

    @torch.no_grad()
    def make_experience_list(self, all_prompts: Any, **generate_kwargs: Any) -> list[Experience]:
        """Finished experience of all prompts: generate, score, compare within groups, estimate advantages.

        As `generate_samples` takes them: a prompt or a list of them, labels, references, media, and the engine's
        options; `gamma` and `lambd` (1.0) are the estimator's. Batches have `micro_rollout_batch_size` samples, and
        `info` gains `return` (B,), the sum of a row's token rewards, and the share that was clipped, where there is a
        bound; `info["num_actions"]` and the field `kl` go.
        """
        self._stages = Stages()
        estimation.check(self.config, self.passes.models)
        self.scorer.need()
        entry = ESTIMATORS[self.config.advantage_estimator]
        greedy = self._greedy_rewards(all_prompts, generate_kwargs) if entry.greedy_baseline else None
        samples = self._samples = self.generate_samples(all_prompts, **generate_kwargs)
        if not self._overrides("make_experience"):
            # A record is dear beside the rest of a short sample: batches and `make_records` have the same.
            self._rows = [[one.to_experience() for one in part.rollouts or ()] for part in samples]
            experiences = self._experiences(samples, self._rows)
        else:  # a subclass has its own, and may change samples in it
            self._rows = None
            experiences = [self.make_experience(part) for part in samples]
        if greedy is not None:
            whole = RolloutBatches(experiences)
            baselines = dict(enumerate(greedy.values())) if whole.ids() is None else greedy
            groups = whole.groups(len(whole) // len(greedy))
            whole.put_numbers("reward_baseline", torch.tensor([baselines[group] for group in groups]))
        failed = sum(one.failed for part in samples for one in part.rollouts or ())
        return self._estimated(experiences, failed, generate_kwargs)

    def _estimated(
        self, experiences: list[Experience], failed: int, generate_kwargs: Mapping[str, Any]
    ) -> list[Experience]:
        """Scored experience with its advantages, and `metrics` of the whole; `failed` samples have no reward."""
        gamma = generate_kwargs.get("gamma", self.config.gamma)
        lambd = generate_kwargs.get("lambd", self.config.lambd)
        self._scored = None
        rollout = RolloutBatches(experiences)
        kept, rewards = self.process_experiences(experiences)
        experiences = list(kept)
        with self._stages("advantages"):
            whole = RolloutBatches(experiences)
            found = estimation.finish(
                whole,
                self._shaped(whole, list(rewards)),
                self.config,
                kl_coef=self._kl_coef(),
                gamma=gamma,
                lambd=lambd,
                recursions=estimation.Recursions(
                    self.get_cumulative_returns if self._overrides("get_cumulative_returns") else None,
                    self.get_advantages_and_returns if self._overrides("get_advantages_and_returns") else None,
                ),
            )
        for batch in experiences:
            batch.kl = None
            batch.info = {name: value for name, value in (batch.info or {}).items() if name != "num_actions"}
        self.metrics = self._summary(rollout, failed, found)
        if self.config.packing_samples:
            return [batch.pack() for batch in experiences]
        return experiences

    def make_records(self, all_prompts: Any, **generate_kwargs: Any) -> Experiences:
        """The same experience as records, a row for each sample: what bytes, Parquet and a book take.

        Each has what the engine said of it (texts, messages, log-probs, versions, sampling options), `reward`,
        `old_logprobs`, `advantages`, `returns`, the parts of its reward in `metrics`, and where they were computed
        the reference's log-probs (`ref_logprobs`), the critic's `values` and each token's `entropy`.

        >>> from rollbook.rollout import ScriptedEngine
        >>> maker = NaiveExperienceMaker(
        ...     None, None, None, None, None, 16, None, reward_fn=lambda response_ids: float(response_ids[0] == 4),
        ...     config=MakerConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo"),
        ...     engine=ScriptedEngine({"1+1=": [[4, 2], [5, 2]]}),
        ... )
        >>> records = maker.make_records(["1+1="])
        >>> records.values("reward"), [row.advantages.tolist() for row in records]
        ([1.0, 0.0], [[0.5, 0.5], [-0.5, -0.5]])
        """
        if self.engine is None:
            raise ValueError("engine: got None, expected one: an actor with LightRFT's generate keeps no records")
        self._rows = None
        whole = RolloutBatches(self.make_experience_list(all_prompts, **generate_kwargs))
        made, self._rows = self._rows, None
        rows = None if made is None else [row for part in made for row in part]
        return records_of([one for part in self._samples for one in part.rollouts or ()], whole, rows)

    def _overrides(self, method: str) -> bool:
        """Whether a subclass, or an assignment to this object, replaces a method."""
        return getattr(getattr(self, method), "__func__", None) is not getattr(NaiveExperienceMaker, method)

    def _greedy_rewards(self, all_prompts: Any, generate_kwargs: Mapping[str, Any]) -> dict[Any, float]:
        """ReMax's baseline of each group, by its id: the reward of its prompt's likeliest response."""
        greedy = self._rollout(all_prompts, {**generate_kwargs, "do_sample": False}, 1)
        batches = [batch_of(samples) for samples in greedy]
        self.scorer.score(greedy, batches)
        whole = RolloutBatches(batches)
        return dict(zip(whole.groups(1), whole.numbers("reward").tolist(), strict=True))

    def _shaped(self, whole: RolloutBatches, rewards: Sequence[Any]) -> estimation.Scored:
        """What `process_experiences` returned, checked; `whole` are its experiences."""
        parts = [torch.as_tensor(part, dtype=torch.float32).detach().cpu().reshape(-1) for part in rewards]
        if [len(part) for part in parts] != whole.sizes:
            raise ValueError(
                f"process_experiences: got rewards of sizes {[len(part) for part in parts]}, expected {whole.sizes}, "
                "one reward for each sample of each experience"
            )
        shaped = torch.cat(parts) if parts else torch.zeros(0)
        if self._scored is None:
            return estimation.Scored(shaped)
        return dataclasses.replace(self._scored, rewards=shaped)

    def _kl_coef(self) -> float:
        given = getattr(self.kl_ctl, "value", self.kl_ctl)
        if isinstance(given, torch.Tensor) and given.numel() == 1:
            given = given.item()
        finite = "None, a finite number, or an object with such a value"
        coef = None if given is None else check_float("kl_controller", given, -1e30, 1e30, finite)
        if coef is not None and self.config.kl_coef not in (None, coef):
            raise ValueError(f"kl_controller: got {coef:g}, expected None, or config.kl_coef, {self.config.kl_coef:g}")
        return self.config.kl_coef or coef or 0.0

    def _summary(self, whole: RolloutBatches, failed: int, found: Mapping[str, float]) -> dict[str, float]:
        rewards = whole.numbers("reward")
        known = rewards[~rewards.isnan()]
        lengths = whole.numbers("response_length")
        means = {
            "rollout/samples": float(len(whole)),
            "rollout/failed": float(failed),
            "rollout/response_length": float(lengths.mean()),
            "reward/mean": float(known.mean()) if len(known) else math.nan,
            "reward/std": float(known.std(correction=0)) if len(known) else math.nan,
            "reward/errors": float(sum(error is not None for error in whole.entries("reward_error") or ())),
        }
        if whole.entries("kl") is not None:
            means["kl/mean"] = float(whole.numbers("kl").mean())
        parts = [(batch.info or {}).get("reward_metrics") or {} for batch in whole.batches]
        for name in dict.fromkeys(name for part in parts for name in part):
            values = torch.cat([part[name].float().cpu() for part in parts if name in part])
            values = values[~values.isnan()]
            means[f"reward/{name}"] = float(values.mean()) if len(values) else math.nan
        cut = whole.entries("prompt_truncated_from") or []
        means["rollout/prompts_cut"] = sum(length is not None for length in cut) / len(whole)
        ended = whole.entries("finish_reason")
        if ended is not None:
            means["rollout/truncated"] = sum(reason == "length" for reason in ended) / len(ended)
        return {**self._stages.metrics(), **found, **means}

    def _bar(self, label: str, total: int) -> Progress:
        return Progress(label, total, show=self.config.progress)


def _trains(model: Any) -> bool:
    """Whether a model is to be trained after this, as LightRFT takes it: not one that is frozen."""
    if isinstance(model, torch.nn.Module):
        return any(parameter.requires_grad for parameter in model.parameters())
    return callable(getattr(model, "train", None))


_FIRST = ("kl", "reward", "response_length", "total_length")
"""What `info` begins with."""


def _chunks(items: list[Any], size: int | None) -> list[list[Any]]:
    step = size or max(len(items), 1)
    return [items[i : i + step] for i in range(0, len(items), step)]


def _home(batch: Experience) -> torch.device:
    reward = (batch.info or {}).get("reward")
    return reward.device if isinstance(reward, torch.Tensor) else torch.device("cpu")


__all__ = [
    "Experience",
    "ExperienceVL",
    "MakerConfig",
    "NaiveExperienceMaker",
    "Samples",
    "clip_filter_like_weight_func",
    "pin_memory",
    "to",
]
