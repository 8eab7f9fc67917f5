"""Inputs of estimators by name, read from records when they are first used.

Invariant: groups, runs and steps come from ids, never from positions; a record that was never given a task is a group
of its own. Columns are read where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rollbook.batch.columns import mask_unpredicted
from rollbook.core.checks import check_choice
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.ids import EID
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows

INFO_KEYS = {"states": "env_state_hash", "step_rewards": "step_reward", "baselines": "reward_baseline"}
"""Inputs that a record keeps in its `info`, and the key of each."""


class Inputs(Mapping[str, Any]):
    """Inputs by name, each made when it is first asked for; `None` where the source has none.

    >>> from rollbook import Experience
    >>> inputs = inputs_of([Experience(eid={"batch": 1, "task": 2, "run": r}, tokens=[1, 2], reward=r) for r in (0, 1)])
    >>> inputs["rewards"].tolist(), inputs["groups"], inputs["runs"], inputs["mask"].tensors()
    ([0.0, 1.0], ['1/2', '1/2'], ['1/2/0', '1/2/1'], [tensor([True]), tensor([True])])
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]], count: int) -> None:
        self._makers = dict(makers)
        self._made: dict[str, Any] = {}
        self.count = count
        """How many rows there are."""

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in self._makers:
                raise KeyError(name)
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers  # and nothing is made to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def inputs_of(data: Any, *, info_keys: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """The inputs that records, a batch, or a mapping of inputs by name have to offer.

    `info_keys` says which key of `info` holds what: `states`, `step_rewards`, `baselines` (`INFO_KEYS` where it does
    not), and for records, which have no fields for them, `values`, `entropy` and `necs`, a list for each.

    >>> from rollbook import Experience
    >>> inputs_of([Experience(tokens=[1, 2], info={"room": "hall"})], info_keys={"states": "room"})["states"]
    ['hall']
    """
    for name in info_keys or ():
        check_choice("info_keys", name, (*INFO_KEYS, "values", "necs", "entropy"))
    keys = {**INFO_KEYS, **(info_keys or {})}
    if isinstance(data, Mapping):
        return data
    if hasattr(data, "estimator_inputs"):
        return data.estimator_inputs(keys)  # type: ignore[no-any-return]
    return _of_records(mask_unpredicted(as_experiences(data)), keys)


def _of_records(many: Experiences, keys: Mapping[str, str]) -> Inputs:
    makers: dict[str, Callable[[], Any]] = {
        "rewards": lambda: row_rewards(many),
        "groups": lambda: [group_id(eid) for eid in many.eids()],
        "runs": lambda: [run_id(eid) for eid in many.eids()],
        "steps": lambda: [eid.step for eid in many.eids()],
        "ids": lambda: [eid.uid for eid in many.eids()],
        "mask": lambda: _tokens(many, "action_mask"),
        "response": lambda: all_of(_tokens(many, "action_mask")),
        "token_rewards": lambda: _partly(many, "token_level_reward")[0],
        "without_token_rewards": lambda: _partly(many, "token_level_reward")[1],
        "old_logprobs": lambda: _first(_tokens(many, "old_logprobs"), lambda: _tokens(many, "logprobs")),
        "ref_logprobs": lambda: _tokens(many, "ref_logprobs"),
        "teacher_logprobs": lambda: _tokens(many, "teacher_logprobs"),
        "values": lambda: _tokens(many, "values"),
        "entropy": lambda: _tokens(many, "entropy"),
    }
    makers |= {name: lambda key=key: _info(many.values("info"), key) for name, key in keys.items()}  # type: ignore[misc]
    return Inputs(makers, len(many))


def group_id(eid: EID) -> str:
    """The task a record belongs to; the record itself if it was never given one."""
    return eid.uid if eid.batch == "" and eid.task == "" else eid.tid


def run_id(eid: EID) -> str:
    """The run a record belongs to; the record itself if it was never given a task."""
    return eid.uid if eid.batch == "" and eid.task == "" else eid.rid


def row_rewards(many: Experiences) -> NDArray[np.float64]:
    """[N] The reward of each record, NaN where there is none: `reward`, or the sum of `token_level_reward` where
    `reward` is `None`. A `reward` of NaN could not be computed, and stays NaN.

    >>> from rollbook import Experience
    >>> token_rewards = {"tokens": [1, 2, 3], "token_level_reward": [0.5, 1.0]}
    >>> records = [Experience(**token_rewards), Experience(**token_rewards, reward=0.0), Experience(tokens=[1, 2])]
    >>> row_rewards(Experiences(records))
    array([1.5, 0. , nan])
    """
    rewards = _numbers(many, "reward")
    if not np.isnan(rewards).any():
        return rewards
    columns = zip(rewards, many.values("reward"), many.values("token_level_reward"), strict=True)
    return np.array(
        [
            number if reward is not None or token_rewards is None else float(token_rewards.double().sum())
            for number, reward, token_rewards in columns
        ]
    )


def group_numbers(many: Experiences) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """[N] Numbers that tell groups apart, and runs: what `group_id` and `run_id` say, without making ids.

    The runs are `None` where each has a single row.

    >>> from rollbook import Experience
    >>> many = Experiences([Experience(eid={"task": t, "run": r}, tokens=[1, 2]) for t, r in ((7, 0), (8, 0), (7, 0))])
    >>> [numbers.tolist() for numbers in group_numbers(many)]
    [[0, 1, 0], [0, 1, 0]]
    """
    if not len(many):
        return np.zeros(0, dtype=np.int64), None
    eid: Any = many.column("eid")
    (batch, no_batch), (task, no_task) = (_codes(eid.field(name)) for name in ("batch", "task"))
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
    inputs: Mapping[str, Any], many: Experiences | None, *, required: bool = False, ranks: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """Return the groups and runs of rows: by number where no other process must understand them, else by id.

    Args:
        inputs: What `inputs_of` gave.
        many: The records, if the inputs are of records.
        required: Whether the runs must be there also where each has a single row.
        ranks: The processes that compare their rows.
    """
    if many is not None and ranks is SINGLE_PROCESS:
        groups, runs = group_numbers(many)
        if runs is None and required:
            runs = np.arange(len(groups))
        return {"groups": groups, "runs": runs}
    return {"groups": inputs["groups"], "runs": inputs["runs"]}


class Uids(Sequence[str]):
    """The uids of records, each made when it is asked for."""

    def __init__(self, many: Experiences) -> None:
        self._many = many

    def __len__(self) -> int:
        return len(self._many)

    def __getitem__(self, index: Any) -> Any:
        return [row.eid.uid for row in self._many[index]] if isinstance(index, slice) else self._many[index].eid.uid


def _codes(column: pa.Array) -> tuple[NDArray[np.int64], int]:
    """[N] A number for each text, and the number of the empty text; -1 if it is not among them."""
    coded = column.dictionary_encode()
    found: NDArray[Any] = coded.indices.to_numpy(zero_copy_only=False)
    return found.astype(np.int64), coded.dictionary.index("").as_py()


def _numbers(many: Experiences, name: str) -> NDArray[np.float64]:
    column = many.column(name)
    if isinstance(column, pa.Array) and pa.types.is_floating(column.type):
        found: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return found
    return np.array(many.values(name), dtype=np.float64)  # None becomes NaN


def _tokens(many: Experiences, name: str) -> Rows | Ragged | None:
    """A response-axis column that all records have, or none of them has (`None`)."""
    if not len(many):
        return Rows(torch.empty(0), [])
    found, absent = _partly(many, name)
    if found is not None and absent:
        uid = many[absent[0]].eid.uid
        raise ValueError(f"{name}: record {absent[0]} ({uid}) has none, expected it in every record, or in none")
    return found


def _partly(many: Experiences, name: str) -> tuple[Rows | Ragged | None, list[int]]:
    """A response-axis column, and the records that lack it; these have zeros in it. `None` if all lack it. A mask that
    some lack is True there."""
    column = many.column(name) if len(many) else None
    if isinstance(column, Ragged) and column.codes is None and column.valid is None:
        return column, []
    values = many.values(name)
    absent = [i for i, value in enumerate(values) if value is None]
    if len(absent) == len(values):
        return None, absent
    lengths = np.maximum(many.token_lengths() - many.prompt_lengths(), 0).tolist()
    given = zip(many.values("action_mask"), lengths, strict=True)
    masks = [torch.ones(length, dtype=torch.bool) if mask is None else mask for mask, length in given]
    if name == "action_mask":
        return Rows(masks), []
    return Rows([torch.zeros(len(m)) if v is None else v for v, m in zip(values, masks, strict=True)]), absent


def all_of(rows: Rows | Ragged | None) -> Rows | None:
    return None if rows is None else Rows(torch.ones(int(sum(rows.lengths)), dtype=torch.bool), rows.lengths)


def _first(found: Any, other: Callable[[], Any]) -> Any:
    return other() if found is None else found


def _info(infos: list[Any], key: str) -> list[Any] | None:
    found = [(info or {}).get(key) for info in infos]
    return None if all(value is None for value in found) else found


__all__ = ["INFO_KEYS", "Inputs", "group_id", "group_inputs", "group_numbers", "inputs_of", "row_rewards", "run_id"]
