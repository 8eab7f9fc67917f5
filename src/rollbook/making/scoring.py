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

from rollbook.algorithms.registry import near
from rollbook.batch import ExperienceBatch, Samples
from rollbook.making.whole import Whole
from rollbook.progress import Progress
from rollbook.rewards.choose import as_reward
from rollbook.rewards.recipes import lightrft_reward
from rollbook.rewards.types import Reward, RewardInput, Scores


class Scorer:
    """One reward out of what LightRFT's maker can be given: a model or several, URLs, a function, a recipe.

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
        self.called: Callable[..., Any] | None = None
        """A model that takes (sequences, attention_mask) and is no module: asked batch by batch, as LightRFT does."""
        self.source: Reward | None = None
        lone = not isinstance(reward_model, (list, tuple, Mapping, Reward, torch.nn.Module, str))
        if remote_rm_url is not None and len(remote_rm_url):
            if reward_model is not None and reward_model != []:
                raise ValueError("reward_model: got one beside remote_rm_url, expected one of the two")
            combine = {} if reward_fn is None else {"combine": reward_fn}
            self.source = as_reward(remote_rm_url, **combine)
        elif recipe is not None or label_map is not None or _is_lightrft(reward_fn):
            models = [] if reward_model is None else reward_model
            self.source = lightrft_reward(models, reward_fn, label_map, recipe, tokenizer)
        elif reward_fn is not None:
            if reward_model is not None and reward_model != []:
                raise ValueError(
                    "reward_fn: got a function of responses beside a reward_model, expected LightRFT's "
                    "reward_fn(model_reward_list, labels, queries, refs, label_map), or one of the two"
                )
            self.source = as_reward(reward_fn)
        elif reward_model is not None and lone and callable(reward_model) and _takes_sequences(reward_model):
            self.called = reward_model
        elif reward_model is not None and reward_model != []:
            options = {"tokenizer": tokenizer} if isinstance(reward_model, (torch.nn.Module, list, tuple)) else {}
            self.source = as_reward(reward_model, **options)

    def score(self, many: Sequence[Samples], batches: Sequence[ExperienceBatch], bar: Progress | None = None) -> None:
        """Put `reward` (B,), float32, `reward_metrics` and `reward_error` into the `info` of each batch."""
        if self.called is not None:
            found = Scores(rewards=[score for batch in batches for score in self._ask(self.called, batch)])
        else:
            inputs = [one for samples, batch in zip(many, batches, strict=True) for one in self.inputs(samples, batch)]
            failed = [one for batch in batches for one in (batch.info or {}).get("error") or [None] * len(batch)]
            found = self._scored(inputs, failed)
        whole = Whole(batches)
        rewards, metrics = found.to_tensors()
        whole.put_numbers("reward", rewards)
        at = 0
        for batch, size in zip(batches, whole.sizes, strict=True):
            info, stop = batch.info or {}, at + size
            if metrics:
                home = info["reward"].device
                info["reward_metrics"] = {name: values[at:stop].to(home) for name, values in metrics.items()}
            if any(error is not None for error in found.errors):
                info["reward_error"] = found.errors[at:stop]
            batch.info = info
            at = stop
        if bar is not None:
            bar.advance(at)

    def rewards(self, inputs: Sequence[RewardInput]) -> Scores:
        """What the source says of samples; as many scores as samples, or an error."""
        if self.source is None:
            raise ValueError("reward: got no source, expected reward_model, remote_rm_url or reward_fn")
        found = self.source(inputs)
        if len(found) != len(inputs):
            raise ValueError(f"reward: got {len(found)} scores back, expected {len(inputs)}, one for each sample")
        return found

    def _scored(self, inputs: list[RewardInput], failed: list[str | None]) -> Scores:
        """Scores of what was answered; what was not has none."""
        answered = [i for i, error in enumerate(failed) if error is None]
        found = self.rewards([inputs[i] for i in answered]) if answered else Scores(rewards=[])
        rewards = [math.nan] * len(inputs)
        errors: list[str | None] = [None if error is None else f"no response: {error}" for error in failed]
        metrics = {name: [math.nan] * len(inputs) for name in found.metrics}
        for place, i in enumerate(answered):
            rewards[i], errors[i] = found.rewards[place], found.errors[place]
            for name, values in found.metrics.items():
                metrics[name][i] = values[place]
        return Scores(rewards=rewards, metrics=metrics, errors=errors)

    def inputs(self, samples: Samples, batch: ExperienceBatch) -> list[RewardInput]:
        """What the source is given of each sample: of an engine's what it says itself, else what the tokens say."""
        if samples.rollouts is not None:
            return [
                RewardInput.of(one if one.text is not None or self.tokenizer is not None else one.replace(text=""),
                               self.tokenizer)
                for one in samples.rollouts
            ]  # fmt: skip
        if self.tokenizer is None:
            raise ValueError("tokenizer: got None, expected one, to read responses with")
        made = []
        for i, (row, mask) in enumerate(zip(*_responses(batch), strict=True)):
            ids = row[len(row) - len(mask) :][mask].tolist()
            prompt_ids = row[: len(row) - len(mask)].tolist()
            given = None if samples.prompts is None else samples.prompts[i]
            made.append(
                RewardInput(
                    prompt=given if isinstance(given, str) else self.tokenizer.decode(prompt_ids),
                    response=self.tokenizer.decode(ids, skip_special_tokens=True),
                    reference=None if samples.references is None else samples.references[i],
                    label=None if samples.labels is None else samples.labels[i],
                    prompt_ids=prompt_ids,
                    response_ids=ids,
                    eid=None if batch.ids is None else batch.ids[i],
                )
            )
        return made

    def _ask(self, model: Callable[..., Any], batch: ExperienceBatch) -> list[float]:
        padded = batch if batch.layout == "padded" else batch.pad()
        found = model(padded.sequences, padded.attention_mask)
        found = found["score"] if isinstance(found, Mapping) else found
        scores = torch.as_tensor(found).detach().float().cpu().reshape(-1)
        if len(scores) != len(batch):
            raise ValueError(f"reward_model: got {len(scores)} scores back, expected {len(batch)}, one for each sample")
        return scores.tolist()


def _responses(batch: ExperienceBatch) -> tuple[Any, Any]:
    """Each sample's tokens, and the mask of its response."""
    packed = batch.pack()
    return packed.sequences, packed.action_mask


_LIGHTRFT = ("model_reward_list", "labels", "queries", "refs", "label_map")


def _is_lightrft(function: Any) -> bool:
    """Whether a function has the arguments of LightRFT's `reward_fn`."""
    if function is None or isinstance(function, Reward) or not callable(function):
        return False
    names = list(_parameters(function))
    return any(name in names for name in ("model_reward_list", "label_map")) or (
        len(names) >= 4 and "labels" in names and ("refs" in names or "queries" in names)
    )


def _takes_sequences(model: Any) -> bool:
    """Whether a callable takes (sequences, attention_mask), as a reward model does."""
    names = list(_parameters(model))
    if len(names) < 2:
        return False
    if "mask" in names[1] or names[0] in ("sequences", "input_ids", "seq", "tokens"):
        return True
    raise ValueError(
        f"reward_model: got a callable of {', '.join(names)}, expected (sequences, attention_mask)"
        f"{near(names[0], ['sequences', 'input_ids'])}"
    )


def _parameters(function: Any) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
