"""Rewards as LightRFT passes them: modules, callables of tokens, URLs, `reward_fn`, label map and recipe.

Invariant: a reward reads each response alone, with its own prompt, reference and label; a sample that failed or could
not be scored has NaN and the reason in `info`, and does not change the scores of others.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rollbook.compat.lightrft.batch import ExperienceBatch, Samples
from rollbook.compat.lightrft.samples import RolloutBatches
from rollbook.core.checks import suggest
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import StepMetrics
from rollbook.core.sampling import Prompt
from rollbook.core.vocabulary import Tokenizer, join_fingerprints, source_fingerprint
from rollbook.rewards.functions import PARAMETER_NAMES, FileFunction, read_scores
from rollbook.rewards.models import ModelReward
from rollbook.rewards.recipes import Recipe, as_reward, check_label, check_line, score_all, score_all_async
from rollbook.rewards.types import (
    OnError,
    Reward,
    RewardInput,
    RewardResult,
    WrongCountError,
    as_inputs,
    check_on_error,
    failed_score,
    is_reward,
    locate,
)
from rollbook.train import pipeline

if TYPE_CHECKING:
    from rollbook.rewards.recipes import RewardLike

RewardFunction: TypeAlias = Callable[..., Any] | Mapping[str, Any] | str
"""A reward function, functions by name, or the path of one."""
RewardModels: TypeAlias = RewardFunction | Sequence[Any] | None
"""A reward model, several, or any reward of `rollbook.rewards`."""


_TEXT_ARGUMENTS: dict[str, Callable[[Sequence[RewardInput]], Any]] = {
    "prompt_and_output": lambda inputs: [scored.query for scored in inputs],
    "prompt_and_outputs": lambda inputs: [scored.query for scored in inputs],
    "raw_images": lambda inputs: [list(scored.images) for scored in inputs],
    "img_num": lambda inputs: [len(scored.images) for scored in inputs],
    "references": lambda inputs: [scored.reference for scored in inputs],
    "labels": lambda inputs: [scored.label for scored in inputs],
}


class TextModelReward(ModelReward):
    """A module written for LightRFT, whose `forward` has a parameter `prompt_and_output(s)` beside the tokens."""

    def model_arguments(self, inputs: Sequence[RewardInput]) -> dict[str, Any]:
        """Return texts, images, references and labels, as far as the module takes them."""
        parameters = inspect.signature(self.model.forward).parameters
        return {name: read(inputs) for name, read in _TEXT_ARGUMENTS.items() if name in parameters}


def _takes_texts(model: object) -> bool:
    """Return whether a module takes `prompt_and_output(s)`."""
    return isinstance(model, torch.nn.Module) and any(
        name.startswith("prompt_and_output") for name in inspect.signature(model.forward).parameters
    )


@dataclass(frozen=True)
class PositionalFile(FileFunction):
    """A file whose `reward_func` gets (queries, prompts, references) by position, if its parameters have other names.

    A name that is nearly one of a sample's fields is rejected later.
    """

    def load(self) -> Callable[..., Any]:
        """Load the function with its options bound."""
        function = super().load()
        arguments = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        places = [argument for argument in arguments if argument.kind in kinds and argument.default is argument.empty]
        names = [argument.name for argument in places]
        if len(names) not in (1, 2, 3) or any(
            difflib.get_close_matches(name, PARAMETER_NAMES, 1, 0.8) for name in names
        ):
            return function

        def called(queries: list[str], prompts: list[str], references: list[Any]) -> Any:
            return function(*(queries, prompts, references)[: len(names)])

        return called


class LightRFTReward(Reward):
    """LightRFT's `reward_fn`, label map and recipe, with or without reward models.

    `reward_fn(model_reward_list=, labels=, queries=, refs=, label_map=)` is called once for all samples and returns
    (rewards, metrics), or rewards. `queries` are the responses without the prompts (LightRFT's include the prompt,
    whose text can then satisfy a pattern). `model_reward_list` has one (B,) float32 tensor per model.

    Args:
        models: The reward models.
        reward_fn: The function.
        label_map: Index in `models` by key.
        recipe: Components by label. A model then runs only on the samples whose label needs it, with 0 for the others.
        on_error: As in `FunctionReward`. A sample that a model could not score has failed.
    """

    def __init__(
        self,
        models: Sequence[Reward],
        reward_fn: Callable[..., Any],
        label_map: Mapping[str, int] | None = None,
        recipe: Mapping[str, Sequence[Sequence[Any]]] | None = None,
        on_error: OnError = "exclude",
    ) -> None:
        if not callable(reward_fn):
            raise ValueError(f"reward_fn: got {type(reward_fn).__name__}, expected a function")
        self.models = list(models)
        self.reward_fn = reward_fn
        self.label_map = dict(label_map or {})
        self.recipe = dict(recipe or {})
        self.on_error: OnError = check_on_error(on_error)
        keys = {index: key for key, index in self.label_map.items()}
        self._keys = [keys.get(index) for index in range(len(self.models))]
        if self.recipe and None in self._keys:
            raise ValueError(f"label_map: missing a key for model {self._keys.index(None)}, required by the recipe")
        # The models that each label needs. A recipe may list labels that no sample has, so a missing model is an
        # error only when a sample needs it.
        self._needs: dict[str, set[str]] = {}
        for label, lines in self.recipe.items():
            components = [check_line(label, line) for line in lines]
            self._needs[label] = {name for kind, name, weight in components if kind == "model" and weight != 0.0}

    def __call__(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples."""
        inputs = as_inputs(inputs)
        return self._combine(inputs, score_all(self._jobs(inputs)))

    async def score_async(self, inputs: Sequence[Any]) -> RewardResult:
        """Score samples without blocking the event loop; `reward_fn` runs in a thread."""
        inputs = as_inputs(inputs)
        results = await score_all_async(self._jobs(inputs))
        return await asyncio.to_thread(self._combine, inputs, results)

    def source(self) -> str | None:
        """Fingerprint `reward_fn` and the models."""
        models = {str(i): model.source() for i, model in enumerate(self.models)}
        return join_fingerprints({**models, "reward_fn": source_fingerprint(self.reward_fn)})

    def close(self) -> None:
        """Close every model."""
        for model in self.models:
            model.close()

    def _places(self, inputs: Sequence[RewardInput], key: str | None) -> list[int]:
        return [i for i, scored in enumerate(inputs) if not self.recipe or key in self._needs[scored.label]]

    def _jobs(self, inputs: Sequence[RewardInput]) -> list[tuple[Reward, list[RewardInput]]]:
        if self.recipe:
            keys = [key for key in self._keys if key is not None]
            for i, scored in enumerate(inputs):
                check_label(scored, i, self.recipe)
                for name in sorted(self._needs[scored.label].difference(keys)):
                    expected = f"expected one of the models{suggest(name, keys)}"
                    raise ValueError(f"reward_recipe[{scored.label!r}]: got model {name!r}, {expected}")
        return [
            (model, [inputs[i] for i in self._places(inputs, key)])
            for model, key in zip(self.models, self._keys, strict=True)
        ]

    def _combine(self, inputs: Sequence[RewardInput], results: Sequence[RewardResult]) -> RewardResult:
        n = len(inputs)
        if not n:
            return RewardResult(rewards=[])
        columns, errors = [], dict[int, str]()
        for key, scores in zip(self._keys, results, strict=True):
            column = torch.zeros(n, dtype=torch.float32)
            for i, reward, error in zip(self._places(inputs, key), scores.rewards, scores.errors, strict=True):
                column[i] = 0.0 if isnan(reward) else reward
                if error is not None:
                    errors[i] = error
            columns.append(column)
        parts = read_scores(
            self.reward_fn(
                model_reward_list=columns,
                labels=[scored.label for scored in inputs],
                queries=[scored.response for scored in inputs],
                refs=[scored.reference for scored in inputs],
                label_map=dict(self.label_map),
            ),
            n,
        )
        combined = RewardResult(rewards=[nan] * n)
        for i, (reward, metrics, error) in enumerate(parts):
            for name, value in metrics.items():
                combined.metrics.setdefault(name, [nan] * n)[i] = value
            failure = errors.get(i) or (None if error is None else f"reward_fn: {error}")
            if failure is not None:
                combined.errors[i] = failure
                reward = failed_score(self.on_error, locate(inputs[i], i), failure)
            combined.rewards[i] = reward
        return combined


def lightrft_reward(
    reward_models: RewardLike | Sequence[RewardLike] | None,
    reward_fn: Callable[..., Any] | None = None,
    label_map: Mapping[str, int] | None = None,
    recipe: Mapping[str, Sequence[Sequence[Any]]] | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Reward:
    """Build a reward from LightRFT's arguments.

    Args:
        reward_models: A module, or a list of them; an empty list with a `reward_fn` of rules. One module without a
            `reward_fn` is that model's score.
        reward_fn: Combines the scores of the models.
        label_map: Index in `reward_models` by key.
        recipe: Components by label.
        tokenizer: Tokenizer of the policy, whose ids the models are given.
        options: Options of each model (`rows`, `tokens`, `device`, ...).

    Returns:
        The reward of the single model, or a `LightRFTReward` that combines the models.

    Raises:
        ValueError: There is neither a model nor a `reward_fn`, or there are several models without a `reward_fn`.

    >>> def reward_fn(model_reward_list, labels, queries, refs, label_map):
    ...     accuracy = [float(query == ref) for query, ref in zip(queries, refs)]
    ...     return accuracy, {"accuracy_reward": accuracy}
    >>> scores = lightrft_reward([], reward_fn)([RewardInput(prompt="2 + 2 = ", response="4", reference="4")])
    >>> scores.rewards, scores.metrics
    ([1.0], {'accuracy_reward': [1.0]})
    """

    if reward_models is None and reward_fn is None:
        raise ValueError("reward_models: got None without a reward_fn, expected a model, or a reward_fn of rules")
    sources: list[Any] = [] if reward_models is None else [reward_models]
    if isinstance(reward_models, (list, tuple)):
        sources = list(reward_models)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is not None:
        options.setdefault("pad_token_id", pad)
    models = [model if is_reward(model) else as_reward(model, **options) for model in sources]
    if reward_fn is None:
        if len(models) != 1:
            raise ValueError(f"reward_fn: got None with {len(models)} models, expected a function that combines them")
        return models[0]
    return LightRFTReward(models, reward_fn, label_map, recipe)


class TokenReward(Reward):
    """A reward model that is a plain callable of (sequences, attention_mask), called batch by batch as in LightRFT.

    Args:
        model: The callable; returns scores (B,), or a dict with `score`, `scores`, `reward` or `rewards`.

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
        self._scores: dict[int | str, float] = {}

    def score_batches(self, batches: Sequence[ExperienceBatch], keys: Sequence[int | str]) -> None:
        """Call the model for all batches; `keys` identify rows: the uid, or the `id()` of the row's `RewardInput`."""
        scores = [score for batch in batches for score in self.scores(batch).tolist()]
        self._scores = dict(zip(keys, scores, strict=True))

    def scores(self, batch: ExperienceBatch) -> torch.Tensor:
        """[B] Return the model's scores of a batch as float32 on the CPU."""
        padded = batch if batch.layout == "padded" else batch.pad()
        mask = padded.attention_mask
        answer = self.model(padded.sequences, torch.ones_like(padded.sequences) if mask is None else mask)
        if not isinstance(answer, torch.Tensor):
            if isinstance(answer, Mapping):
                key = next((key for key in ("score", "scores", "reward", "rewards") if key in answer), None)
                if key is None:
                    raise ValueError(
                        f"reward_model: returned a dict of {', '.join(map(str, answer))}, expected 'score'"
                    )
                answer = answer[key]
            answer = torch.as_tensor(answer)
        scores = answer.detach().float().cpu().reshape(-1)
        count = scores.numel()
        if count != len(batch):
            raise WrongCountError(f"reward_model: returned {count} scores, expected {len(batch)}, one for each sample")
        return scores

    def __call__(self, inputs: Sequence[RewardInput]) -> RewardResult:
        """Return the scores of samples of the batches that were scored."""
        rewards = []
        for scored in inputs:
            key: int | str = id(scored)
            if key not in self._scores and scored.eid is not None:
                key = scored.eid.uid
            if key not in self._scores:
                raise ValueError("reward_model: got a sample of another rollout")
            rewards.append(self._scores[key])
        errors = [_score_error(score) for score in rewards]
        return RewardResult(rewards=[score if isfinite(score) else math.nan for score in rewards], errors=errors)


def _score_error(score: float) -> str | None:
    return None if isfinite(score) else f"reward_model: returned {score}"


class Scorer(Reward):
    """The reward of LightRFT's maker: models, URLs, a function or a recipe, combined into one `Reward`.

    Args:
        reward_model: A module (called with the engine's tokens), a callable of (sequences, attention_mask), anything
            that `rollbook.rewards.as_reward` accepts, or a list of these; an empty list: rules only.
        remote_rm_url: A URL, a `.py` file, or several, whose scores `reward_fn(list)` combines; without it they are
            added.
        reward_fn: LightRFT's, called once with the scores of all models; or, without models, a function of a response.
        label_map: LightRFT's, from a model's key to its index.
        recipe: {label: [(type, key, weight), ...]}. Without a `reward_fn` it is applied here: models by `label_map` (or
            by name, in a mapping), rules by the names of built-in functions, or of those in a mapping `reward_fn`.
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
        reward_fn: RewardFunction | None = None,
        label_map: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        function: Any = reward_fn  # its kind is checked below
        is_list = isinstance(reward_model, (list, tuple))
        has_models = reward_model is not None and not (is_list and not reward_model)
        models, self._token_rewards = _wrap_models(reward_model, tokenizer) if has_models else (reward_model, [])
        self.reward: Reward | None = None
        if remote_rm_url is not None and len(remote_rm_url):
            if has_models:
                raise ValueError("reward_model: got it with remote_rm_url, expected one of the two")
            self.reward = _remote_reward(remote_rm_url, function)
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
            self.reward = lightrft_reward(models if has_models else [], function, label_map, recipe, tokenizer)
        elif reward_fn is not None and is_list and not _reads_samples(reward_fn):
            self.reward = lightrft_reward([], function, label_map, recipe, tokenizer)
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
                f"reward: returned {len(self._result)} scores, expected {len(inputs)}, one for each sample"
            )
        return self._result

    def score(
        self,
        parts: Sequence[Samples],
        batches: Sequence[ExperienceBatch],
        records: Experiences | None,
        metrics: StepMetrics,
    ) -> Experiences | None:
        """Score a rollout: set `reward` (B,), `reward_metrics`, `reward_parts` and `reward_error` in `info`.

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
                    sample
                    for sample_batch, batch in zip(parts, batches, strict=True)
                    for sample in self.inputs(sample_batch, batch)
                ]
                self._score_batches(batches, list(map(id, inputs)))
                result = self(inputs)
        else:
            with metrics.time("reward"):
                self._score_batches(batches, [eid.uid for eid in records.eids()])
            prompts = [sample.prompt for sample_batch in parts for sample in sample_batch.rollouts or ()]
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

    def _score_batches(self, batches: Sequence[ExperienceBatch], keys: Sequence[int | str]) -> None:
        for model in self._token_rewards:
            model.score_batches(batches, keys)

    def score_tokens(self, batch: ExperienceBatch) -> None:
        """Score one batch on the CPU by a callable of its tokens, without building an input per sample."""
        reward = self.reward
        scores = reward.scores(batch)  # type: ignore[union-attr]
        numbers = scores.tolist()
        batch.info = {**(batch.info or {}), "reward": scores.clone()}
        if not all(map(isfinite, numbers)):
            batch.info["reward"][~scores.isfinite()] = math.nan
            batch.info["reward_error"] = list(map(_score_error, numbers))

    def inputs(self, samples: Samples, batch: ExperienceBatch) -> list[RewardInput]:
        """Build the reward inputs of samples that no engine made, from their tokens.

        The text of a response is what the model sampled; its ids also include tool tokens.
        """
        if self.reads_tokens:
            return [RewardInput(prompt="", response="") for _ in range(len(batch))]
        inputs = []
        packed = batch.pack()
        for i, (row, mask) in enumerate(zip(packed.sequences, packed.action_mask, strict=True)):
            response = row[len(row) - len(mask) :]
            prompt_ids = row[: len(row) - len(mask)].tolist()
            if not prompt_ids:  # the first token is masked in training, but the model sampled it
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
        """Decode ids; "" without a tokenizer, for rewards that only read ids."""
        tokenizer: Any = self.tokenizer
        if tokenizer is None:
            return ""
        if hasattr(tokenizer, "decode"):
            return str(tokenizer.decode(ids, **options))
        return str(tokenizer.batch_decode([ids], **options)[0])


def put_rewards(batches: Sequence[ExperienceBatch], scores: RewardResult) -> None:
    """Set the scores of all rows in the `info` of their batches."""
    rewards, metrics = scores.to_tensors()
    RolloutBatches(batches).set_numbers("reward", rewards)
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


def _wrap_models(models: RewardModels, tokenizer: Tokenizer | None) -> tuple[Any, list[TokenReward]]:
    """Wrap modules that take texts, and callables of tokens; also return the latter."""
    token_rewards: list[TokenReward] = []

    def wrap(model: Any) -> Any:
        if _takes_texts(model):
            return TextModelReward(model, policy_tokenizer=tokenizer)
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
    sources: list[Any] = [urls] if isinstance(urls, str) else list(urls)
    sources = [PositionalFile(source) if source.endswith(".py") else source for source in sources]
    if reward_fn is None:
        return as_reward(sources[0] if isinstance(urls, str) else sources)
    if len(_parameter_names(reward_fn)) > 1:
        raise ValueError(
            f"reward_fn: got the parameters {', '.join(_parameter_names(reward_fn))}, expected one with "
            "remote_rm_url: the list of the scores of the URLs"
        )
    return as_reward(sources, combine=reward_fn)


def _is_lightrft(function: RewardFunction) -> bool:
    """Return whether a function has the parameters of LightRFT's `reward_fn`."""
    names = _parameter_names(function)
    return "model_reward_list" in names or "label_map" in names


def _reads_samples(function: RewardFunction) -> bool:
    """Return whether the first parameter of a callable is a field of a sample: it then scores responses."""
    names = _parameter_names(function)
    return isinstance(function, (str, Mapping)) or is_reward(function) or (bool(names) and names[0] in PARAMETER_NAMES)


def _parameter_names(function: RewardFunction) -> list[str]:
    """Return the positional parameters of a callable."""
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
