"""From rewards of rows to advantages of tokens, over a whole rollout: shaping, KL, estimator, whitening, clipping.

Invariant: everything is computed once, over all rows of the rollout (and of all processes), by group id: the numbers do
not depend on how rows are cut into batches, and what is normalized is normalized once. The order is

    reward -> overlong penalty -> running norm -> estimator's score of the row -> clip
           -> on the last action, less the KL of each token -> return, or GAE -> whiten -> clip

and `info["reward"]` stays what the reward source said. Where a row has token rewards (`extras["token_level_reward"]`),
estimators that take rewards of tokens are given these; what shaping added to the row's reward is on its last action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms import ESTIMATORS
from rollbook.algorithms.advantages import cumulative_returns, dr_grpo, grpo, reinforce_plus_plus_baseline, rloo
from rollbook.algorithms.filters import zero_variance
from rollbook.algorithms.groups import block_means, sums_of_blocks, whiten
from rollbook.algorithms.inputs import INFO_KEYS, group_id, run_id
from rollbook.algorithms.kl import penalize
from rollbook.algorithms.results import Advantages, Report, as_advantages
from rollbook.algorithms.shaping import RunningNorm, clip_advantages, clip_rewards, shape_overlong
from rollbook.compat.lightrft.batch import ExperienceBatch
from rollbook.compat.lightrft.config import MakerConfig
from rollbook.compat.lightrft.ragged_batch import action_starts, spans_of_rows
from rollbook.core.checks import check_float
from rollbook.core.ids import EID
from rollbook.core.metrics import advise
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, current_process_group
from rollbook.core.rows import Rows, Spans


class RolloutBatches:
    """Several batches, row by row.

    >>> def batch(rewards):
    ...     ones = torch.ones(len(rewards), 2)
    ...     return ExperienceBatch(ones.long(), ones, *[None] * 4, ones.long(), ones.bool(),
    ...                            {"reward": torch.tensor(rewards)})
    >>> whole = RolloutBatches([batch([1.0, 0.0]), batch([2.0])])
    >>> whole.numbers("reward").tolist(), whole.groups(per_group=3).tolist(), len(whole.rows("action_log_probs"))
    ([1.0, 0.0, 2.0], [0, 0, 0], 3)
    >>> whole.put("advantages", Rows(torch.arange(6.0), [2, 2, 2]))
    >>> whole.batches[1].advantages
    tensor([[4., 5.]])
    """

    def __init__(self, batches: Sequence[ExperienceBatch]) -> None:
        self.batches = list(batches)
        self.sizes = [_count(batch) for batch in self.batches]

    @cached_property
    def _spans(self) -> list[Spans | None]:
        return [_acting(batch) for batch in self.batches]

    def __len__(self) -> int:
        return sum(self.sizes)

    # --- per token ----------------------------------------------------------------------------------------------

    def rows(self, name: str) -> Rows | None:
        """A response-axis field of all rows, on the CPU, `None` if some batch lacks it. An `action_mask` that is not
        there is all True."""
        column = self.column(name)
        return None if column is None else Rows(*column)

    def column(self, name: str) -> tuple[torch.Tensor, list[int]] | None:
        """`rows` as values end to end and lengths: making a tensor of every row takes longer than most arithmetic."""
        parts = []
        for batch, spans in zip(self.batches, self._spans, strict=True):
            value = _field(batch, name)
            if value is None and name == "action_mask":
                value = _all_true(batch)
            if value is None:
                return None
            parts.append(_cut(value, spans))
        if not parts:
            return torch.zeros(0, dtype=torch.bool if name == "action_mask" else torch.float32), []
        return _end_to_end(parts)

    def token_rewards(self) -> tuple[Rows, torch.Tensor] | None:
        """The token rewards of all rows, on the CPU, 0 on rows without any, and [N] bool: which rows have them; `None`
        if no row has."""
        name = "extras.token_level_reward"
        if all(_field(batch, name) is None for batch in self.batches):
            return None
        parts, lengths, has = [], list[int](), []
        for batch, spans, size in zip(self.batches, self._spans, self.sizes, strict=True):
            value = _field(batch, name)
            values, own_lengths = _cut(_all_true(batch) if value is None else value, spans)
            parts.append(torch.zeros(len(values)) if value is None else values.float())
            lengths += own_lengths
            absent = range(size) if value is None else batch.origin.absent.get(name, ())
            has += [row not in absent for row in range(size)]
        return Rows(torch.cat(parts), lengths), torch.tensor(has)

    def of_each(self, find: Callable[[ExperienceBatch], Any]) -> tuple[torch.Tensor, list[int]]:
        """What a function finds of each batch, (B, A), or `Rows` of a packed one, as `column` gives it."""
        return _end_to_end([_cut(find(batch), spans) for batch, spans in zip(self.batches, self._spans, strict=True)])

    def put(self, name: str, rows: Rows) -> None:
        """Give each batch its rows of a response-axis field (`extras.NAME` for one that a batch has no name for)."""
        self.put_column(name, rows.values, rows.lengths)

    def put_column(self, name: str, values: torch.Tensor, lengths: list[int]) -> None:
        """`put` of values end to end."""
        for batch, value in zip(self.batches, self._laid_out(values, lengths), strict=True):
            _set_field(batch, name, value)

    def laid_out(self, rows: Rows) -> list[Any]:
        """A response-axis column as each batch has its own fields: (B, A), 0 on padding, or `Rows` of a packed one."""
        return self._laid_out(rows.values, rows.lengths)

    def _laid_out(self, values: torch.Tensor, lengths: list[int]) -> list[Any]:
        parts: list[Any] = []
        start = row = 0
        for batch, spans, size in zip(self.batches, self._spans, self.sizes, strict=True):
            stop = start + sum(lengths[row : row + size])
            part = values[start:stop].to(batch_device(batch))
            parts.append(Rows(part, lengths[row : row + size]) if spans is None else spans.pad(part, 0))
            start, row = stop, row + size
        return parts

    def gathered(self, name: str, parts: Sequence[Any]) -> Rows:
        """The inverse of `laid_out`, for what a function `name` returned for each batch."""
        columns = []
        for i, (part, spans, size) in enumerate(zip(parts, self._spans, self.sizes, strict=True)):
            if spans is None:
                if not isinstance(part, list) or len(part) != size:
                    raise ValueError(f"{name}: got {_described(part)} for batch {i}, expected {size} 1-D tensors")
            elif not isinstance(part, torch.Tensor) or part.shape != (size, spans.width):
                raise ValueError(f"{name}: got {_described(part)} for batch {i}, expected [{size}, {spans.width}]")
            columns.append(_cut(part, spans))
        return Rows(*_end_to_end(columns))

    # --- per row ------------------------------------------------------------------------------------------------

    def numbers(self, key: str) -> torch.Tensor:
        """[N] An entry of `info`, one number for each row, float32, on the CPU; `None` is NaN."""
        parts = []
        for i, batch in enumerate(self.batches):
            value = (batch.info or {}).get(key)
            if value is None:
                raise ValueError(f"experiences[{i}].info[{key!r}]: got none, expected a number for each sample")
            if isinstance(value, list):
                value = [math.nan if number is None else number for number in value]
            part = torch.as_tensor(value, dtype=torch.float32).detach().cpu().reshape(-1)
            if len(part) != self.sizes[i]:
                raise ValueError(
                    f"experiences[{i}].info[{key!r}]: got {len(part)} numbers, expected {self.sizes[i]}, one a sample"
                )
            parts.append(part)
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)

    def put_numbers(self, key: str, values: torch.Tensor) -> None:
        """Give each batch its rows' numbers in `info`."""
        for batch, part in zip(self.batches, self.split(values), strict=True):
            batch.info = {**(batch.info or {}), key: part.to(batch_device(batch))}

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """[N] numbers cut as the rows are."""
        if len(self.sizes) == 1:
            return [values]
        return list(torch.split(values, self.sizes)) if self.sizes else []

    def entries(self, key: str) -> list[Any] | None:
        """[N] What `info` holds for each row, `None` if no batch has it."""
        found: list[Any] = []
        for batch, size in zip(self.batches, self.sizes, strict=True):
            info = batch.info or {}
            value = info.get(key, (info.get("info") or {}).get(key))
            if isinstance(value, torch.Tensor):
                value = value.tolist()
            found += [None] * size if value is None else list(value)
        return None if all(value is None for value in found) else found

    def ids(self) -> list[EID] | None:
        """[N] The rows' ids, `None` unless every row has one."""
        if any(size and not batch.ids for batch, size in zip(self.batches, self.sizes, strict=True)):
            return None
        found = [eid for batch in self.batches for eid in batch.ids or ()]
        return None if any(eid is None for eid in found) else found  # type: ignore[return-value]

    def groups(self, per_group: int, ranks: ProcessGroup = SINGLE_PROCESS) -> Sequence[Any] | NDArray[np.int64]:
        """[N] Which task each row is of: by id; rows without ids by place, `per_group` after one another, in each
        process apart."""
        ids = self.ids()
        if ids is not None:
            return [group_id(eid) for eid in ids]
        if len(self) % per_group:
            raise ValueError(
                f"experiences: got {len(self)} samples without ids, expected a multiple of n_samples_per_prompt "
                f"({per_group}), to group them by place"
            )
        places = np.arange(len(self) // per_group).repeat(per_group)
        return places if ranks is SINGLE_PROCESS else [f"process {ranks.rank}, group {place}" for place in places]

    def runs(self) -> list[Any] | None:
        """[N] Which run each row is of; `None` without ids, where each row is one."""
        ids = self.ids()
        return None if ids is None else [run_id(eid) for eid in ids]


def mean_by_row(values: NDArray[np.float64], lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> torch.Tensor:
    """Compute each row's mean over the slots that count.

    Args:
        values: (total,) rows end to end, 0 where nothing counts.
        lengths: [B] slots of each row.
        counts: [B] how many of them count.

    Returns:
        [B] float32, 0 for a row in which nothing counts.

    >>> mean_by_row(np.array([1.0, 0.0, 3.0]), np.array([2, 0, 1]), np.array([1, 0, 1]))
    tensor([1., 0., 3.])
    """
    filled = lengths > 0  # reduceat has no empty segments
    sums = np.zeros(len(lengths), dtype=np.float32)
    if len(values):
        sums[filled] = np.add.reduceat(values, (lengths.cumsum() - lengths)[filled])
    return torch.from_numpy(sums / np.maximum(counts, 1).astype(np.float32))


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _cut(value: Any, spans: Spans | None) -> tuple[torch.Tensor, list[int]]:
    """A response-axis field of one batch without padding, on the CPU: its rows end to end, and their lengths."""
    if spans is not None:
        return spans.unpad(value.detach().cpu()), spans.lengths.tolist()
    rows = value if isinstance(value, Rows) else Rows(value)
    return rows.values.detach().to("cpu", copy=True), rows.lengths


def _end_to_end(columns: list[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[int]]:
    if len(columns) == 1:
        return columns[0]
    values = [values for values, _ in columns]
    return torch.cat(values) if values else torch.zeros(0), [n for _, lengths in columns for n in lengths]


def _count(batch: ExperienceBatch) -> int:
    """How many rows a batch has; one that is only looked at for its rewards need not have tokens."""
    if batch.sequences is not None:
        return len(batch)
    return len((batch.info or {}).get("reward", ()))


def _acting(batch: ExperienceBatch) -> Spans | None:
    """Where a padded batch's response slots lie; `None` for a packed one."""
    if batch.layout == "packed":
        return None
    width = int(batch.sequences.shape[1]) if batch.sequences is not None else 0
    found = [value for value in (_field(batch, name) for name in _WIDE) if value is not None]
    if not found:
        raise ValueError("experience: got no response-axis field, expected action_mask or action_log_probs")
    slots = int(found[0].shape[1])
    return spans_of_rows(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))[1]


_WIDE = ("action_mask", "action_log_probs", "values", "kl", "advantages", "returns", "base_action_log_probs")


def _all_true(batch: ExperienceBatch) -> Any:
    for name in _WIDE:
        value = _field(batch, name)
        if isinstance(value, torch.Tensor):
            return torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)
        if value is not None:
            rows = value if isinstance(value, Rows) else Rows(value)
            return rows.apply(lambda values: torch.ones(len(values), dtype=torch.bool, device=values.device))
    return None


def _field(batch: ExperienceBatch, name: str) -> Any:
    if name.startswith("extras."):
        return (batch.extras or {}).get(name.removeprefix("extras."))
    return getattr(batch, name)


def _set_field(batch: ExperienceBatch, name: str, value: Any) -> None:
    if name.startswith("extras."):
        batch.extras = {**(batch.extras or {}), name.removeprefix("extras."): value}
    else:
        setattr(batch, name, value)


def batch_device(batch: ExperienceBatch) -> torch.device:
    """Where a batch's tokens are."""
    sequences = batch.sequences
    if isinstance(sequences, torch.Tensor):
        return sequences.device
    if isinstance(sequences, Rows):
        return sequences.values.device
    return sequences[0].device if len(sequences) else torch.device("cpu")


@dataclass
class Scored:
    """What became of the rewards: one entry for each row of the rollout."""

    rewards: torch.Tensor
    """[N] What goes on each row's last action, before `finish` clips it."""
    steps: dict[str, Any] = field(default_factory=dict)
    """By the prefix of its metrics, what each step gave back, with a `report`."""
    scale: float = 1.0
    """The factor of the running norm, for token rewards."""

    @property
    def metrics(self) -> dict[str, float]:
        """What the steps report."""
        return {
            name: value for prefix, step in self.steps.items() for name, value in step.report.to_metrics(prefix).items()
        }


@dataclass(frozen=True)
class Recursions:
    """Replacements for the recursions over tokens, by LightRFT's signatures; `None`: the built-in one.

    Each is called once per batch, in the batch's own layout: (B, A) tensors if padded, `Rows` if packed.
    """

    returns: Callable[..., Any] | None = None
    """`get_cumulative_returns(rewards, action_mask, gamma)`, for estimators over rows and `reinforce`."""
    advantages: Callable[..., Any] | None = None
    """`get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)`, for `gae` and `ppo`."""


def over_rows(name: str) -> bool:
    """Whether an estimator scores whole rows within groups, whose scores then go through returns and the KL penalty.

    CPGD does score rows, but defines its advantages by that alone: no KL, no discount.

    >>> over_rows("rloo"), over_rows("reinforce_baseline"), over_rows("gae"), over_rows("cpgd")
    (True, True, False, False)
    """
    entry = ESTIMATORS[name]
    if entry.scores == "rows":
        return bool(entry.kl_in_reward)
    return entry.compares_runs and "token_rewards" in entry.inputs


def takes_token_rewards(name: str) -> bool:
    """Whether an estimator is given token rewards where a row has them.

    >>> takes_token_rewards("gae"), takes_token_rewards("grpo"), takes_token_rewards("reinforce_plus_plus_baseline")
    (True, False, False)
    """
    return ESTIMATORS[name].takes_token_rewards


def score(
    whole: RolloutBatches, config: MakerConfig, norm: RunningNorm | None = None, max_new_tokens: int | None = None
) -> Scored:
    """The rewards of a rollout, shaped, and scored within their groups if that is what the estimator does."""
    ranks = current_process_group()
    if ranks is SINGLE_PROCESS and norm is None and not config.overlong_buffer:
        scored = _block_scores(whole, config)
        if scored is not None:
            return scored
    rewards = whole.numbers("reward")
    steps: dict[str, Any] = {}
    scale = 1.0
    if config.overlong_buffer:
        if max_new_tokens is None:
            raise ValueError("max_new_tokens: got None, expected the longest response, for the overlong buffer")
        shaped = steps["overlong"] = shape_overlong(
            rewards,
            whole.numbers("response_length"),
            max_length=max_new_tokens,
            buffer=config.overlong_buffer_len,
            factor=config.overlong_buffer_penalty_factor,
        )
        rewards = shaped.rewards
    if norm is not None:
        normed = steps["running_norm"] = norm(rewards, process_group=ranks)
        rewards = normed.rewards
        scale = 1 / norm.scale
    if over_rows(config.advantage_estimator):
        found = _row_scores(whole, rewards, config, ranks)
        steps[ESTIMATORS[config.advantage_estimator].name] = found
        scores = torch.as_tensor(found.advantages if found.scores is None else found.scores, dtype=torch.float32)
        missing = rewards.isnan()
        rewards = torch.where(missing, torch.nan, scores) if missing.any() else scores  # it stays missing
    return Scored(rewards, steps, scale)


def _block_scores(whole: RolloutBatches, config: MakerConfig) -> Scored | None:
    """Score rewards whose groups are blocks of `n_samples_per_prompt` rows, in about ten numpy operations.

    Returns:
        The scores of the general path, bit for bit, or `None` if it is needed: other estimators or options, rows with
        ids, missing or infinite rewards, rewards that are not float32 on the CPU.
    """
    size, options = config.n_samples_per_prompt, config.estimator_options
    entry = ESTIMATORS[config.advantage_estimator]
    formula = entry.function
    if formula not in _BLOCK_FORMULAS or size < 2 or (options and (formula is not grpo or list(options) != ["eps"])):
        return None
    parts = []
    for batch, count in zip(whole.batches, whole.sizes, strict=True):
        part = batch.info.get("reward") if batch.info else None
        if batch.ids or type(part) is not torch.Tensor or not part.is_cpu or part.dtype != torch.float32:
            return None
        if part.shape != (count,) or part.requires_grad:
            return None
        parts.append(part.numpy())
    if not parts:
        return None
    rewards = np.concatenate(parts, dtype=np.float64)  # a copy: the report is computed later
    if not len(rewards) or len(rewards) % size or not isfinite(rewards.dot(rewards)):
        return None
    blocks = rewards.reshape(-1, size)
    ascending, means = block_means(blocks)
    scores = blocks - means[:, None]
    if formula is rloo:
        scores *= size
        scores /= size - 1
    elif formula is grpo:
        squares = sums_of_blocks((ascending - means[:, None]) ** 2)
        divisors = np.sqrt(squares / (size - 1)) + check_float("eps", options.get("eps", entry.options["eps"]), 0)
        scores /= np.where(divisors > 0, divisors, 1.0)[:, None]
    scores += 0.0  # -0.0 becomes 0.0
    with np.errstate(over="ignore"):
        shaped = torch.from_numpy(scores.reshape(-1).astype(np.float32))

    def report() -> Report:
        return _row_scores(whole, torch.from_numpy(rewards.astype(np.float32)), config, SINGLE_PROCESS).report

    return Scored(shaped, {entry.name: Advantages(shaped, None, shaped, None, report)})


_BLOCK_FORMULAS = (grpo, dr_grpo, rloo, reinforce_plus_plus_baseline)
"""The estimators of `_block_scores`; the last one's scores are those of `dr_grpo`."""


def _clipped(rewards: torch.Tensor, config: MakerConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[N] The rewards within the configured bounds, and 1 where that changed one; `None` without bounds."""
    fraction = None
    for low, high in _bounds(config):
        clipped = clip_rewards(rewards, low, high).rewards
        changed = ((clipped != rewards) & ~rewards.isnan()).float()
        fraction = changed if fraction is None else torch.maximum(fraction, changed)
        rewards = clipped
    return rewards, fraction


def _bounds(config: MakerConfig) -> list[tuple[float, float]]:
    if not ESTIMATORS[config.advantage_estimator].clips_rewards:
        return []
    found = [] if config.reward_clip_range is None else [config.reward_clip_range]
    return [*found, (-config.reward_clip, config.reward_clip)] if config.reward_clip > 0 else found


def _row_scores(whole: RolloutBatches, rewards: torch.Tensor, config: MakerConfig, ranks: ProcessGroup) -> Advantages:
    entry = ESTIMATORS[config.advantage_estimator]
    if entry.name == "reinforce_plus_plus_baseline":
        # Its baseline is that of dr_grpo; what it does besides (returns, whitening) comes later here.
        entry = ESTIMATORS["dr_grpo"]
    options = {name: value for name, value in config.estimator_options.items() if name in entry.options}
    if "process_group" in entry.options:
        options.setdefault("process_group", ranks)
    ids = whole.ids()
    groups = whole.groups(config.n_samples_per_prompt, ranks)
    alone = config.n_samples_per_prompt == 1 if ids is None else len(set(groups)) == len(groups)
    if ranks is SINGLE_PROCESS and alone and len(groups) > 1:
        advise(
            f"{entry.name}: every group has one sample, and nothing to compare it with; n_samples_per_prompt is "
            f"{config.n_samples_per_prompt}"
        )
    given: dict[str, Any] = {
        "rewards": rewards,
        "groups": groups,
        "runs": None if ids is None else whole.runs(),
        "ids": None if ids is None else [eid.uid for eid in ids],
        "steps": None if ids is None else [eid.step for eid in ids],
    }
    if entry.inputs.get("runs") and ids is None:
        given |= {"runs": list(range(len(whole))), "steps": [0] * len(whole)}
    given = {name: value for name, value in given.items() if value is not None and name in entry.inputs}
    return as_advantages(entry.name, entry.call(given, options))


def check(config: MakerConfig, given: Mapping[str, Any]) -> None:
    """Refuse an estimator that lacks a model, before anything is sampled.

    >>> check(MakerConfig(advantage_estimator="gae"), {"values": None})
    Traceback (most recent call last):
        ...
    ValueError: gae: got no values, which it needs; give the maker a critic
    """
    entry = ESTIMATORS[config.advantage_estimator]
    needs = {"values": "values", "teacher_logprobs": "teacher"}
    for name, model in needs.items():
        if name in entry.inputs and given.get(model) is None:
            shown = name if name == "values" else repr(name)
            raise ValueError(f"{entry.name}: got no {shown}, which it needs; {_SOURCES[name]}")
    if config.kl_coef is not None and config.kl_coef > 0 and not config.use_kl_loss and given.get("reference") is None:
        raise ValueError(
            f"initial_model: got None, expected the reference model of the KL penalty (kl_coef is {config.kl_coef:g})"
        )


def finish(
    whole: RolloutBatches,
    scored: Scored,
    config: MakerConfig,
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lambd: float = 1.0,
    recursions: Recursions | None = None,
) -> dict[str, float]:
    """Give each batch of a rollout its `advantages` and `returns`, and `info` what the steps have to say.

    Rewards are clipped here, after whoever scored them. Adds `info["return"]` (the sum of a row's token rewards),
    `reward_clip_frac` and `advantage_clip_frac` where there is a bound, and `filtered` where `dynamic_sampling` masks
    rows. Gives back metrics of the whole.
    """
    ranks = current_process_group()
    recursions = recursions or Recursions()
    entry = ESTIMATORS[config.advantage_estimator]
    mask = whole.rows("action_mask")
    if mask is None:
        raise ValueError("action_mask: got none, and no other response-axis field, expected one")
    metrics = dict(scored.metrics)
    rewards, clip_fraction = _clipped(scored.rewards, config)
    known = ~rewards.isnan() if "rewards" in entry.inputs else torch.ones(len(whole), dtype=torch.bool)
    keep = torch.ones(len(whole), dtype=torch.bool)
    if config.dynamic_sampling:
        groups = whole.groups(config.n_samples_per_prompt, ranks)
        kept = zero_variance(whole.numbers("reward"), groups, whole.runs(), process_group=ranks)
        keep = kept.keep.cpu()
        mask = _where(mask, keep)
        whole.put_numbers("filtered", ~keep)
        metrics |= kept.report.to_metrics("dynamic_sampling")
    coef = 0.0 if config.use_kl_loss else max(kl_coef, 0.0)
    by_token = whole.token_rewards() if takes_token_rewards(entry.name) else None
    if by_token is not None:
        rewards = torch.where(by_token[1], rewards - scored.scale * whole.numbers("reward"), rewards)
    # A list: of a tensor with as many rows as tokens nobody could say which it is of.
    token_rewards, report = penalize(rewards.tolist(), whole.rows("kl") if coef > 0 else None, mask, coef=coef)
    if by_token is not None:
        token_rewards = Rows(token_rewards.values + scored.scale * by_token[0].values, mask.lengths)
    metrics |= report.to_metrics("reward") | {"reward/missing_reward": float((~known).sum())}
    if over_rows(entry.name):
        counted = _where(mask, known)  # of a row without a reward nothing is known, its KL or not
        baseline = entry.name == "reinforce_plus_plus_baseline"
        options = {"whiten": False, "gamma": gamma, "process_group": ranks, **config.estimator_options}
        if baseline and recursions.returns is None:
            # Its scores have the group's mean taken off already: without groups it does the rest.
            found = entry.call({"token_rewards": token_rewards, "mask": counted}, options)
            advantages, returns = found.advantages, found.returns
        else:
            returns = _returns_to_go(whole, token_rewards, counted, gamma, recursions)
            advantages = returns.apply(torch.clone)
            if baseline and options["whiten"]:
                advantages = whiten(advantages, counted, process_group=ranks)
        whitened = baseline and bool(options["whiten"])
    else:
        found, whitened = _over_tokens(
            whole, rewards, token_rewards, mask, config, coef, gamma, lambd, ranks, recursions
        )
        advantages, returns = found.advantages, found.returns
        mask = found.mask if isinstance(found.mask, Rows) else mask
        counted = _where(mask, known)
        metrics |= found.report.to_metrics(entry.name)
    if config.advantages_norm and not whitened and not entry.normalized:
        options = {"eps_in": "std", "scale": not config.no_advantage_std_norm, "process_group": ranks}
        advantages = whiten(advantages, counted, **options)
    if config.advantage_clip > 0:
        clipped = clip_advantages(advantages, mask, config.advantage_clip)
        advantages = clipped.advantages
        whole.put_numbers("advantage_clip_frac", clipped.fractions.cpu())
        metrics["advantage/clip_fraction"] = clipped.fraction
    if clip_fraction is not None:
        whole.put_numbers("reward_clip_frac", clip_fraction)
        metrics["reward/clip_fraction"] = float(clip_fraction.mean())
    sums = [row.sum() for row in token_rewards]
    whole.put_numbers("return", torch.stack(sums) if sums else torch.zeros(0))
    if config.dynamic_sampling or not over_rows(entry.name):
        whole.put("action_mask", mask)
    whole.put("advantages", advantages)
    whole.put("returns", returns)
    return metrics


def _where(mask: Rows, keep: torch.Tensor) -> Rows:
    """A mask with some rows taken out."""
    lengths = torch.tensor(mask.lengths, dtype=torch.int64)
    return Rows(mask.values & torch.repeat_interleave(keep, lengths), mask.lengths)


def _returns_to_go(
    whole: RolloutBatches, token_rewards: Rows, mask: Rows, gamma: float, recursions: Recursions
) -> Rows:
    if recursions.returns is None:
        returns: Rows = cumulative_returns(token_rewards, mask, gamma=gamma)
        return returns
    arguments = zip(whole.laid_out(token_rewards), whole.laid_out(mask), strict=True)
    return whole.gathered("get_cumulative_returns", [recursions.returns(*batch, gamma) for batch in arguments])


def _replaced(
    whole: RolloutBatches,
    rewards: torch.Tensor,
    token_rewards: Rows,
    values: Rows | None,
    mask: Rows,
    options: Mapping[str, Any],
    recursions: Recursions,
) -> Advantages:
    """The estimate of `gae` (with `values`) or `reinforce` by a replaced recursion, whitened and clipped as theirs."""
    counted = _where(mask, ~rewards.isnan())
    if values is not None and recursions.advantages is not None:
        arguments = zip(*map(whole.laid_out, (values, token_rewards, counted)), strict=True)
        pairs = [recursions.advantages(*batch, options["gamma"], options["lam"]) for batch in arguments]
        advantages, returns = (
            whole.gathered("get_advantages_and_returns", [pair[part] for pair in pairs]) for part in (0, 1)
        )
        # From a row without a reward the critic is to learn nothing.
        unknown = _where(mask, rewards.isnan()).values
        returns = returns.apply(lambda found: torch.where(unknown, values.values.to(found.dtype), found))
    else:
        returns = _returns_to_go(whole, token_rewards, counted, options["gamma"], recursions)
        advantages = returns.apply(torch.clone)
    if options.get("whiten"):
        advantages = whiten(advantages, counted, **{name: options[name] for name in ("std", "eps", "process_group")})
    if options.get("clip") is not None:
        advantages = clip_advantages(advantages, counted, options["clip"]).advantages
    return Advantages(advantages, returns)


def _over_tokens(
    whole: RolloutBatches,
    rewards: torch.Tensor,
    token_rewards: Rows,
    mask: Rows,
    config: MakerConfig,
    coef: float,
    gamma: float,
    lambd: float,
    ranks: ProcessGroup,
    recursions: Recursions,
) -> tuple[Advantages, bool]:
    """The estimators that look at tokens, and whether they whitened."""
    entry = ESTIMATORS[config.advantage_estimator]
    options: dict[str, Any] = dict(config.estimator_options)
    for name, value in (("gamma", gamma), ("lam", lambd), ("process_group", ranks)):
        if name in entry.options:
            options.setdefault(name, value)
    if config.advantages_norm and not config.no_advantage_std_norm and "whiten" in entry.options:
        options.setdefault("whiten", True)
    given: dict[str, Any] = {"mask": mask}
    makers: dict[str, Any] = {
        "rewards": lambda: rewards,
        "groups": lambda: whole.groups(config.n_samples_per_prompt, ranks),
        "runs": whole.runs,
        "steps": lambda: [eid.step for eid in whole.ids() or ()] or None,
        "values": lambda: whole.rows("values"),
        "old_logprobs": lambda: whole.rows("action_log_probs"),
        "teacher_logprobs": lambda: whole.rows("extras.teacher_logprobs"),
        "entropy": lambda: whole.rows("action_entropy"),
        "necs": lambda: whole.rows("extras.necs"),
    }
    makers |= {name: (lambda key=key: whole.entries(key)) for name, key in INFO_KEYS.items()}
    if "token_rewards" in entry.inputs:
        # Those of rows without a reward are 0 there, and must be known to be unknown: their rewards come as rewards.
        known = ~rewards.isnan()
        makers["token_rewards"] = lambda: token_rewards
        makers["rewards"] = lambda: None if bool(known.all()) else torch.where(known, 0.0, torch.nan).tolist()
    elif coef > 0:
        advise(f"{entry.name} takes no rewards of tokens: the KL penalty is left out")
    given |= {name: makers[name]() for name in entry.inputs if name in makers}
    given = {name: value for name, value in given.items() if value is not None}
    missing = [name for name, needed in entry.inputs.items() if needed and name not in given]
    if missing:
        raise ValueError(f"{entry.name}: got no {missing[0]!r}, which it needs; {_advice(missing[0])}")
    if entry.greedy_baseline and "baselines" not in given:
        raise ValueError(f"{entry.name}: got no baselines, which it needs; {_advice('baselines')}")
    over_values = entry.name in ("gae", "ppo")
    replaces = recursions.advantages if over_values else recursions.returns
    if replaces is not None and (over_values or entry.name in ("reinforce", "reinforce_plus_plus")):
        chosen = {**entry.options, **options}
        found = _replaced(whole, rewards, token_rewards, given.get("values"), mask, chosen, recursions)
    else:
        found = as_advantages(entry.name, entry.call(given, options))
    return found, bool(options.get("whiten", entry.options.get("whiten", False)))


_SOURCES = {
    "values": "give the maker a critic",
    "teacher_logprobs": "give the maker a teacher",
    "necs": "put them into each batch's extras['necs']",
    "entropy": "set MakerConfig.entropy",
    "old_logprobs": "give the maker an actor that computes them",
}


def _advice(name: str) -> str:
    return _SOURCES.get(name) or f"put them into the prompts' info[{INFO_KEYS.get(name, name)!r}]"


__all__ = [
    "Recursions",
    "Scored",
    "check",
    "finish",
    "over_rows",
    "score",
    "takes_token_rewards",
]
