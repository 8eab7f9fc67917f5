"""A rollout's rewards: whichever source the maker was given, asked once for all samples.

Invariant: a source sees each response alone, beside its own prompt, reference and label; a sample that failed, or that
could not be scored, has NaN and the reason why in `info`, and the others have what they would have had.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rollbook.compat.lightrft.batch import ExperienceBatch, Samples
from rollbook.compat.lightrft.estimation import RolloutBatches, batch_device
from rollbook.core.metrics import Progress
from rollbook.core.sampling import Prompt, Sample
from rollbook.rewards.functions import PARAMETER_NAMES
from rollbook.rewards.recipes import LightRFTReward, Recipe, as_reward, check_label, lightrft_reward
from rollbook.rewards.types import Reward, RewardInput, RewardResult, WrongCountError, is_reward


class Called(Reward):
    """A reward model that is no module: a callable of (sequences, attention_mask), asked batch by batch, as LightRFT
    does, with the tokens as they lie in the batch.

    >>> from rollbook.compat.lightrft.batch import ExperienceBatch
    >>> ones = torch.ones(2, 3)
    >>> batch = ExperienceBatch(ones.long(), ones, *[None] * 4, ones.long(), ones.bool(), {})
    >>> model = Called(lambda sequences, attention_mask: attention_mask.sum(1))
    >>> inputs = [RewardInput(prompt="", response="a"), RewardInput(prompt="", response="b")]
    >>> model.look([batch], inputs)
    >>> model(inputs).rewards
    [3.0, 3.0]
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self._found: dict[int, float] = {}

    def look(self, batches: Sequence[ExperienceBatch], inputs: Sequence[RewardInput]) -> None:
        """Ask the model of all batches, whose rows `inputs` are."""
        scores = [score for batch in batches for score in self.scores(batch).tolist()]
        self._found = {id(one): score for one, score in zip(inputs, scores, strict=True)}

    def scores(self, batch: ExperienceBatch) -> torch.Tensor:
        """[B] What the model says of a batch, float32, on the CPU."""
        padded = batch if batch.layout == "padded" else batch.pad()
        mask = padded.attention_mask
        found = self.model(padded.sequences, torch.ones_like(padded.sequences) if mask is None else mask)
        if isinstance(found, Mapping):
            key = next((key for key in ("score", "scores", "reward", "rewards") if key in found), None)
            if key is None:
                raise ValueError(f"reward_model: got a dict of {', '.join(map(str, found))} back, expected 'score'")
            found = found[key]
        scores = torch.as_tensor(found).detach().float().cpu().reshape(-1)
        if len(scores) != len(batch):
            raise WrongCountError(
                f"reward_model: got {len(scores)} scores back, expected {len(batch)}, one for each sample"
            )
        return scores

    def __call__(self, inputs: Sequence[RewardInput]) -> RewardResult:
        """The scores of samples that were looked at."""
        rewards = [self._found[id(one)] for one in inputs]
        errors = list(map(_score_error, rewards))
        return RewardResult(rewards=[score if math.isfinite(score) else math.nan for score in rewards], errors=errors)


def _score_error(score: float) -> str | None:
    return None if math.isfinite(score) else f"reward_model: gave {score}"


class Scorer:
    """One reward out of what LightRFT's maker can be given: a model or several, URLs, a function, a recipe.

    - `reward_model`: a module (given the engine's own tokens), a callable of (sequences, attention_mask), whatever
      `rollbook.rewards.as_reward` takes, or a list of these; an empty list: rules only.
    - `reward_fn`: LightRFT's, called once with the scores of all models; or, without models, a function of a response.
    - `recipe`: {label: [(type, key, weight), ...]}. Without a `reward_fn` it is worked out here: models by `label_map`
      (or by name, in a mapping), rules by the names of the ready functions, or of those in a mapping `reward_fn`.
    - `remote_rm_url`: a URL, a `.py` file, or several, whose scores a `reward_fn(list)` combines, else they are added.

    >>> scorer = Scorer(None, reward_fn=lambda response: len(response))
    >>> scorer.rewards([RewardInput(prompt="2+2=", response="four")]).rewards
    [4.0]
    >>> Scorer(None).rewards([RewardInput(prompt="2+2=", response="four")])
    Traceback (most recent call last):
        ...
    ValueError: reward: got no source, expected reward_model, remote_rm_url or reward_fn
    """

    def __init__(
        self,
        reward_model: Any,
        *,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_fn: Any = None,
        label_map: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        listed = isinstance(reward_model, (list, tuple))
        some = reward_model is not None and not (listed and not reward_model)
        models, self._called = _wrapped(reward_model) if some else (reward_model, [])
        self.source: Reward | None = None
        if remote_rm_url is not None and len(remote_rm_url):
            if some:
                raise ValueError("reward_model: got one beside remote_rm_url, expected one of the two")
            self.source = _remote(remote_rm_url, reward_fn)
        elif recipe is not None and (reward_fn is None or isinstance(reward_fn, Mapping)):
            pad = getattr(tokenizer, "pad_token_id", None)
            given = models if isinstance(models, (list, tuple, Mapping)) or models is None else [models]
            self.source = Recipe(
                recipe,
                functions=reward_fn,
                models=given,
                label_map=label_map if some else None,
                model_options={} if pad is None else {"pad_token_id": pad},
            )
        elif reward_fn is not None and (some or label_map is not None or recipe is not None or _is_lightrft(reward_fn)):
            self.source = lightrft_reward([] if not some else models, reward_fn, label_map, recipe, tokenizer)
        elif reward_fn is not None and listed and not _asks_for_samples(reward_fn):
            self.source = lightrft_reward([], reward_fn, label_map, recipe, tokenizer)
        elif reward_fn is not None:
            self.source = as_reward(reward_fn)
        elif some:
            plain = isinstance(models, torch.nn.Module)
            self.source = lightrft_reward(models, tokenizer=tokenizer) if plain else as_reward(models)

    def score(self, many: Sequence[Samples], batches: Sequence[ExperienceBatch], bar: Progress | None = None) -> None:
        """Put `reward` (B,), float32, `reward_metrics`, `reward_parts` and `reward_error` into each batch's `info`."""
        if type(self.source) is Called and len(batches) == 1 and "error" not in (batches[0].info or {}):
            self._score_tokens(self.source, batches[0])
            if bar is not None:
                bar.advance(len(batches[0]))
            return
        inputs = [one for samples, batch in zip(many, batches, strict=True) for one in self.inputs(samples, batch)]
        failed = [one for batch in batches for one in (batch.info or {}).get("error") or [None] * len(batch)]
        for model in self._called:
            model.look(batches, inputs)
        found = self._scored(inputs, failed)
        whole = RolloutBatches(batches)
        rewards, metrics = found.to_tensors()
        whole.put_numbers("reward", rewards)
        at = 0
        for batch, size in zip(batches, whole.sizes, strict=True):
            info, stop = batch.info or {}, at + size
            if metrics:
                home = info["reward"].device
                info["reward_metrics"] = {name: values[at:stop].to(home) for name, values in metrics.items()}
            if found.parts:
                info["reward_parts"] = [list(found.parts)] * size
            if any(error is not None for error in found.errors):
                info["reward_error"] = found.errors[at:stop]
            batch.info = info
            at = stop
        if bar is not None:
            bar.advance(at)

    def _score_tokens(self, source: Called, batch: ExperienceBatch) -> None:
        """`score` of one batch by a source that reads its tokens, without an input and a score object per sample."""
        scores = source.scores(batch)
        numbers = scores.tolist()
        batch.info = {**(batch.info or {}), "reward": scores.to(batch_device(batch), copy=True)}
        if not all(map(math.isfinite, numbers)):
            batch.info["reward"][~scores.isfinite()] = math.nan
            batch.info["reward_error"] = list(map(_score_error, numbers))

    def need(self) -> Reward:
        """The source, or an error where there is none."""
        if self.source is None:
            raise ValueError("reward: got no source, expected reward_model, remote_rm_url or reward_fn")
        return self.source

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse labels that a recipe does not have, before anything is sampled."""
        if isinstance(self.source, (Recipe, LightRFTReward)) and self.source.recipe:
            for i, prompt in enumerate(prompts):
                check_label(RewardInput(prompt="", response="", label=prompt.label), i, self.source.recipe)

    def rewards(self, inputs: Sequence[RewardInput]) -> RewardResult:
        """What the source says of samples; as many scores as samples, or an error."""
        found = self.need()(inputs)
        if len(found) != len(inputs):
            raise ValueError(f"reward: got {len(found)} scores back, expected {len(inputs)}, one for each sample")
        return found

    def _scored(self, inputs: list[RewardInput], failed: list[str | None]) -> RewardResult:
        """Scores of what was answered; what was not has none."""
        answered = [i for i, error in enumerate(failed) if error is None]
        found = self.rewards([inputs[i] for i in answered]) if answered else RewardResult(rewards=[])
        rewards = [math.nan] * len(inputs)
        errors: list[str | None] = [None if error is None else f"no response: {error}" for error in failed]
        metrics = {name: [math.nan] * len(inputs) for name in found.metrics}
        for place, i in enumerate(answered):
            rewards[i], errors[i] = found.rewards[place], found.errors[place]
            for name, values in found.metrics.items():
                metrics[name][i] = values[place]
        return RewardResult(rewards=rewards, metrics=metrics, errors=errors, parts=found.parts)

    def inputs(self, samples: Samples, batch: ExperienceBatch) -> list[RewardInput]:
        """What the source is given of each sample: of an engine's what it says itself, else what the tokens say.

        The text of a response is what the model wrote; its ids are all of the response's, a tool's among them.
        """
        if isinstance(self.source, Called):  # which is asked of the tokens in the batch
            return [RewardInput(prompt="", response="") for _ in range(len(batch))]
        if samples.rollouts is not None:
            return [RewardInput.of(_readable(one, self.tokenizer), self.tokenizer) for one in samples.rollouts]
        made = []
        packed = batch.pack()
        for i, (row, mask) in enumerate(zip(packed.sequences, packed.action_mask, strict=True)):
            response = row[len(row) - len(mask) :]
            prompt_ids = row[: len(row) - len(mask)].tolist()
            if not prompt_ids:  # the first token is not trained on, but the model wrote it
                mask = torch.cat([torch.ones_like(mask[:1]), mask[1:]])
            given = None if samples.prompts is None else samples.prompts[i]
            made.append(
                RewardInput(
                    prompt=given if isinstance(given, str) else self._text(prompt_ids),
                    response=self._text(response[mask.bool()].tolist(), skip_special_tokens=True),
                    reference=None if samples.references is None else samples.references[i],
                    label=None if samples.labels is None else samples.labels[i],
                    prompt_ids=prompt_ids,
                    response_ids=response.tolist(),
                    eid=None if batch.ids is None else batch.ids[i],
                )
            )
        return made

    def _text(self, ids: list[int], **options: Any) -> str:
        """Ids as text; none without a tokenizer, for sources that look at ids alone."""
        if self.tokenizer is None:
            return ""
        if hasattr(self.tokenizer, "decode"):
            return str(self.tokenizer.decode(ids, **options))
        return str(self.tokenizer.batch_decode([ids], **options)[0])


def _readable(one: Sample, tokenizer: Any) -> Sample:
    """A sample with a text, if an empty one: without a tokenizer nobody can read it, and a source may not want to."""
    return one if one.text is not None or tokenizer is not None else one.replace(text="")


def _wrapped(given: Any) -> tuple[Any, list[Called]]:
    """Reward models with those that are plain callables of tokens made rewards, and these."""
    called: list[Called] = []

    def wrap(one: Any) -> Any:
        if is_reward(one) or isinstance(one, (torch.nn.Module, str, Mapping, list, tuple)) or not callable(one):
            return one
        if _asks_for_samples(one):
            return one
        called.append(Called(one))
        return called[-1]

    if isinstance(given, (list, tuple)):
        made: Any = [wrap(one) for one in given]
    elif isinstance(given, Mapping):
        made = {key: wrap(one) for key, one in given.items()}
    else:
        made = wrap(given)
    return made, called


def _remote(urls: str | Sequence[str], reward_fn: Any) -> Reward:
    if reward_fn is None:
        return as_reward(urls)
    if len(_names(reward_fn)) > 1:
        raise ValueError(
            f"reward_fn: got {', '.join(_names(reward_fn))} as parameters, expected one beside remote_rm_url: the list "
            "of the URLs' scores"
        )
    return as_reward([urls] if isinstance(urls, str) else urls, combine=reward_fn)


def _is_lightrft(function: Any) -> bool:
    """Whether a function has the arguments of LightRFT's `reward_fn`."""
    names = _names(function)
    return "model_reward_list" in names or "label_map" in names


def _asks_for_samples(function: Any) -> bool:
    """Whether a callable's parameters are fields of a sample: then it is a function of responses."""
    names = _names(function)
    return isinstance(function, (str, Mapping)) or is_reward(function) or (bool(names) and names[0] in PARAMETER_NAMES)


def _names(function: Any) -> list[str]:
    """The parameters that a callable must be given by name or place."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)]
