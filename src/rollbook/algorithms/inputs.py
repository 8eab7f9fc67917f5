"""Inputs of estimators by name, read from records on first access.

Invariant: groups, runs and steps come from ids, never from positions. A record without a task is a group of its own.
Columns are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rollbook.batch.columns import mask_unpredicted
from rollbook.core.checks import check_choice
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.ids import EID
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows

INFO_KEYS = {"states": "env_state_hash", "step_rewards": "step_reward", "baselines": "reward_baseline"}
"""Inputs that records have in `info`, and their keys."""


class Inputs(Mapping[str, Any]):
    """Inputs by name, each read on first access; `None` if the source has none.

    Args:
        sources: Functions that read the inputs, by name.
        count: Number of rows.

    >>> from rollbook import Experience
    >>> records = [Experience(eid={"batch": 1, "task": 2, "run": run}, tokens=[1, 2], reward=run) for run in (0, 1)]
    >>> inputs = read_inputs(records)
    >>> inputs["rewards"].tolist(), inputs["groups"], inputs["runs"], inputs["mask"].tensors()
    ([0.0, 1.0], ['1/2', '1/2'], ['1/2/0', '1/2/1'], [tensor([True]), tensor([True])])
    """

    def __init__(self, sources: Mapping[str, Callable[[], Any]], count: int) -> None:
        self._sources = dict(sources)
        self._read: dict[str, Any] = {}
        self.count = count

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            if name not in self._sources:
                raise KeyError(name)
            self._read[name] = self._sources[name]()
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sources  # the inherited method would read the input

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


@runtime_checkable
class InputBatch(Protocol):
    """A batch that provides the inputs of estimators."""

    ids: Sequence[Hashable | None] | None
    """[B] Id of each row, if known."""

    def estimator_inputs(self, keys: Mapping[str, str]) -> Inputs:
        """Return the inputs; `keys` are the keys of `info` by input name."""


EstimatorData: TypeAlias = Iterable[Experience] | InputBatch | Mapping[str, Any]
"""`Experiences`, a list of records, a batch, or inputs by name."""


def read_inputs(data: EstimatorData, *, info_keys: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Return the inputs of estimators that records, a batch or a mapping have.

    Args:
        data: `Experiences`, a list of records, a batch with `estimator_inputs`, or a mapping.
        info_keys: Keys of `info`: of `states`, `step_rewards`, `baselines` (default `INFO_KEYS`), and for records also
            of `values`, `entropy` and `necs`.

    Returns:
        The inputs by name; those of records are read when they are first used.

    Raises:
        ValueError: If `info_keys` has an unknown name.

    >>> from rollbook import Experience
    >>> read_inputs([Experience(tokens=[1, 2], info={"room": "hall"})], info_keys={"states": "room"})["states"]
    ['hall']
    """
    for name in info_keys or ():
        check_choice("info_keys", name, (*INFO_KEYS, "values", "necs", "entropy"))
    keys = {**INFO_KEYS, **(info_keys or {})}
    if isinstance(data, Mapping):
        return data
    if isinstance(data, InputBatch):
        return data.estimator_inputs(keys)
    records = mask_unpredicted(as_experiences(data))
    sources: dict[str, Callable[[], Any]] = {
        "rewards": partial(row_rewards, records),
        "groups": lambda: [group_id(eid) for eid in records.eids()],
        "runs": lambda: [run_id(eid) for eid in records.eids()],
        "steps": lambda: [eid.step for eid in records.eids()],
        "ids": lambda: [eid.uid for eid in records.eids()],
        "mask": partial(_tokens, records, "action_mask"),
        "response": lambda: full_mask(_tokens(records, "action_mask")),
        "token_rewards": lambda: _tokens_and_absent(records, "token_level_reward")[0],
        "without_token_rewards": lambda: _tokens_and_absent(records, "token_level_reward")[1],
        "old_logprobs": partial(_old_logprobs, records),
        "ref_logprobs": partial(_tokens, records, "ref_logprobs"),
        "teacher_logprobs": partial(_tokens, records, "teacher_logprobs"),
        "values": partial(_tokens, records, "values"),
        "entropy": partial(_tokens, records, "entropy"),
    }
    for name, key in keys.items():
        sources[name] = partial(_info, records, key)
    return Inputs(sources, len(records))


def group_id(eid: EID) -> str:
    """Return the task of a record, or the record itself if it has none.

    Args:
        eid: Id of the record.

    Returns:
        The id of the group.

    >>> group_id(EID(batch=1, task=2, run=3))
    '1/2'
    """
    return eid.uid if eid.batch == "" and eid.task == "" else eid.tid


def run_id(eid: EID) -> str:
    """Return the run of a record, or the record itself if it has no task.

    Args:
        eid: Id of the record.

    Returns:
        The id of the run.

    >>> run_id(EID(batch=1, task=2, run=3))
    '1/2/3'
    """
    return eid.uid if eid.batch == "" and eid.task == "" else eid.rid


def row_rewards(records: Experiences) -> NDArray[np.float64]:
    """Read the reward of each record.

    It is `reward`, or the sum of `token_level_reward` if `reward` is `None`. A `reward` of NaN could not be computed,
    and stays NaN.

    Args:
        records: Any records.

    Returns:
        [N] Rewards, NaN where a record has none.

    >>> from rollbook import Experience
    >>> token_rewards = {"tokens": [1, 2, 3], "token_level_reward": [0.5, 1.0]}
    >>> records = [Experience(**token_rewards), Experience(**token_rewards, reward=0.0), Experience(tokens=[1, 2])]
    >>> row_rewards(Experiences(records))
    array([1.5, 0. , nan])
    """
    column = records.column("reward")
    if isinstance(column, pa.Array) and pa.types.is_floating(column.type):
        rewards: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    else:
        rewards = np.array(records.values("reward"), dtype=np.float64)  # None becomes NaN
    if not np.isnan(rewards).any():
        return rewards
    columns = zip(rewards, records.values("reward"), records.values("token_level_reward"), strict=True)
    return np.array(
        [
            number if reward is not None or token_rewards is None else float(token_rewards.double().sum())
            for number, reward, token_rewards in columns
        ]
    )


def group_numbers(records: Experiences) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Number the groups and runs of records, as `group_id` and `run_id` identify them, without building ids.

    Args:
        records: Any records.

    Returns:
        [N] numbers of groups, and [N] numbers of runs, `None` if each run has a single row.

    >>> from rollbook import Experience
    >>> records = Experiences([Experience(eid={"task": t, "run": 0}, tokens=[1, 2]) for t in (7, 8, 7)])
    >>> [numbers.tolist() for numbers in group_numbers(records)]
    [[0, 1, 0], [0, 1, 0]]
    """
    if not len(records):
        return np.zeros(0, dtype=np.int64), None
    eid: Any = records.column("eid")
    (batch, no_batch), (task, no_task) = _codes(eid.field("batch")), _codes(eid.field("task"))
    run = eid.field("run").to_numpy(zero_copy_only=False).astype(np.int64)
    group = batch * (int(task.max(initial=0)) + 1) + task
    within = run - run.min(initial=0)
    if no_batch >= 0 and no_task >= 0:
        nameless = (batch == no_batch) & (task == no_task)
        group[nameless] = int(group.max(initial=0)) + 1 + np.arange(int(nameless.sum()))
        within[nameless] = 0
    runs = group * (int(within.max(initial=0)) + 1) + within
    ordered = np.sort(runs)
    return group, runs if (ordered[1:] == ordered[:-1]).any() else None


def group_inputs(
    inputs: Mapping[str, Any],
    records: Experiences | None,
    *,
    required: bool = False,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Return the groups and runs of rows: as numbers in a single process, as ids if several compare their rows.

    Args:
        inputs: The result of `read_inputs`.
        records: The records, if the inputs are of records.
        required: Whether to return runs even if each has a single row.
        process_group: Processes that compare their rows.

    Returns:
        `groups` and `runs`, [B] each; `runs` is `None` if each run has a single row.

    >>> group_inputs({"groups": ["a", "a"], "runs": ["a/0", "a/1"]}, None)
    {'groups': ['a', 'a'], 'runs': ['a/0', 'a/1']}
    """
    if records is not None and process_group is SINGLE_PROCESS:
        groups, runs = group_numbers(records)
        if runs is None and required:
            runs = np.arange(len(groups))
        return {"groups": groups, "runs": runs}
    return {"groups": inputs["groups"], "runs": inputs["runs"]}


class RecordIds(Sequence[str]):
    """The uids of records, built on access."""

    def __init__(self, records: Experiences) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [record.eid.uid for record in self._records[index]]
        return self._records[index].eid.uid


def _codes(column: pa.Array) -> tuple[NDArray[np.int64], int]:
    """Number the texts; also return the number of the empty text, or -1 if there is none. Shape: [N]."""
    coded = column.dictionary_encode()
    codes: NDArray[Any] = coded.indices.to_numpy(zero_copy_only=False)
    return codes.astype(np.int64), coded.dictionary.index("").as_py()


def _tokens(records: Experiences, name: str) -> Rows | Ragged | None:
    """Read a response-axis column that all records have, or none (`None`)."""
    if not len(records):
        return Rows(torch.empty(0), [])
    column, absent = _tokens_and_absent(records, name)
    if column is not None and absent:
        uid = records[absent[0]].eid.uid
        raise ValueError(f"{name}: missing in record {absent[0]} ({uid}), expected it in every record, or in none")
    return column


def _tokens_and_absent(records: Experiences, name: str) -> tuple[Rows | Ragged | None, list[int]]:
    """Read a response-axis column, and the numbers of the records that lack it.

    The column is 0 for records that lack it (a mask is True), and `None` if all do.
    """
    column = records.column(name) if len(records) else None
    if isinstance(column, Ragged) and column.codes is None and column.valid is None:
        return column, []
    values = records.values(name)
    absent = [i for i, value in enumerate(values) if value is None]
    if len(absent) == len(values):
        return None, absent
    lengths = np.maximum(records.token_lengths() - records.prompt_lengths(), 0).tolist()
    known_masks = zip(records.values("action_mask"), lengths, strict=True)
    masks = [torch.ones(length, dtype=torch.bool) if mask is None else mask for mask, length in known_masks]
    if name == "action_mask":
        return Rows(masks), []
    return Rows([torch.zeros(len(m)) if v is None else v for v, m in zip(values, masks, strict=True)]), absent


def full_mask(rows: Rows | Ragged | None) -> Rows | None:
    """Return a mask over all slots of packed rows."""
    return None if rows is None else Rows(torch.ones(int(sum(rows.lengths)), dtype=torch.bool), rows.lengths)


def _old_logprobs(records: Experiences) -> Rows | Ragged | None:
    """Read the policy's log-probs before the update, or else those of the engine."""
    logprobs = _tokens(records, "old_logprobs")
    return _tokens(records, "logprobs") if logprobs is None else logprobs


def _info(records: Experiences, key: str) -> list[Any] | None:
    """Read an entry of each record's `info`; `None` if all lack it."""
    entries = [(info or {}).get(key) for info in records.values("info")]
    return None if all(entry is None for entry in entries) else entries


__all__ = ["INFO_KEYS", "Inputs", "group_id", "group_inputs", "group_numbers", "read_inputs", "row_rewards", "run_id"]
