"""What trainers dump of their rollouts: verl, TRL and OpenRLHF.

Invariant: what a row says of a sample is shown or stands in `info`; numbers beside the reward are metrics. Layouts as
written by verl 0.4 to 0.7 (`{step}.jsonl` of `rollout_data_dir`, Parquet of its generation and of its batches), TRL
0.15 to 0.25 (`completions_*.parquet`, JSONL of the same columns) and OpenRLHF 0.6 to 0.9.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rollbook.core.errors import WireError
from rollbook.inspect.documents import Trajectory
from rollbook.inspect.files.images import Where
from rollbook.inspect.files.limits import number, numbers, whole
from rollbook.inspect.files.making import conversation, from_ids
from rollbook.inspect.files.stores import Row
from rollbook.inspect.plain import plain
from rollbook.io import frameworks
from rollbook.io.frameworks import Sample

_LABELS = ("gts", "ground_truth", "answer", "solution", "label", "labels")


def verl(row: Row, where: Where) -> Iterator[Trajectory]:
    """A row of verl's."""
    samples, used = frameworks.split_verl_row(row)
    for sample in samples:
        yield _made(sample, row, used, where)


def openrlhf(row: Row, where: Where) -> Iterator[Trajectory]:
    """A row of OpenRLHF's; a pair is the better answer, with the worse one beside."""
    samples, used = frameworks.split_openrlhf_row(row)
    for sample in samples:
        made = _made(sample, row, used, where)
        if sample.rejected is not None:
            made.kind = "dpo"
            made.rejected = conversation(sample.prompt, sample.rejected, where, kind="dpo", status="finished")
        yield made


_TRL_TENSORS = {"sampling_per_token_logps": "logprobs", "old_per_token_logps": "policy_logprobs"}
_TRL_OWN = {"prompt", "completion", "prompt_ids", "completion_ids", "step", "global_step", "advantage",
            "prompt_mask", "completion_mask", "tool_mask", "images", *_TRL_TENSORS}  # fmt: skip


def trl(row: Row, where: Where) -> Iterator[Trajectory]:
    """A row of TRL's. It logs the rewards of all functions and not their weighted sum; with weights of 1, as by
    default, that is what is shown."""
    floats = {name: number(value) for name, value in row.items() if type(value) is float and name not in _TRL_OWN}
    named = {name: value for name, value in floats.items() if "reward" in name.lower()}
    counted = named or floats
    notes = []
    if len(counted) > 1:
        notes.append(f"TRL does not log the reward: shown is the sum of {', '.join(counted)}, each with weight 1.")
    given = [value for value in counted.values() if value is not None and value == value]
    sample = Sample(row.get("prompt"), row.get("completion"), batch=frameworks.row_step(row))
    sample.reward = math.fsum(given) if given else math.nan if counted else None
    sample.advantage = number(row.get("advantage"))
    used = {"prompt", "completion", "step", "global_step", "advantage"}
    if row.get("prompt_ids") is not None and row.get("completion_ids") is not None:
        sample.prompt, sample.answer = row["prompt_ids"], row["completion_ids"]
        used |= frameworks.read_trl_ids(row, sample) | {"prompt_ids", "completion_ids"}
    elif sample.prompt is None or sample.answer is None:
        raise WireError(f"got the keys {', '.join(row)}, expected prompt and completion, or their ids")
    made = _made(sample, row, used, where)
    made.declared = tuple(counted)
    made.notes += notes
    yield made


def _made(sample: Sample, row: Row, used: set[str], where: Where) -> Trajectory:
    rest = {name: value for name, value in row.items() if name not in used}
    label = next((rest[name] for name in _LABELS if rest.get(name) is not None), None)
    if label is None and isinstance(rest.get("reward_model"), dict):
        label = rest["reward_model"].get("ground_truth")
    parts = numbers({name: value for name, value in rest.items() if isinstance(value, (int, float))})
    fields: dict[str, Any] = {
        "step": whole(sample.batch),
        "task": sample.task or "",
        "run": -1 if sample.run is None else sample.run,
        "turn": sample.step,
        "reward": sample.reward,
        "parts": parts,
        "metrics": parts,
        "advantage": sample.advantage,
        "status": "finished",
        "label": plain(label),
        "info": {name: plain(value) for name, value in rest.items() if name not in parts},
    }
    if not (frameworks.is_token_ids(sample.prompt) and frameworks.is_token_ids(sample.answer)):
        return conversation(sample.prompt, sample.answer, where, **fields)
    arrays = dict(sample.tensors)
    if sample.advantage is not None:
        arrays.setdefault("advantages", sample.advantage)
    for name, theirs in (("prompt_text", "prompt"), ("response_text", "completion")):
        fields[name] = row[theirs] if isinstance(row.get(theirs), str) else None
    made = from_ids(
        [*sample.prompt, *sample.answer],
        len(sample.prompt),
        where,
        mask=sample.mask,
        arrays=arrays,
        **fields,
    )
    if sample.mask is not None:
        made.kind = "multi_turn"
    return made
