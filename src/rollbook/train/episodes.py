"""`EpisodeMaker`: experience of several turns, in which the model talks to an environment: a tool, a game, a user.

Invariant: all runs of all prompts advance in lock step, a turn of all of them in one call of the engine; what is
sampled in a run depends on the seed, its id and the turn, and on nothing that happens in another. What an environment
says is context and never trained; an environment that breaks costs its own run and no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch

from rollbook.compat.lightrft import estimation
from rollbook.compat.lightrft.maker import MakerConfig, NaiveExperienceMaker
from rollbook.compat.lightrft.recording import finished, with_reward
from rollbook.compat.lightrft.rollout_batches import Whole
from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.metrics import Stages, advise
from rollbook.core.sampling import Prompt, Sample, Sampling
from rollbook.rewards.recipes import as_reward
from rollbook.rewards.types import RewardInput, RewardResult
from rollbook.rollout.engine import BaseEngine
from rollbook.rollout.episode import Episode, act_all
from rollbook.rollout.transformers import TransformersEngine

Observation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What an environment says: text, or where the prompt is a chat a message or several; a text is then a user's."""

Counted = Literal["sum", "last"]
OnCut = Literal["end", "respond"]
_EPISODE = ["on_realign", "on_fork", "parse", "template_options"]
"""What `Episode` can be told that the maker does not know better."""
_ENDLESS = 1 << 30


@dataclass(frozen=True)
class Reply:
    """What an environment makes of a turn: what it says, what the turn was worth, and whether the episode is over.

    `observation` is what the model reads before its next turn; what no turn comes after (it is `done`, or was the last
    of `max_turns`) is kept in the record's `info["last_observation"]`. Without a `reward` the turn adds nothing.

    >>> Reply("= 42")
    Reply(observation='= 42', reward=None, done=False)
    >>> Reply(reward=1.0)
    Traceback (most recent call last):
        ...
    ValueError: observation: got None and done is False, expected something for the model to go on from
    """

    observation: Observation | None = None
    reward: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", check_float("reward", self.reward, -1e30, 1e30, "a finite number"))
        object.__setattr__(self, "done", check_bool("done", self.done))
        if self.observation is None and not self.done:
            raise ValueError("observation: got None and done is False, expected something for the model to go on from")


class Environment(Protocol):
    """One episode's other side. It is made for one run of one prompt, and forgotten after it.

    If it has a method `close`, that is called when its episode is over, however it ended.
    """

    def begin(self) -> Observation | None:
        """What the model reads after the prompt and before its first turn, if anything."""
        ...

    def respond(self, text: str) -> Reply:
        """What comes of a turn: `text` is what the model wrote, without the token that ends it."""
        ...


@dataclass
class _Run:
    """One episode under way."""

    prompt: Prompt
    eid: EID
    task: int
    """The prompt's place in the call."""
    episode: Episode | None = None
    environment: Environment | None = None
    error: str | None = None
    over: bool = False
    ended: bool = False
    """Whether the environment said that it is over."""
    out_of_turns: bool = False
    rewards: list[float] = field(default_factory=list)
    """What each turn was worth, where the environment said so."""
    rows: list[Experience] = field(default_factory=list)

    def fail(self, error: BaseException | str, where: str = "") -> None:
        """This run is over, and what it was worth is not known."""
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.error, self.over = f"{where}: {said}" if where else said, True
        if self.episode is not None and self.episode.finish_reason != "error":
            self.episode.append_sample(self._failure())

    def _failure(self) -> Sample:
        return Sample(
            prompt=self.prompt,
            eid=self.eid,
            prompt_ids=list(self.prompt.token_ids or ()),
            response_ids=[],
            logprobs=[],
            finish_reason="error",
            error=self.error,
        )

    def record(self, counted: Counted, group_size: int) -> None:
        """Make its records: one, or several where a template forked the conversation."""
        if self.episode is None:
            self.rows = [self._failure().replace(group_size=group_size).to_experience().replace(reward=math.nan)]
            return
        total = 0.0
        if counted == "last" and self.rewards:
            total = self.rewards[-1]
        made = self.episode.experiences(total)
        if self.error is not None:
            none = [None if one.action_mask is None else torch.zeros_like(one.action_mask) for one in made]
            made = [one.replace(reward=math.nan, action_mask=mask) for one, mask in zip(made, none, strict=True)]
        elif self.ended:
            made = [_ended(row) for row in made]
        elif self.out_of_turns:
            made = [_out_of_turns(one) for one in made]
        self.rows = made


def _ended(row: Experience) -> Experience:
    """The record of an episode that the environment ended: a cut turn that it responded to does not truncate it."""
    if row.finish_reason != "length":
        return row
    info = {name: value for name, value in row.info.items() if name != "truncated"}
    return row.replace(finish_reason="stop", truncate_status=None, info=info)


def _out_of_turns(row: Experience) -> Experience:
    info = {**row.info, "truncated": "turns"}
    return row.replace(finish_reason="length", truncate_status="response_truncated", info=info)


class EpisodeMaker(NaiveExperienceMaker):
    """Makes experience of several turns; ids, rewards, advantages, metrics and records as `NaiveExperienceMaker`'s.

    - `actor`: a `rollbook.models.Actor`, or an engine. `environment`: makes the other side of an episode from its
      prompt, which has the id of the run (`prompt.eid`), for what is random in it.
    - `tokenizer`: the actor's own unless given; of a vision-language model its processor.
    - `max_turns`: of the model. `context_limit`: tokens of a whole episode, prompt and all; unless given, the model's
      positions. An episode that comes to either end has the reason `length`, and `info["truncated"]` says which:
      `turns`, `context`, or `turn` where `max_tokens` cut one.
    - `on_cut`: what becomes of a turn that a limit cut. `end`: the episode is over, and the environment does not see
      it; `respond`: it is a turn like others, as in a game whose moves have a fixed number of tokens: an episode that
      the environment then ends has the reason `stop`, and is not truncated.
    - `rewards`: an episode is worth the `sum` of what the environment gave its turns, or the `last` of it; 0 if it
      gave nothing. With `sum`, `token_level_reward` of the record has each turn's on its last token, where estimators
      over time (`ppo`, `gae`, `reinforce`, ...) take it; those that compare runs are given the total. `reward`: what
      else to add, on the last token: whatever `rollbook.rewards.as_reward` takes, asked of the finished records. Both
      parts are in the record's `metrics`, as `environment` and `source`.
    - `workers`: so many environments respond at the same time, in threads, where they wait for something.
    - `episode`: options of `Episode` (`on_fork`, `on_realign`, `parse`, `template_options`).
    - `config`, `critic`, `initial_model`, `teacher`, `kl_controller`, `engine`: see `NaiveExperienceMaker`. An overlong
      buffer counts what was sampled in all turns, up to `max_turns` times `max_tokens`.

    An error of an environment, or of the engine, is that run's: its record has the reason `error`, what happened in
    `info["error"]`, no reward (NaN) and nothing to train on.

    >>> from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> from rollbook.rollout import ScriptedEngine
    >>> letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("_$0156789x?=")}, unk_token="_"))
    >>> letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="_", eos_token="$")
    >>> class Calculator:
    ...     def __init__(self, prompt):
    ...         self.right = prompt.reference
    ...     def begin(self):
    ...         return None
    ...     def respond(self, text):
    ...         if "x" in text:
    ...             first, second = text.split("x")
    ...             return Reply(f"={int(first) * int(second)}=")
    ...         return Reply(reward=float(text == self.right), done=True)
    >>> lines = ["7x8$", "60$", "56$"]  # one run asks the calculator, the other does not; then the first answers
    >>> maker = EpisodeMaker(
    ...     None, Calculator, engine=ScriptedEngine(lines, tokenizer), max_turns=3,
    ...     config=MakerConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo"),
    ... )
    >>> records = maker.make_records([Prompt(text="7x8?", reference="56")])
    >>> records.values("reward"), [tokenizer.decode(row.tokens[row.prompt_length :]) for row in records]
    ([1.0, 0.0], ['7x8$=56=56$', '60$'])
    >>> records[0].action_mask.int().tolist(), records[0].advantages.tolist()[:2]
    ([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1], [0.5, 0.5])
    """

    def __init__(
        self,
        actor: Any,
        environment: Callable[[Prompt], Environment],
        *,
        config: MakerConfig | None = None,
        tokenizer: Any = None,
        engine: BaseEngine | None = None,
        critic: Any = None,
        initial_model: Any = None,
        teacher: Any = None,
        kl_controller: Any = None,
        reward: Any = None,
        rewards: Counted = "sum",
        max_turns: int = 8,
        context_limit: int | None = None,
        on_cut: OnCut = "end",
        workers: int = 1,
        episode: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(environment):
            got = type(environment).__name__
            raise ValueError(f"environment: got {got}, expected a function from a Prompt to an Environment")
        self.environment = environment
        check_choice("rewards", rewards, get_args(Counted))
        check_choice("on_cut", on_cut, get_args(OnCut))
        self.rewards, self.on_cut = rewards, on_cut
        self.max_turns = check_int("max_turns", max_turns, 1)
        self.workers = check_int("workers", workers, 1)
        self.episode = dict(episode or {})
        for name in self.episode:
            if name not in _EPISODE:
                raise ValueError(f"episode: option {name!r} is not known{suggest(name, _EPISODE)}")
        if context_limit is not None:
            check_int("context_limit", context_limit, 1)
        source = None if reward is None else as_reward(reward)
        super().__init__(
            actor,
            critic,
            None,
            initial_model,
            tokenizer,
            _ENDLESS if context_limit is None else context_limit,
            kl_controller,
            reward_fn=source,
            config=config if config is not None else MakerConfig(),
            engine=engine,
            teacher=teacher,
        )
        if self.engine is None:
            raise ValueError(f"actor: got {type(actor).__name__}, expected one with an engine, or an engine beside it")
        if tokenizer is None:
            known = (getattr(self.engine, name, None) for name in ("processor", "tokenizer"))
            self.tokenizer = next((one for one in known if one is not None), None)
        if self.tokenizer is None:
            raise ValueError("tokenizer: got None, and the engine has none, expected one to read turns with")
        if context_limit is None and isinstance(self.engine, TransformersEngine):
            context_limit = self.engine.runner.positions
        self.context_limit = context_limit

    # --- episodes -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def play(self, prompts: Any, **options: Any) -> Experiences:
        """Episodes of all prompts with their rewards alone: no log-probs of models, no advantages. For evaluation.

        Prompts and options as of `make_records`.
        """
        self._stages = Stages()
        runs = self._played(prompts, options, self.config.n_samples_per_prompt)
        self.rollouts_made += 1
        batches = self._scored_batches(runs)
        self.metrics = self._summary(Whole(batches), _failures(runs), {}) | self._counts(runs)
        return finished([row for run in runs for row in run.rows], Whole(batches))

    def generate_samples(self, all_prompts: Any, **generate_kwargs: Any) -> Any:
        """Refused: an episode is several samples of an engine, with what was observed between them."""
        raise ValueError("generate_samples: an episode is no single sample; make_records, make_experience_list or play")

    @torch.no_grad()
    def make_experience_list(self, all_prompts: Any, **generate_kwargs: Any) -> list[Any]:
        """Finished experience of all prompts, in batches of `micro_rollout_batch_size` rows: play, score, compare
        within groups, estimate advantages. Prompts, columns and options as of `NaiveExperienceMaker`."""
        return self._made(all_prompts, generate_kwargs)[1]

    @torch.no_grad()
    def make_records(self, all_prompts: Any, **generate_kwargs: Any) -> Experiences:
        """The same experience as records: of each run one, of kind `multi_turn` (or one for each rendering, where
        `episode` has a conversation forked), in the order of prompts and runs.

        Beside what `NaiveExperienceMaker.make_records` gives, `metrics` counts turns and observed tokens, and
        `info["segments"]` says which tokens are whose.
        """
        runs, batches = self._made(all_prompts, generate_kwargs)
        return finished([row for run in runs for row in run.rows], Whole(batches))

    def _made(self, all_prompts: Any, options: Mapping[str, Any]) -> tuple[list[_Run], list[Any]]:
        self._stages = Stages()
        estimation.check(self.config, self.passes.models)
        baselines = self._greedy(all_prompts, options) if self.config.advantage_estimator == "remax" else None
        runs = self._played(all_prompts, options, self.config.n_samples_per_prompt)
        self.rollouts_made += 1
        batches = self._scored_batches(runs)
        self._pass(batches)
        if baselines is not None:
            given = [baselines[run.task] for run in runs for _ in run.rows]
            Whole(batches).put_numbers("reward_baseline", torch.tensor(given))
        made = self._estimated(batches, _failures(runs), options)
        self.metrics |= self._counts(runs)
        return runs, made

    def _greedy(self, all_prompts: Any, options: Mapping[str, Any]) -> list[float]:
        """ReMax's baseline of each prompt: what its likeliest episode is worth."""
        runs = self._played(all_prompts, {**options, "do_sample": False}, 1)
        rewards = iter(Whole(self._scored_batches(runs)).numbers("reward").tolist())
        return [[next(rewards) for _ in run.rows][-1] for run in runs]

    def _played(self, all_prompts: Any, options: Mapping[str, Any], n: int) -> list[_Run]:
        """All runs of all prompts, played to their ends, with their records."""
        prompts, given = self._read(all_prompts, options)
        if given.get("max_prompt_tokens") is not None:
            raise ValueError("max_prompt_tokens: a turn's prompt is all that came before it; see context_limit")
        sampling = self._sampling(given, n)
        self._max_new_tokens = sampling.max_tokens * self.max_turns
        with self._stages("rollout") as stage, ThreadPoolExecutor(self.workers) as pool:
            # The engine's own: as many ids, and the same, as it would give samples of a single turn.
            requests = self.engine.requests(self._named(prompts), sampling)  # type: ignore[union-attr]
            runs = [
                _Run(request.prompt.replace(eid=eid), eid, task)
                for task, request in enumerate(requests)
                for eid in request.eids
            ]
            try:
                self._play(runs, sampling, pool.map if self.workers > 1 else map)
            finally:
                for run in runs:
                    close = getattr(run.environment, "close", None)
                    if callable(close):
                        with suppress(Exception):  # it is over; what it said counts
                            close()
            for run in runs:
                run.record(self.rewards, sampling.n)
            stage["tokens"] = int(sum(row.metrics.get("trained_tokens", 0) for run in runs for row in run.rows))
        if all(run.error is not None for run in runs):
            advise(f"episodes: all {len(runs)} failed; the first: {runs[0].error}")
        return runs

    def _play(self, runs: Sequence[_Run], sampling: Sampling, each: Callable[..., Iterable[Any]]) -> None:
        one = Sampling.of(sampling, n=1)
        options = {"sampling": one, "group_size": sampling.n, "context_limit": self.context_limit, **self.episode}
        for run in runs:
            try:
                run.episode = Episode(self.engine, self.tokenizer, run.prompt, eid=run.eid, **options)
            except Exception as error:  # a prompt that cannot be rendered is that prompt's failure, as an engine's
                run.fail(error, "prompt")
        self._ask([run for run in runs if not run.over], self._begin, each)
        with self._bar("episodes", len(runs)) as bar:
            live = [run for run in runs if not run.over]
            bar.advance(len(runs) - len(live))
            first = True
            while live:
                samples = act_all([run.episode for run in live if run.episode is not None])
                if first and all(sample.finish_reason == "length" for sample in samples):
                    advise(
                        f"episodes: all {len(samples)} first turns were cut off at max_tokens={sampling.max_tokens}; "
                        "raise sampling.max_tokens"
                    )
                first = False
                waiting = [run for run, sample in zip(live, samples, strict=True) if self._goes_on(run, sample)]
                self._ask(waiting, _respond, each)
                left = [run for run in live if not run.over]
                bar.advance(len(live) - len(left))
                live = left

    def _begin(self, run: _Run) -> Reply | None:
        run.environment = self.environment(run.prompt)
        said = run.environment.begin()
        return None if said is None else Reply(said)

    def _goes_on(self, run: _Run, sample: Sample) -> bool:
        """Whether a turn is the environment's to answer."""
        if sample.failed:
            run.fail(sample.error or "", "turn")
        elif sample.unfinished:
            run.fail("the engine broke off", "turn")
        elif sample.finish_reason == "length" and (self.on_cut == "end" or not sample.response_ids):
            run.over = True
        return not run.over

    def _ask(
        self, runs: Sequence[_Run], ask: Callable[[_Run], Reply | None], each: Callable[..., Iterable[Any]]
    ) -> None:
        """Ask environments, several at a time; and tell the episodes, one after the other: tokenizers are shared."""

        def answer(run: _Run) -> Reply | Exception | None:
            try:
                return ask(run)
            except Exception as error:  # whatever it is, it is this run's alone
                return error

        with self._stages("environment"):
            for run, reply in zip(runs, each(answer, runs), strict=True):
                if isinstance(reply, Exception):
                    run.fail(reply, "environment")
                elif reply is not None:
                    try:
                        self._take(run, reply)
                    except Exception as error:  # an observation that cannot be rendered
                        run.fail(error, "environment")

    def _take(self, run: _Run, reply: Reply) -> None:
        """Go on with an episode after a reply."""
        episode = run.episode
        if episode is None:
            return
        if reply.reward is not None:
            run.rewards.append(reply.reward)
            if self.rewards == "sum":
                episode.score_turn(reply.reward)
        said, run.over, run.ended = reply.observation, reply.done, reply.done
        if not reply.done and len(episode.turns) >= self.max_turns:
            run.over = run.out_of_turns = True
        if said is None:
            return
        if run.over:  # no turn comes after it
            episode.info["last_observation"] = said
        else:
            message = {"role": "user", "content": said}
            episode.observe(message if isinstance(said, str) and episode.messages else said)

    # --- what they are worth --------------------------------------------------------------------------------------

    def _scored_batches(self, runs: Sequence[_Run]) -> list[Any]:
        """The episodes' rows as batches, with all rewards in `info`."""
        with self._stages("reward"):
            scores = self._scores(runs)
        if self.scorer.source is not None:
            totals = iter(scores.rewards)
            for run in runs:
                run.rows = [with_reward(row, next(totals)) for row in run.rows]
        rows = [row for run in runs for row in run.rows]
        size = self.config.micro_rollout_batch_size or len(rows)
        batches = [self._batch(rows[at : at + size]) for at in range(0, len(rows), size)]
        whole = Whole(batches)
        whole.put_numbers("reward", scores.to_tensors()[0])
        at = 0
        for batch, count in zip(batches, whole.sizes, strict=True):
            stop = at + count
            batch.info |= {"reward_error": scores.errors[at:stop]} if any(scores.errors) else {}
            if scores.metrics:
                parts = {name: torch.tensor(values[at:stop]) for name, values in scores.metrics.items()}
                batch.info["reward_metrics"] = parts
            if scores.parts:
                batch.info["reward_parts"] = [list(scores.parts)] * count
            at = stop
        return batches

    def _batch(self, rows: Sequence[Experience]) -> Any:
        """Rows as a batch with nothing computed yet: the engine's log-probs are beside it, in `extras`."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        batch = Experiences(rows).batch(
            packing_samples=self.config.packing_samples,
            pad_token_id=pad or 0,
            layout="prompt_left_response_right",
        )
        if batch.action_log_probs is not None:
            batch.extras = {**(batch.extras or {}), "logprobs": batch.action_log_probs}
        batch.action_log_probs = None
        batch.info = {**(batch.info or {}), "finish_reason": [row.finish_reason for row in rows]}
        return batch.to_device(self.passes.device)

    def _scores(self, runs: Sequence[_Run]) -> RewardResult:
        """What each row is worth: what the environment gave its run, and what the source says of it."""
        own = [float("nan") if row.reward is None else float(row.reward) for run in runs for row in run.rows]
        failed = [None if run.error is None else f"no reward: {run.error}" for run in runs for _ in run.rows]
        if self.scorer.source is None:
            return RewardResult(rewards=own, errors=failed)
        asked = [run for run in runs if run.error is None]
        # The rows of a run are one conversation: its last one is asked about, and all have its reward.
        found = self.scorer.rewards([RewardInput.of(run.rows[-1], self.tokenizer) for run in asked])
        place = {id(run): i for i, run in enumerate(asked)}
        places = [place.get(id(run)) for run in runs for _ in run.rows]
        source = [math.nan if i is None else found.rewards[i] for i in places]
        errors = [failed[row] if i is None else found.errors[i] for row, i in enumerate(places)]
        metrics = {
            name: [math.nan if i is None else values[i] for i in places] for name, values in found.metrics.items()
        }
        metrics |= {"environment": own, "source": source}
        total = [a + b for a, b in zip(own, source, strict=True)]
        return RewardResult(rewards=total, metrics=metrics, errors=errors, parts=("environment", "source"))

    def _counts(self, runs: Sequence[_Run]) -> dict[str, float]:
        """Of the episodes: how many turns they have, and how they end."""
        ends = [run.rows[-1] for run in runs]
        count = len(runs)
        return {
            "episode/turns": sum(len(run.episode.turns) for run in runs if run.episode is not None) / count,
            "episode/observed_tokens": sum(row.metrics.get("observed_tokens", 0) for row in ends) / count,
            "episode/out_of_turns": sum(run.out_of_turns for run in runs) / count,
            "episode/out_of_context": sum(row.info.get("truncated") == "context" for row in ends) / count,
            "episode/environment_errors": float(sum((run.error or "").startswith("environment") for run in runs)),
        }


def _respond(run: _Run) -> Reply:
    """What the environment makes of the last turn."""
    if run.episode is None or run.environment is None:
        raise ValueError("the episode has not begun")
    reply = run.environment.respond(run.episode.turns[-1].text or "")
    if not isinstance(reply, Reply):
        raise ValueError(f"respond: got {type(reply).__name__} back, expected a Reply")
    return reply


def _failures(runs: Sequence[_Run]) -> int:
    return sum(len(run.rows) for run in runs if run.error is not None)


__all__ = ["Environment", "EpisodeMaker", "Observation", "Reply"]
