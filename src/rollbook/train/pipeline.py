"""The stages from prompts to training records: `generate`, `score`, `annotate`, `estimate`.

Each function returns new `Experiences` with more columns, fills only what is missing, and keeps the order of rows.
Failures become records: a failed sample has `info["error"]`, an all-False mask and a reward of NaN; a failed score has
`info["reward_error"]` and a reward of NaN. Both get advantages of 0 and are left out of the update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rollbook.algorithms.advantages import reinforce
from rollbook.algorithms.advantages.temporal import place_rewards
from rollbook.algorithms.inputs import Inputs, group_inputs, inputs_of, row_rewards
from rollbook.algorithms.kl import kl_penalty
from rollbook.algorithms.layout import Layout
from rollbook.algorithms.registry import Estimator
from rollbook.algorithms.results import Advantages, as_advantages
from rollbook.algorithms.shaping import RunningNorm, clip_scores, normalize_advantages, shape_rewards
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.media import as_path
from rollbook.core.metrics import StepMetrics, advise
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, current_ranks
from rollbook.core.sampling import Prompt, Sampling
from rollbook.models.forward import forward, without_adapters
from rollbook.rewards.recipes import as_reward
from rollbook.rewards.types import RewardInput, RewardResult
from rollbook.rollout.engine import Engine
from rollbook.rollout.environment import EnvironmentConfig, play_episodes
from rollbook.train.algorithm import AlgorithmConfig


@dataclass
class Models:
    """The models of a run; those that the algorithm does not need are `None`.

    >>> Models().require("critic", "values")
    Traceback (most recent call last):
        ...
    ValueError: critic: missing, and records lack values, which it computes
    """

    policy: Any = None
    reference: Any = None
    critic: Any = None
    teacher: Any = None

    def require(self, name: str, column: str) -> Any:
        """Return the model `name`, which computes `column`, or raise `ValueError` if there is none."""
        model = getattr(self, name)
        if model is None:
            raise ValueError(f"{name}: missing, and records lack {column}, which it computes")
        return model

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, if it has one."""
        return getattr(self.policy, "tokenizer", None)


# --- generate ---------------------------------------------------------------------------------------------------------


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    environment: EnvironmentConfig | None = None,
    *,
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Sample `sampling.n` responses, or play as many episodes, per prompt.

    Args:
        engine: What samples.
        prompts: The prompts.
        sampling: Sampling options.
        environment: For multi-turn episodes: the other side of each, and its limits.
        metrics: Collects timings.

    Returns:
        A record per sample, in the order of prompts and runs; of an episode whose conversation forked, several.

    >>> from rollbook.rollout import ScriptedEngine
    >>> records = generate(ScriptedEngine({"1+1=": [[4, 2], [5, 2]]}), [Prompt(text="1+1=")], Sampling(n=2))
    >>> [row.tokens[row.prompt_length :].tolist() for row in records]
    [[4, 2], [5, 2]]
    """
    if not hasattr(engine, "generate"):
        raise ValueError(f"engine: got {type(engine).__name__}, expected an engine such as TransformersEngine(actor)")
    metrics = StepMetrics() if metrics is None else metrics
    if environment is not None:
        return play_episodes(engine, prompts, sampling, environment, metrics=metrics)
    with metrics.time("rollout") as stage:
        samples = engine.generate(prompts, sampling)
        stage["tokens"] = sum(len(sample.response_ids) for sample in samples if not sample.failed)
    if samples and all(sample.failed for sample in samples):
        advise(f"rollout: all {len(samples)} samples failed; the first: {samples[0].error}")
    rows = [sample.to_experience() for sample in samples]
    for row, sample in zip(rows, samples, strict=True):
        if sample.failed:
            row.reward = math.nan
    return Experiences(rows)


# --- score ------------------------------------------------------------------------------------------------------------


def score(
    records: Experiences,
    reward: Any,
    tokenizer: Any = None,
    *,
    prompts: Sequence[Prompt] = (),
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Add `reward`, its parts (in `metrics`) and errors (in `info`).

    The records of one run are one conversation: its last record is scored, and all get the score. A reward that
    records have already, from an environment, is added to: `metrics` then has `environment` and `source`.

    Args:
        records: What `generate` returned.
        reward: Whatever `rollbook.rewards.as_reward` takes.
        tokenizer: Decodes responses that have no text.
        prompts: The prompts of the records. A record names image files as text, which rewards never open; with the
            prompts, rewards are given the images themselves.
        metrics: Collects timings.

    >>> from rollbook.rollout import ScriptedEngine
    >>> records = generate(ScriptedEngine({"1+1=": [[4, 2], [5, 2]]}), [Prompt(text="1+1=")], Sampling(n=2))
    >>> score(records, lambda response_ids: float(response_ids[0] == 4)).values("reward")
    [1.0, 0.0]
    """
    metrics = StepMetrics() if metrics is None else metrics
    source = as_reward(reward)
    rows = records.rows()
    with metrics.time("reward"):
        last_of_run = {row.eid.rid: row for row in rows if row.finish_reason != "error"}
        by_task = {prompt.eid.tid: prompt for prompt in prompts if prompt.eid is not None}
        inputs = [_reward_input(row, tokenizer, by_task.get(row.eid.tid)) for row in last_of_run.values()]
        scores = source(inputs) if inputs else RewardResult(rewards=[])
    if len(scores) != len(inputs):
        raise ValueError(f"reward: got {len(scores)} scores back, expected {len(inputs)}, one for each sample")
    places = dict(zip(last_of_run, range(len(inputs)), strict=True))
    return _with_scores(records, rows, scores, [places.get(row.eid.rid) for row in rows])


def _reward_input(row: Experience, tokenizer: Any, prompt: Prompt | None) -> RewardInput:
    if row.response_text is None and tokenizer is None:
        row = row.replace(response_text="")  # a reward may look at ids alone
    scored = RewardInput.of(row, tokenizer)
    if prompt is None:
        return scored
    changes: dict[str, Any] = {"images": tuple(map(as_path, prompt.images))}
    if prompt.messages is not None and len(scored.messages or ()) <= len(prompt.messages):
        changes["messages"] = prompt.messages
    if not scored.prompt and prompt.messages is not None and row.prompt_text is None:
        changes["prompt"] = "\n".join(str(message.get("content") or "") for message in prompt.messages)
    return dataclasses.replace(scored, **changes)


def _with_scores(
    records: Experiences, rows: Sequence[Experience], scores: RewardResult, places: Sequence[int | None]
) -> Experiences:
    """Add scores to records; `places` has the place of each row's score, `None` for failed samples."""
    before = [math.nan if row.reward is None else float(row.reward) for row in rows]
    is_played = any(row.reward is not None for row, place in zip(rows, places, strict=True) if place is not None)
    rewards = [math.nan if place is None else scores.rewards[place] for place in places]
    parts = {
        name: [math.nan if place is None else column[place] for place in places]
        for name, column in scores.metrics.items()
    }
    names = list(scores.parts)
    columns: dict[str, Any] = {}
    if is_played:
        parts |= {"environment": before, "source": rewards}
        names = ["environment", "source"]
        rewards = [old + new for old, new in zip(before, rewards, strict=True)]
        rescored = [with_reward(row, reward) for row, reward in zip(rows, rewards, strict=True)]
        if any(row.token_level_reward is not None for row in rescored):
            columns["token_level_reward"] = [row.token_level_reward for row in rescored]
    for row, place in zip(rows, places, strict=True):
        error = scores.errors[place] if place is not None else f"no response: {row.info.get('error')}"
        if error is not None:
            row.info.setdefault("reward_error", error)
        if names:
            row.info["reward_parts"] = names
    for name, column in parts.items():
        for row, number in zip(rows, _as_float32(column), strict=True):
            row.metrics[name] = number
    columns |= {
        "reward": _as_float32(rewards),
        "info": [row.info for row in rows],
        "metrics": [row.metrics for row in rows],
    }
    return records.assign(**columns)


def _as_float32(numbers: Sequence[float]) -> list[float]:
    """Round to float32, as records store them."""
    rounded: list[float] = np.array(numbers, dtype=np.float32).tolist()
    return rounded


def with_reward(row: Experience, reward: float) -> Experience:
    """Replace a record's reward. Where it has token rewards, the difference is added on its last action.

    >>> row = Experience(tokens=[1, 2, 3, 4], reward=0.5, token_level_reward=[0.5, 0.0, 0.0], action_mask=[1, 0, 1])
    >>> with_reward(row, 2.5).token_level_reward.tolist()
    [0.5, 0.0, 2.0]
    """
    change = reward - (row.reward or 0.0)
    actions = [] if row.action_mask is None else row.action_mask.nonzero()[:, 0].tolist()
    if row.token_level_reward is None or not actions or not math.isfinite(change):
        return row.replace(reward=reward)
    token_rewards = row.token_level_reward.clone()
    token_rewards[actions[-1]] += change
    return row.replace(reward=reward, token_level_reward=token_rewards)


def add_greedy_baseline(records: Experiences, greedy: Experiences) -> Experiences:
    """Add `info["reward_baseline"]`: the reward of the greedy response to the same prompt.

    Args:
        records: The rollout.
        greedy: One scored greedy response, or episode, for each prompt.
    """
    baselines = {row.eid.tid: row.reward for row in greedy.rows()}
    infos = records.values("info")
    for eid, info in zip(records.eids(), infos, strict=True):
        info["reward_baseline"] = baselines[eid.tid]
    return records.assign(info=infos)


# --- annotate ---------------------------------------------------------------------------------------------------------


def annotate(
    records: Experiences,
    algorithm: AlgorithmConfig,
    models: Models,
    *,
    old_logprobs: Literal["recompute", "engine"] = "recompute",
    token_budget: int = 16384,
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Add the model outputs per token that the algorithm reads and the records lack: one pass per model.

    Args:
        records: Rollouts; given answers and pairs of answers need nothing, and come back as they are.
        algorithm: Its `passes` are run.
        models: The models of the passes.
        old_logprobs: Of records without log-probs of the policy before the update: `recompute` them, or take those of
            the `engine` that sampled them, where it recorded some.
        token_budget: Tokens of a forward pass.
        metrics: Collects timings.
    """
    metrics = StepMetrics() if metrics is None else metrics
    if not len(records):
        return records
    if old_logprobs == "engine" and algorithm.needs_rollouts and len(records.missing("old_logprobs")):
        records = records.fill(old_logprobs=records.values("logprobs"))
    for model_pass in algorithm.passes:
        missing = records.missing(model_pass.column)
        if len(missing):
            model = models.require(model_pass.model, model_pass.column)
            if model_pass.model == "reference":
                model = without_adapters(model)
            with metrics.time(model_pass.model) as stage:
                chosen = records.take(missing)
                outputs = forward(model, chosen, model_pass.outputs, token_budget=token_budget)
                stage["tokens"] = int(chosen.token_lengths().sum())
            records = records.fill(missing, **outputs)  # type: ignore[arg-type]
    return records


# --- estimate ---------------------------------------------------------------------------------------------------------


def estimate(
    records: Experiences,
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int | None = None,
    reward_norm: RunningNorm | None = None,
    ranks: ProcessGroup | None = None,
    recompute: bool = False,
    expert: Sequence[bool] | None = None,
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Add `advantages` and `returns`, computed over all records at once, by group id.

    reward -> overlong penalty -> running norm -> score of the row -> clip -> minus KL per token -> return or GAE
    -> normalize -> clip

    Args:
        records: Scored and annotated rollouts.
        algorithm: The estimator and its settings.
        max_tokens: The longest response, for the overlong penalty.
        reward_norm: Running statistics of rewards, which take these in.
        ranks: The processes whose records are compared; `None`: all of a distributed run.
        recompute: Estimate also for records that have advantages.
        expert: Which records an expert made; these need no reward.
        metrics: Collects timings and numbers.

    Returns:
        The records. Those without a reward that the estimator needs get advantages of 0 and a reward of NaN.

    >>> records = Experiences([
    ...     Experience(tokens=[1, 2, 3], reward=float(run), eid={"task": 0, "run": run}) for run in range(2)
    ... ])
    >>> estimate(records, AlgorithmConfig.preset("dr_grpo"))[1].advantages.tolist()
    [0.5, 0.5]
    """
    metrics = StepMetrics() if metrics is None else metrics
    entry = algorithm.estimator_entry
    if entry is None or not len(records):
        return records
    absent = np.union1d(records.missing("advantages"), records.missing("returns"))
    if not recompute and not len(absent):
        return records
    with metrics.time("advantages"):
        stage = _Estimation(records, algorithm, entry, current_ranks() if ranks is None else ranks, metrics)
        columns = stage.run(max_tokens, reward_norm)
    chosen = np.arange(len(records)) if recompute else absent
    if entry.takes_rewards:
        records = _mark_missing_rewards(records, stage.raw_rewards, chosen, expert)
    if "action_mask" in columns:
        masks = columns.pop("action_mask")
        records = records.fill(chosen, overwrite=True, action_mask=[masks[i] for i in chosen.tolist()])
    return records.fill(overwrite=recompute, **columns)


class _Estimation:
    """One call of `estimate`."""

    def __init__(
        self,
        records: Experiences,
        algorithm: AlgorithmConfig,
        entry: Estimator,
        ranks: ProcessGroup,
        metrics: StepMetrics,
    ) -> None:
        self.records, self.algorithm, self.entry = records, algorithm, entry
        self.ranks, self.metrics = ranks, metrics
        self.inputs: Inputs = inputs_of(records)  # type: ignore[assignment]
        self.mask = self.inputs["mask"]
        self.raw_rewards = torch.tensor(row_rewards(records), dtype=torch.float32)

    def run(self, max_tokens: int | None, reward_norm: RunningNorm | None) -> dict[str, Any]:
        """Return the columns `advantages` and `returns`, and `action_mask` if the estimator narrowed it."""
        algorithm, entry = self.algorithm, self.entry
        rewards, shaping = shape_rewards(
            self.raw_rewards,
            Layout.of(self.mask).counts,
            overlong_buffer=algorithm.overlong_buffer,
            overlong_penalty=algorithm.overlong_penalty,
            max_tokens=max_tokens,
            norm=reward_norm,
            ranks=self.ranks,
        )
        scale = 1.0 if reward_norm is None else 1 / reward_norm.scale
        penalty = self._penalty()
        options = self._options()
        if entry.scores == "rows":
            scores = self._clipped(self._row_scores(rewards, options))
            has_reward = ~scores.isnan()
            result = reinforce(penalty, scores, self.mask, gamma=algorithm.gamma if entry.discounts else 1.0)
        else:
            rewards = self._clipped(rewards)
            has_reward = ~rewards.isnan() if entry.takes_rewards else torch.ones(len(rewards), dtype=torch.bool)
            result = self._token_advantages(rewards, penalty, scale, options)
        mask = self.mask if result.mask is None else result.mask
        whitened = bool(options.get("whiten", entry.options.get("whiten", False)))
        advantages, bounds = normalize_advantages(
            result.advantages,
            mask,
            has_reward,
            normalize=None if whitened or entry.normalized else algorithm.normalize_advantages,
            clip=algorithm.advantage_clip,
            ranks=self.ranks,
        )
        self.metrics.add(shaping, {"reward/missing_reward": float((~has_reward).sum())}, bounds)
        columns = {"advantages": advantages, "returns": result.returns}
        return columns if mask is self.mask else {**columns, "action_mask": mask}

    def _options(self) -> dict[str, Any]:
        """The options of the estimator: its own, and those of the algorithm that it takes."""
        algorithm, accepted = self.algorithm, self.entry.options
        options = {"gamma": algorithm.gamma, "lam": algorithm.lam, "ranks": self.ranks}
        if algorithm.normalize_advantages == "mean_std":
            options["whiten"] = True
        return {**{name: option for name, option in options.items() if name in accepted}, **algorithm.estimator_options}

    def _penalty(self) -> Any:
        """The KL penalty per token, or `None`."""
        algorithm = self.algorithm
        if algorithm.kl_in != "reward" or not algorithm.kl_coef:
            return None
        if not self.entry.kl_in_reward:
            advise(f"{self.entry.name} takes no rewards of tokens: the KL penalty is left out")
            return None
        for name in ("old_logprobs", "ref_logprobs"):
            if self.inputs[name] is None:
                raise ValueError(f"{name}: missing, and algorithm.kl_coef is {algorithm.kl_coef:g} in the reward")
        penalty, report = kl_penalty(
            self.inputs["old_logprobs"],
            self.inputs["ref_logprobs"],
            self.mask,
            estimator=algorithm.kl_estimator,
            coef=algorithm.kl_coef,
        )
        self.metrics.add({f"reward/{name}": number for name, number in report.metrics.items()})
        return penalty

    def _clipped(self, scores: torch.Tensor) -> torch.Tensor:
        clipped, fraction = clip_scores(scores, self.algorithm.reward_clip if self.entry.clips_rewards else None)
        self.metrics.add(fraction)
        return clipped

    def _groups(self) -> dict[str, Any]:
        required = self.entry.inputs.get("runs", False)
        return group_inputs(self.inputs, self.records, required=required, ranks=self.ranks)

    def _row_scores(self, rewards: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """[B] The estimator's scores, NaN where the reward is missing."""
        groups = self._groups()
        if (
            self.ranks is SINGLE_PROCESS
            and len(groups["groups"]) > 1
            and len(np.unique(groups["groups"])) == len(rewards)
        ):
            advise(f"{self.entry.name}: every prompt has one run, and there is nothing to compare it with")
        arguments = {"rewards": rewards, **groups}
        arguments |= {name: self.inputs[name] for name in ("ids", "steps") if name in self.entry.inputs}
        result = self._call({name: column for name, column in arguments.items() if name in self.entry.inputs}, options)
        scores = torch.as_tensor(result.advantages if result.scores is None else result.scores, dtype=torch.float32)
        return torch.where(rewards.isnan(), torch.nan, scores)

    def _token_advantages(
        self, rewards: torch.Tensor, penalty: Any, scale: float, options: Mapping[str, Any]
    ) -> Advantages:
        entry, inputs = self.entry, self.inputs
        skipped = () if options.get("observations", "skip") != "skip" else ("response",)
        special = ("mask", "rewards", "token_rewards", "groups", "runs", *skipped)
        arguments = {name: inputs[name] for name in entry.inputs if name in inputs and name not in special}
        arguments["mask"] = self.mask
        if "groups" in entry.inputs:
            arguments |= {name: column for name, column in self._groups().items() if name in entry.inputs}
        if "token_rewards" in entry.inputs:
            arguments["token_rewards"], arguments["rewards"] = self._token_rewards(rewards, penalty, scale)
        elif entry.takes_rewards:
            arguments["rewards"] = rewards
        for name, required in entry.inputs.items():
            if arguments.get(name) is None and (required or (name == "baselines" and entry.greedy_baseline)):
                raise ValueError(f"{entry.name}: records lack {name!r}, which it needs")
        result = self._call(arguments, options)
        numbers = result.report.to_metrics(entry.name)
        self.metrics.add({name: number for name, number in numbers.items() if math.isfinite(number)})
        return result

    def _token_rewards(self, rewards: torch.Tensor, penalty: Any, scale: float) -> tuple[Any, Any]:
        """The token rewards and row rewards of an estimator that places rows' rewards on their last actions."""
        token_rewards = self.inputs["token_rewards"] if self.entry.takes_token_rewards else None
        if token_rewards is None:
            return penalty, rewards
        has_own = torch.ones(len(rewards), dtype=torch.bool)
        has_own[self.inputs["without_token_rewards"]] = False
        # What shaping added to a row's reward goes on its last action; the rest is on its tokens.
        placed = place_rewards(
            torch.where(has_own, rewards - scale * self.raw_rewards, rewards), self.mask, token_rewards=penalty
        )[0]
        layout = Layout.of(self.mask)
        tokens = layout.whole("token_rewards", placed) + scale * layout.whole("token_rewards", token_rewards).float()
        return layout.give(tokens), torch.where(rewards.isnan(), torch.nan, 0.0)

    def _call(self, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Advantages:
        return as_advantages(self.entry.name, self.entry.call(arguments, options))


def _mark_missing_rewards(
    records: Experiences, rewards: torch.Tensor, chosen: Any, expert: Sequence[bool] | None
) -> Experiences:
    """Set the reward of records that nobody scored to NaN, and name them in a warning."""
    scores = records.values("reward")
    missing = [
        row for row in chosen.tolist() if scores[row] is None and rewards[row].isnan() and not (expert and expert[row])
    ]
    if not missing:
        return records
    names = ", ".join(records[row].eid.uid for row in missing[:3]) + (", ..." if len(missing) > 3 else "")
    advise(
        f"reward: {len(missing)} of {len(records)} records have none ({names}): their advantages are 0, and they are "
        "not trained on"
    )
    return records.fill(missing, reward=[math.nan] * len(missing))
