"""The rewards of a rollout: what LightRFT's maker can be given, as one `Reward`.

Invariant: a reward sees each response alone, with its own prompt, reference and label; a sample that failed or could
not be scored has NaN and the reason in `info`, and the others have the scores they would have had.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

import torch

from rollbook.compat.lightrft.batch import ExperienceBatch, Samples
from rollbook.compat.lightrft.samples import RolloutBatches, batch_device
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import StepMetrics
from rollbook.core.sampling import Prompt
from rollbook.rewards.functions import PARAMETER_NAMES
from rollbook.rewards.recipes import LightRFTReward, Recipe, as_reward, check_label, lightrft_reward
from rollbook.rewards.types import Reward, RewardInput, RewardResult, WrongCountError, is_reward
from rollbook.train import pipeline

RewardFunction: TypeAlias = Callable[..., Any] | Mapping[str, Any] | str
RewardModels: TypeAlias = RewardFunction | Sequence[Any] | None


class TokenReward(Reward):
    """A reward model that is a plain callable of (sequences, attention_mask), called batch by batch as in LightRFT.

    >>> ones = torch.ones(2, 3)
    >>> batch = ExperienceBatch(ones.long(), ones, *[None] * 4, ones.long(), ones.bool(), {})
    >>> model = TokenReward(lambda sequences, attention_mask: attention_mask.sum(1))
    >>> model.score_batches([batch], ["a", "b"])
    >>> model([RewardInput(prompt="", response="", eid=None)])
    Traceback (most recent call last):
        ...
    ValueError: reward_model: got a sample of another rollout
    >>> model.scores(batch)
    tensor([3., 3.])
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self._scores: dict[object, float] = {}

    def score_batches(self, batches: Sequence[ExperienceBatch], keys: Sequence[object]) -> None:
        """Call the model for all batches; `keys` name their rows: the uid, or the `id` of the row's `RewardInput`."""
        scores = [score for batch in batches for score in self.scores(batch).tolist()]
        self._scores = dict(zip(keys, scores, strict=True))

    def scores(self, batch: ExperienceBatch) -> torch.Tensor:
        """[B] The model's scores of a batch, float32, on the CPU."""
        padded = batch if batch.layout == "padded" else batch.pad()
        mask = padded.attention_mask
        answer = self.model(padded.sequences, torch.ones_like(padded.sequences) if mask is None else mask)
        if isinstance(answer, Mapping):
            key = next((key for key in ("score", "scores", "reward", "rewards") if key in answer), None)
            if key is None:
                raise ValueError(f"reward_model: got a dict of {', '.join(map(str, answer))} back, expected 'score'")
            answer = answer[key]
        scores = torch.as_tensor(answer).detach().float().cpu().reshape(-1)
        if len(scores) != len(batch):
            raise WrongCountError(
                f"reward_model: got {len(scores)} scores back, expected {len(batch)}, one for each sample"
            )
        return scores

    def __call__(self, inputs: Sequence[RewardInput]) -> RewardResult:
        """Return the scores of samples of the batches that were scored."""
        rewards = []
        for scored in inputs:
            key: object = id(scored)
            if key not in self._scores:
                key = None if scored.eid is None else scored.eid.uid
            if key not in self._scores:
                raise ValueError("reward_model: got a sample of another rollout")
            rewards.append(self._scores[key])
        errors = [_score_error(score) for score in rewards]
        return RewardResult(rewards=[score if isfinite(score) else math.nan for score in rewards], errors=errors)


def _score_error(score: float) -> str | None:
    return None if isfinite(score) else f"reward_model: gave {score}"


class Scorer(Reward):
    """The one reward of what LightRFT's maker can be given: a model or several, URLs, a function, a recipe.

    Args:
        reward_model: A module (called with the engine's own tokens), a callable of (sequences, attention_mask),
            whatever `rollbook.rewards.as_reward` takes, or a list of these; an empty list: rules only.
        remote_rm_url: A URL, a `.py` file, or several, whose scores a `reward_fn(list)` combines; without one they are
            added.
        reward_fn: LightRFT's, called once with the scores of all models; or, without models, a function of a response.
        label_map: LightRFT's, from a model's key to its index.
        recipe: {label: [(type, key, weight), ...]}. Without a `reward_fn` it is applied here: models by `label_map` (or
            by name, in a mapping), rules by the names of the ready functions, or of those in a mapping `reward_fn`.
        tokenizer: Decodes responses without a text.

    >>> scorer = Scorer(None, reward_fn=lambda response: len(response))
    >>> scorer([RewardInput(prompt="2+2=", response="four")]).rewards
    [4.0]
    >>> Scorer(None)([RewardInput(prompt="2+2=", response="four")])
    Traceback (most recent call last):
        ...
    ValueError: reward: got no source, expected reward_model, remote_rm_url or reward_fn
    """

    def __init__(
        self,
        reward_model: RewardModels,
        *,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_fn: Any = None,
        label_map: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        is_list = isinstance(reward_model, (list, tuple))
        has_models = reward_model is not None and not (is_list and not reward_model)
        models, self._token_rewards = _wrap_models(reward_model) if has_models else (reward_model, [])
        self.reward: Reward | None = None
        if remote_rm_url is not None and len(remote_rm_url):
            if has_models:
                raise ValueError("reward_model: got one beside remote_rm_url, expected one of the two")
            self.reward = _remote_reward(remote_rm_url, reward_fn)
        elif recipe is not None and (reward_fn is None or isinstance(reward_fn, Mapping)):
            pad = getattr(tokenizer, "pad_token_id", None)
            self.reward = Recipe(
                recipe,
                functions=reward_fn,
                models=models if isinstance(models, (list, tuple, Mapping)) or models is None else [models],
                label_map=label_map if has_models else None,
                model_options={} if pad is None else {"pad_token_id": pad},
            )
        elif reward_fn is not None and (
            has_models or label_map is not None or recipe is not None or _is_lightrft(reward_fn)
        ):
            self.reward = lightrft_reward(models if has_models else [], reward_fn, label_map, recipe, tokenizer)
        elif reward_fn is not None and is_list and not _reads_samples(reward_fn):
            self.reward = lightrft_reward([], reward_fn, label_map, recipe, tokenizer)
        elif reward_fn is not None:
            self.reward = as_reward(reward_fn)
        elif has_models and models is not None:
            is_module = isinstance(models, torch.nn.Module)
            self.reward = lightrft_reward(models, tokenizer=tokenizer) if is_module else as_reward(models)
        self._result = RewardResult(rewards=[])

    @property
    def reads_tokens(self) -> bool:
        """Whether the only reward is a callable of tokens."""
        return type(self.reward) is TokenReward

    def require(self) -> Reward:
        """Return the reward, or raise `ValueError` if there is none."""
        if self.reward is None:
            raise ValueError("reward: got no source, expected reward_model, remote_rm_url or reward_fn")
        return self.reward

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Reject labels that a recipe does not have, before anything is sampled."""
        if isinstance(self.reward, (Recipe, LightRFTReward)) and self.reward.recipe:
            for i, prompt in enumerate(prompts):
                check_label(RewardInput(prompt="", response="", label=prompt.label), i, self.reward.recipe)

    def __call__(self, inputs: Sequence[RewardInput]) -> RewardResult:
        """Score samples."""
        self._result = self.require()(inputs)
        if len(self._result) != len(inputs):
            raise ValueError(
                f"reward: got {len(self._result)} scores back, expected {len(inputs)}, one for each sample"
            )
        return self._result

    def score(
        self,
        parts: Sequence[Samples],
        batches: Sequence[ExperienceBatch],
        records: Experiences | None,
        metrics: StepMetrics,
    ) -> Experiences | None:
        """Put `reward` (B,), float32, `reward_metrics`, `reward_parts` and `reward_error` into each batch's `info`.

        Args:
            parts: The samples of a rollout.
            batches: Their batches.
            records: Their records, if an engine made them all.
            metrics: Collects timings.

        Returns:
            The records with their rewards.
        """
        if records is None:
            with metrics.time("reward"):
                inputs = [
                    sample for part, batch in zip(parts, batches, strict=True) for sample in self.inputs(part, batch)
                ]
                self._score_batches(batches, list(map(id, inputs)))
                result = self(inputs)
        else:
            with metrics.time("reward"):
                self._score_batches(batches, [eid.uid for eid in records.eids()])
            prompts = [sample.prompt for part in parts for sample in part.rollouts or ()]
            records = pipeline.score(records, self, self.tokenizer, prompts=prompts, metrics=metrics)
            reported = records.values("metrics")
            result = RewardResult(
                rewards=records.values("reward"),
                metrics={name: [numbers[name] for numbers in reported] for name in self._result.metrics},
                errors=[info.get("reward_error") for info in records.values("info")],
                parts=self._result.parts,
            )
        put_rewards(batches, result)
        return records

    def _score_batches(self, batches: Sequence[ExperienceBatch], keys: Sequence[object]) -> None:
        for model in self._token_rewards:
            model.score_batches(batches, keys)

    def score_tokens(self, batch: ExperienceBatch) -> None:
        """`score` of one batch by a callable of its tokens, without an input per sample."""
        reward = self.reward
        scores = reward.scores(batch)  # type: ignore[union-attr]
        numbers = scores.tolist()
        batch.info = {**(batch.info or {}), "reward": scores.to(batch_device(batch), copy=True)}
        if not all(map(isfinite, numbers)):
            batch.info["reward"][~scores.isfinite()] = math.nan
            batch.info["reward_error"] = list(map(_score_error, numbers))

    def inputs(self, samples: Samples, batch: ExperienceBatch) -> list[RewardInput]:
        """Make the inputs of samples that no engine made, from their tokens.

        The text of a response is what the model wrote; its ids are all of the response's, a tool's among them.
        """
        if self.reads_tokens:
            return [RewardInput(prompt="", response="") for _ in range(len(batch))]
        inputs = []
        packed = batch.pack()
        for i, (row, mask) in enumerate(zip(packed.sequences, packed.action_mask, strict=True)):
            response = row[len(row) - len(mask) :]
            prompt_ids = row[: len(row) - len(mask)].tolist()
            if not prompt_ids:  # the first token is not trained on, but the model wrote it
                mask = torch.cat([torch.ones_like(mask[:1]), mask[1:]])
            prompt = None if samples.prompts is None else samples.prompts[i]
            inputs.append(
                RewardInput(
                    prompt=prompt if isinstance(prompt, str) else self._decode(prompt_ids),
                    response=self._decode(response[mask.bool()].tolist(), skip_special_tokens=True),
                    reference=None if samples.references is None else samples.references[i],
                    label=None if samples.labels is None else samples.labels[i],
                    prompt_ids=prompt_ids,
                    response_ids=response.tolist(),
                    eid=None if batch.ids is None else batch.ids[i],
                )
            )
        return inputs

    def _decode(self, ids: list[int], **options: bool) -> str:
        """Decode ids; "" without a tokenizer, for rewards that read ids alone."""
        if self.tokenizer is None:
            return ""
        if hasattr(self.tokenizer, "decode"):
            return str(self.tokenizer.decode(ids, **options))
        return str(self.tokenizer.batch_decode([ids], **options)[0])


def put_rewards(batches: Sequence[ExperienceBatch], scores: RewardResult) -> None:
    """Put the scores of all rows into the `info` of their batches."""
    rewards, metrics = scores.to_tensors()
    RolloutBatches(batches).put_numbers("reward", rewards)
    start = 0
    for batch in batches:
        info, stop = batch.info or {}, start + len(batch)
        if metrics:
            device = info["reward"].device
            info["reward_metrics"] = {name: numbers[start:stop].to(device) for name, numbers in metrics.items()}
        if scores.parts:
            info["reward_parts"] = [list(scores.parts)] * len(batch)
        if any(error is not None for error in scores.errors):
            info["reward_error"] = scores.errors[start:stop]
        batch.info = info
        start = stop


def _wrap_models(models: RewardModels) -> tuple[Any, list[TokenReward]]:
    """Reward models with plain callables of tokens wrapped in `TokenReward`, and these."""
    token_rewards: list[TokenReward] = []

    def wrap(model: Any) -> Any:
        if is_reward(model) or isinstance(model, (torch.nn.Module, str, Mapping, list, tuple)) or not callable(model):
            return model
        if _reads_samples(model):
            return model
        token_rewards.append(TokenReward(model))
        return token_rewards[-1]

    if isinstance(models, (list, tuple)):
        return [wrap(model) for model in models], token_rewards
    if isinstance(models, Mapping):
        return {key: wrap(model) for key, model in models.items()}, token_rewards
    return wrap(models), token_rewards


def _remote_reward(urls: str | Sequence[str], reward_fn: Callable[..., Any] | None) -> Reward:
    if reward_fn is None:
        return as_reward(urls)
    if len(_parameter_names(reward_fn)) > 1:
        raise ValueError(
            f"reward_fn: got {', '.join(_parameter_names(reward_fn))} as parameters, expected one beside "
            "remote_rm_url: the list of the URLs' scores"
        )
    return as_reward([urls] if isinstance(urls, str) else urls, combine=reward_fn)


def _is_lightrft(function: RewardFunction) -> bool:
    """Whether a function has the arguments of LightRFT's `reward_fn`."""
    names = _parameter_names(function)
    return "model_reward_list" in names or "label_map" in names


def _reads_samples(function: RewardFunction) -> bool:
    """Whether a callable's parameters are fields of a sample, so that it is a function of responses."""
    names = _parameter_names(function)
    return isinstance(function, (str, Mapping)) or is_reward(function) or (bool(names) and names[0] in PARAMETER_NAMES)


def _parameter_names(function: RewardFunction) -> list[str]:
    """The parameters that a callable takes by position."""
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
