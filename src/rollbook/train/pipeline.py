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
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.advantages import reinforce
from rollbook.algorithms.advantages.temporal import place_rewards
from rollbook.algorithms.filters import zero_variance
from rollbook.algorithms.inputs import Inputs, group_inputs, read_inputs, row_rewards
from rollbook.algorithms.kl import kl_penalty
from rollbook.algorithms.layout import Layout
from rollbook.algorithms.registry import Estimator
from rollbook.algorithms.results import Advantages, as_advantages
from rollbook.algorithms.shaping import RunningNorm, clip_scores, normalize_advantages, shape_rewards
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.media import as_path
from rollbook.core.metrics import StepMetrics, warn_user
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, current_process_group
from rollbook.core.rows import Rows
from rollbook.core.sampling import Prompt, Sampling
from rollbook.core.vocabulary import Tokenizer
from rollbook.models.forward import forward, without_adapters
from rollbook.rewards.recipes import as_reward
from rollbook.rewards.types import RewardInput, RewardResult, is_reward
from rollbook.rollout.engine import Engine
from rollbook.rollout.environment import EnvironmentConfig, play_episodes
from rollbook.train.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from rollbook.rewards.recipes import RewardLike

__all__ = ["Models", "annotate", "estimate", "generate", "score"]


@dataclass
class Models:
    """The models of a run; those that the algorithm does not need are `None`.

    Args:
        policy: The policy.
        reference: The reference policy.
        critic: The value model.
        teacher: The teacher.

    >>> Models().require("critic", "values")
    Traceback (most recent call last):
        ...
    ValueError: critic: missing, required to compute 'values'
    """

    policy: Any = None
    reference: Any = None
    critic: Any = None
    teacher: Any = None

    def require(self, name: str, column: str) -> Any:
        """Return a model.

        Args:
            name: Its field.
            column: What it computes, for the error.

        Returns:
            The model.

        Raises:
            ValueError: There is no such model.
        """
        model = getattr(self, name)
        if model is None:
            raise ValueError(f"{name}: missing, required to compute {column!r}")
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
        lengths = [len(sample.response_ids) for sample in samples if not sample.failed]
        stage["tokens"] = sum(lengths)
    if samples and not lengths:
        warn_user(f"rollout: all {len(samples)} samples failed; the first: {samples[0].error}")
    return Experiences([sample.to_experience() for sample in samples])


# --- score ------------------------------------------------------------------------------------------------------------


def score(
    records: Experiences,
    reward: RewardLike,
    tokenizer: Tokenizer | None = None,
    *,
    prompts: Sequence[Prompt] = (),
    metrics: StepMetrics | None = None,
) -> Experiences:
    """Add `reward`, its parts (in `metrics`) and errors (in `info`).

    The records of one run are one conversation: its last record is scored, and all get the score. An existing
    environment reward is added to the score: `metrics` then has `environment` and `source`.

    Args:
        records: What `generate` returned.
        reward: Whatever `rollbook.rewards.as_reward` takes.
        tokenizer: Decodes responses that have no text.
        prompts: The prompts of the records. A record names image files as text, which rewards never open; with the
            prompts, rewards are given the images themselves.
        metrics: Collects timings.

    Returns:
        The records with rewards.

    >>> from rollbook.rollout import ScriptedEngine
    >>> records = generate(ScriptedEngine({"1+1=": [[4, 2], [5, 2]]}), [Prompt(text="1+1=")], Sampling(n=2))
    >>> score(records, lambda response_ids: float(response_ids[0] == 4)).values("reward")
    [1.0, 0.0]
    """
    metrics = StepMetrics() if metrics is None else metrics
    source = reward if is_reward(reward) else as_reward(reward)
    rows = records.rows()
    with metrics.time("reward"):
        last_of_run = {row.eid.rid: row for row in rows if row.finish_reason != "error"}
        by_task = {prompt.eid.tid: prompt for prompt in prompts if prompt.eid is not None}
        inputs = [_reward_input(row, tokenizer, by_task.get(row.eid.tid)) for row in last_of_run.values()]
        scores = source(inputs) if inputs else RewardResult(rewards=[])
    if len(scores) != len(inputs):
        raise ValueError(f"reward: got {len(scores)} scores back, expected {len(inputs)}, one for each sample")
    score_of_run = dict(zip(last_of_run, range(len(inputs)), strict=True))
    return _with_scores(records, rows, scores, [score_of_run.get(row.eid.rid) for row in rows])


def _reward_input(row: Experience, tokenizer: Tokenizer | None, prompt: Prompt | None) -> RewardInput:
    scored = RewardInput.from_record(row, tokenizer)
    if prompt is None:
        return scored
    changes: dict[str, Any] = {"images": tuple(map(as_path, prompt.images))}
    if prompt.messages is not None and len(scored.messages or ()) <= len(prompt.messages):
        changes["messages"] = prompt.messages
    if not scored.prompt and prompt.messages is not None and row.prompt_text is None:
        changes["prompt"] = "\n".join(str(message.get("content") or "") for message in prompt.messages)
    return dataclasses.replace(scored, **changes)


def _with_scores(
    records: Experiences, rows: Sequence[Experience], scores: RewardResult, score_of_row: Sequence[int | None]
) -> Experiences:
    """Add scores to records; `score_of_row` has the index of each row's score, `None` for failed samples."""
    has_score = np.array([index is not None for index in score_of_row], dtype=bool)
    scored = np.array([index for index in score_of_row if index is not None], dtype=np.int64)

    def by_row(column: Sequence[float]) -> NDArray[np.float64]:
        numbers = np.full(len(rows), math.nan)
        numbers[has_score] = np.asarray(column, dtype=np.float64)[scored]
        return numbers

    rewards = by_row(scores.rewards)
    by_name = {name: by_row(column) for name, column in scores.metrics.items()}
    parts, columns = list(scores.parts), dict[str, Any]()
    if bool((has_score & [row.reward is not None for row in rows]).any()):
        environment = np.array([math.nan if row.reward is None else row.reward for row in rows])
        by_name |= {"environment": environment, "source": rewards}
        parts, rewards = ["environment", "source"], environment + rewards
        rescored = [with_reward(row, reward) for row, reward in zip(rows, rewards.tolist(), strict=True)]
        if any(row.token_level_reward is not None for row in rescored):
            columns["token_level_reward"] = [row.token_level_reward for row in rescored]
    for row, index in zip(rows, score_of_row, strict=True):
        error = scores.errors[index] if index is not None else f"no response: {row.info.get('error')}"
        if error is not None:
            row.info.setdefault("reward_error", error)
        if parts:
            row.info["reward_parts"] = parts
    for name, numbers in by_name.items():
        # Rounded to float32, as records store numbers.
        for row, number in zip(rows, numbers.astype(np.float32).tolist(), strict=True):
            row.metrics[name] = number
    columns |= {
        "reward": rewards.astype(np.float32).tolist(),
        "info": [row.info for row in rows],
        "metrics": [row.metrics for row in rows],
    }
    return records.assign(**columns)


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


def generate_greedy(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    algorithm: AlgorithmConfig,
    *,
    environment: EnvironmentConfig | None = None,
    reward: RewardLike | None = None,
    tokenizer: Tokenizer | None = None,
) -> Experiences | None:
    """Generate and score a greedy response, or episode, for each prompt if the estimator compares with it.

    Args:
        engine: What samples.
        prompts: The prompts.
        sampling: Sampling options of the rollout.
        algorithm: The algorithm.
        environment: For multi-turn episodes.
        reward: Scores the responses.
        tokenizer: Decodes responses that have no text.

    Returns:
        The records, for `add_greedy_baseline`; `None` if the estimator has no greedy baseline.
    """
    entry = algorithm.estimator_entry
    if entry is None or not entry.greedy_baseline:
        return None
    records = generate(engine, prompts, Sampling.of(sampling, n=1, temperature=0.0), environment)
    return records if reward is None else score(records, reward, tokenizer, prompts=prompts)


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


def sample_errors(records: Experiences) -> list[str | None]:
    """Return the error of each record that failed or could not be scored, and `None` for the others."""
    return [info.get("error") or info.get("reward_error") for info in records.values("info")]


def find_constant_groups(records: Experiences) -> list[int]:
    """Return the positions of the records of groups whose rewards are all equal, for `drop_constant_groups`.

    Records without a finite reward are left out of the comparison. A group of which every sample failed is not
    constant: it stays in the step, where failures are counted.

    Args:
        records: The scored records of complete groups.

    >>> rewards = [1.0, 1.0, 0.0, 1.0]
    >>> find_constant_groups(Experiences([
    ...     Experience(tokens=[1, 2], reward=reward, eid={"task": i // 2, "run": i}) for i, reward in enumerate(rewards)
    ... ]))
    [0, 1]
    """
    ids = records.eids()
    tasks = [eid.tid for eid in ids]
    is_kept = zero_variance(row_rewards(records), tasks, [eid.rid for eid in ids]).keep.tolist()
    usable = {task for task, error in zip(tasks, sample_errors(records), strict=True) if not error}
    return [row for row, task in enumerate(tasks) if not is_kept[row] and task in usable]


# --- annotate ---------------------------------------------------------------------------------------------------------


def annotate(
    records: Experiences,
    algorithm: AlgorithmConfig,
    models: Models,
    *,
    old_logprobs: Literal["recompute", "engine"] = "recompute",
    token_budget: int = 16384,
    metrics: StepMetrics | None = None,
    process_group: ProcessGroup | None = None,
) -> Experiences:
    """Add the model outputs per token that the algorithm reads and the records lack: one pass per model.

    Args:
        records: Rollouts. Given answers and preference pairs are returned unchanged.
        algorithm: Its `passes` are run.
        models: The models of the passes.
        old_logprobs: Source of missing `old_logprobs`: `recompute`, or copy `logprobs` from the `engine`.
        token_budget: Tokens of a forward pass.
        metrics: Collects timings.
        process_group: The ranks over which the models are sharded, each of which annotates its own records. All of
            them run every pass that one of them needs.

    Returns:
        The records with the added columns.

    >>> records = Experiences([Experience(tokens=[1, 2, 3], logprobs=[-0.5, -0.25])])
    >>> algorithm = AlgorithmConfig.preset("grpo", kl_coef=0.0)
    >>> annotate(records, algorithm, Models(), old_logprobs="engine")[0].old_logprobs.tolist()
    [-0.5, -0.25]
    """
    metrics = StepMetrics() if metrics is None else metrics
    if not len(records) and process_group is None:
        return records
    if old_logprobs == "engine" and algorithm.needs_rollouts and len(records.missing("old_logprobs")):
        records = records.fill(old_logprobs=records.values("logprobs"))
    for model_pass in algorithm.passes:
        missing = records.missing(model_pass.column)
        counts = [[len(missing)]] if process_group is None else process_group.gather([len(missing)])
        if np.any(counts):
            model = models.require(model_pass.model, model_pass.column)
            if model_pass.model == "reference":
                model = without_adapters(model)
            with metrics.time(model_pass.model) as stage:
                incomplete_records = records.take(missing)
                outputs = forward(
                    model,
                    incomplete_records,
                    model_pass.outputs,
                    token_budget=token_budget,
                    process_group=process_group,
                )
                stage["tokens"] = int(incomplete_records.token_lengths().sum())
            if len(missing):
                records = records.fill(missing, **outputs)  # type: ignore[arg-type]
    return records


# --- estimate ---------------------------------------------------------------------------------------------------------


def estimate(
    records: Experiences,
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int | None = None,
    reward_norm: RunningNorm | None = None,
    process_group: ProcessGroup | None = None,
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
        process_group: The processes over which statistics are computed; `None`: all of a distributed run.
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
    estimated_rows = np.arange(len(records)) if recompute else absent
    process_group = current_process_group() if process_group is None else process_group
    with metrics.time("advantages"):
        inputs: Inputs = read_inputs(records)  # type: ignore[assignment]
        mask, options = inputs["mask"], _estimator_options(algorithm, entry, process_group)
        raw_rewards = torch.tensor(row_rewards(records), dtype=torch.float32)
        rewards, shaping = shape_rewards(
            raw_rewards,
            Layout.from_tokens(mask).counts,
            overlong_buffer=algorithm.overlong_buffer,
            overlong_penalty=algorithm.overlong_penalty,
            max_tokens=max_tokens,
            norm=reward_norm,
            process_group=process_group,
        )
        reward_clip = algorithm.reward_clip if entry.clips_rewards else None
        penalty = None
        if algorithm.kl_in == "reward" and algorithm.kl_coef:
            penalty = _kl_penalty(inputs, algorithm, entry, metrics)
        if entry.scores == "rows":
            scores = _row_scores(records, inputs, entry, rewards, options, process_group)
            scores, clipping = clip_scores(scores, reward_clip)
            has_reward = ~scores.isnan()
            result = reinforce(penalty, scores, mask, gamma=algorithm.gamma if entry.discounts else 1.0)
        else:
            rewards, clipping = clip_scores(rewards, reward_clip)
            has_reward = ~rewards.isnan() if entry.takes_rewards else torch.ones(len(rewards), dtype=torch.bool)
            token_rewards = penalty
            if "token_rewards" in entry.inputs:
                scale = 1.0 if reward_norm is None else 1 / reward_norm.scale
                token_rewards, rewards = _token_rewards(inputs, entry, rewards, scale * raw_rewards, scale, penalty)
            result = _token_advantages(records, inputs, entry, rewards, token_rewards, options, process_group, metrics)
        action_mask = mask if result.mask is None else result.mask
        is_whitened = bool(options.get("whiten", entry.options.get("whiten", False)))
        advantages, bounds = normalize_advantages(
            result.advantages,
            action_mask,
            has_reward,
            normalize=None if is_whitened or entry.normalized else algorithm.normalize_advantages,
            clip=algorithm.advantage_clip,
            process_group=process_group,
        )
        metrics.add(clipping, shaping, {"reward/missing_reward": float((~has_reward).sum())}, bounds)
    if entry.takes_rewards and len(records.missing("reward")):
        records = _mark_missing_rewards(records, raw_rewards, estimated_rows, expert)
    if action_mask is not mask:
        records = records.fill(
            estimated_rows, overwrite=True, action_mask=[action_mask[i] for i in estimated_rows.tolist()]
        )
    return records.fill(overwrite=recompute, advantages=advantages, returns=result.returns)


def _estimator_options(algorithm: AlgorithmConfig, entry: Estimator, process_group: ProcessGroup) -> dict[str, Any]:
    """Return the options of the estimator: its own, and those of the algorithm that it accepts."""
    options: dict[str, Any] = {"gamma": algorithm.gamma, "lam": algorithm.lam, "process_group": process_group}
    if algorithm.normalize_advantages == "mean_std":
        options["whiten"] = True
    accepted = {name: option for name, option in options.items() if name in entry.options}
    return accepted | dict(algorithm.estimator_options)


def _kl_penalty(inputs: Inputs, algorithm: AlgorithmConfig, entry: Estimator, metrics: StepMetrics) -> Rows | None:
    """Return the KL penalty per token, or `None` if the estimator takes no token rewards."""
    if not entry.kl_in_reward:
        warn_user(f"{entry.name} takes no rewards of tokens: the KL penalty is left out")
        return None
    for name in ("old_logprobs", "ref_logprobs"):
        if inputs[name] is None:
            raise ValueError(f"{name}: missing, required because algorithm.kl_in is 'reward'")
    penalty, report = kl_penalty(
        inputs["old_logprobs"],
        inputs["ref_logprobs"],
        inputs["mask"],
        estimator=algorithm.kl_estimator,
        coef=algorithm.kl_coef,
    )
    metrics.add({f"reward/{name}": number for name, number in report.metrics.items()})
    return cast("Rows", penalty)


def _row_scores(
    records: Experiences,
    inputs: Inputs,
    entry: Estimator,
    rewards: torch.Tensor,
    options: Mapping[str, Any],
    process_group: ProcessGroup,
) -> torch.Tensor:
    """Return the scores of an estimator over rows, NaN where the reward is missing. Shape: [B]."""
    groups = group_inputs(inputs, records, required=entry.inputs.get("runs", False), process_group=process_group)
    group_of_row = groups["groups"]
    if process_group is SINGLE_PROCESS and len(group_of_row) > 1 and len(np.unique(group_of_row)) == len(rewards):
        warn_user(f"{entry.name}: every group has a single sample, so there is nothing to compare")
    arguments = {"rewards": rewards, **groups}
    arguments |= {name: inputs[name] for name in ("ids", "steps") if name in entry.inputs}
    arguments = {name: column for name, column in arguments.items() if name in entry.inputs}
    result = as_advantages(entry.name, entry.call(arguments, options))
    scores = torch.as_tensor(result.advantages if result.scores is None else result.scores, dtype=torch.float32)
    return torch.where(rewards.isnan(), torch.nan, scores)


def _token_advantages(
    records: Experiences,
    inputs: Inputs,
    entry: Estimator,
    rewards: torch.Tensor,
    token_rewards: Rows | None,
    options: Mapping[str, Any],
    process_group: ProcessGroup,
    metrics: StepMetrics,
) -> Advantages:
    """Call an estimator over tokens."""
    special = ["mask", "rewards", "token_rewards", "groups", "runs"]
    if options.get("observations", "skip") == "skip":
        special.append("response")
    arguments = {name: inputs[name] for name in entry.inputs if name in inputs and name not in special}
    arguments["mask"] = inputs["mask"]
    if "groups" in entry.inputs:
        groups = group_inputs(inputs, records, required=entry.inputs.get("runs", False), process_group=process_group)
        arguments |= {name: column for name, column in groups.items() if name in entry.inputs}
    if "token_rewards" in entry.inputs:
        arguments |= {"token_rewards": token_rewards, "rewards": rewards}
    elif entry.takes_rewards:
        arguments["rewards"] = rewards
    for name, required in entry.inputs.items():
        if arguments.get(name) is None and (required or (name == "baselines" and entry.greedy_baseline)):
            raise ValueError(f"{entry.name}: records lack {name!r}, which it needs")
    result = as_advantages(entry.name, entry.call(arguments, options))
    numbers = result.report.to_metrics(entry.name)
    metrics.add({name: number for name, number in numbers.items() if math.isfinite(number)})
    return result


def _token_rewards(
    inputs: Inputs, entry: Estimator, rewards: torch.Tensor, recorded: torch.Tensor, scale: float, penalty: Rows | None
) -> tuple[Rows | None, torch.Tensor]:
    """Return the token rewards, and the row rewards that the estimator places on the last actions.

    Args:
        inputs: Inputs of the records.
        entry: The estimator.
        rewards: [B] Row rewards after shaping.
        recorded: [B] Row rewards before shaping, times `scale`.
        scale: What the running norm multiplies rewards by.
        penalty: KL penalty per token.
    """
    token_rewards = inputs["token_rewards"] if entry.takes_token_rewards else None
    if token_rewards is None:
        return penalty, rewards
    has_own = torch.ones(len(rewards), dtype=torch.bool)
    has_own[inputs["without_token_rewards"]] = False
    # What shaping added to a row's reward goes on its last action; the rest is on its tokens.
    placed = place_rewards(torch.where(has_own, rewards - recorded, rewards), inputs["mask"], token_rewards=penalty)[0]
    layout = Layout.from_tokens(inputs["mask"])
    tokens = layout.tensor("token_rewards", placed) + scale * layout.tensor("token_rewards", token_rewards).float()
    return layout.restore(tokens), torch.where(rewards.isnan(), torch.nan, 0.0)


def _mark_missing_rewards(
    records: Experiences, rewards: torch.Tensor, estimated_rows: Any, expert: Sequence[bool] | None
) -> Experiences:
    """Set the reward of records that were not scored to NaN, and list them in a warning."""
    scores = records.values("reward")
    missing = [
        row
        for row in estimated_rows.tolist()
        if scores[row] is None and rewards[row].isnan() and not (expert and expert[row])
    ]
    if not missing:
        return records
    names = ", ".join(records[row].eid.uid for row in missing[:3]) + (", ..." if len(missing) > 3 else "")
    warn_user(
        f"reward: missing for {len(missing)} of {len(records)} records ({names}); they are excluded from training"
    )
    return records.fill(missing, reward=[math.nan] * len(missing))
