"""LightRFT's `TrajectorySaver`: its file names, JSON keys and return values.

Invariant: saving never stops training: errors are counted, reported as a metric and warned about once. What is saved
of a sample does not depend on whether it came padded, packed, as an item or as a record, nor on the number of
processes. Only `full_sequence` is, as in LightRFT, of the row with its padding. Collective calls are made only when
every process is known to make them, in the same order: a process in which something fails sends the failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.filters import high_entropy_mask
from rollbook.compat.lightrft.batch import BATCH_FIELDS, BATCH_MEDIA, BufferItem, ExperienceBatch, peek_field
from rollbook.compat.lightrft.ragged_batch import SAMPLE_LISTS, RaggedBatch, ragged_from_batch
from rollbook.core.checks import check_bool, check_choice, check_float, check_int
from rollbook.core.errors import explain_missing
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import warn_user
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, check_process_group
from rollbook.core.sampling import Sample
from rollbook.core.vocabulary import Tokenizer
from rollbook.io.trajectories import (
    DEFAULT_PREFIX,
    IMAGES,
    REFLECTIONS,
    SELECTION_METHODS,
    BackgroundWriter,
    Candidate,
    Decoder,
    EncodedImage,
    ImageEncoder,
    RecordSource,
    ResponseStats,
    Trajectory,
    TrajectoryEncoder,
    TrajectoryFiles,
    TrajectorySet,
    TrajectorySource,
    check_prefix,
    count_reflections,
    extract_response,
    image_stem,
    measure_response,
    repeat_score,
    sample_std,
    select,
    to_numpy,
)

Saved: TypeAlias = (
    ExperienceBatch
    | BufferItem
    | Experience
    | Experiences
    | Sequence[ExperienceBatch | BufferItem | Experience | Experiences]
)
"""Batches, items and records that `save_trajectories` accepts."""
_RESPONSE_FIELDS = tuple(name for name, field in BATCH_FIELDS.items() if field.axis == "response")
_VALUE_FIELDS = tuple(name for name in _RESPONSE_FIELDS if name != "action_mask")
_BATCH_NAMES = {field.sources[0]: name for name, field in BATCH_FIELDS.items() if field.sources}
"""Per-token fields by their names in a record."""
_CHECK_ORDER = ("attention_mask", "action_mask", *_VALUE_FIELDS, "action_starts", "info", *SAMPLE_LISTS)
"""Masks first: the others are checked against them."""


def read_sources(experiences: Saved, problems: list[str]) -> Iterator[TrajectorySource]:
    """Read batches, buffer items and records, in any mix.

    Args:
        experiences: The batches, items and records.
        problems: Gets a message for each entry that cannot be read.

    Returns:
        An iterator over the sources of trajectories.

    >>> problems = []
    >>> [len(source.places) for source in read_sources([Experience(tokens=[1, 2, 3])], problems)], problems
    ([1], [])
    """
    if isinstance(experiences, (ExperienceBatch, Experience, Experiences, BufferItem)):
        experiences = [experiences]
    for number, entry in enumerate(experiences or ()):
        try:
            yield _source(number, entry, problems)
        except Exception as error:
            problems.append(f"experiences[{number}]: {error}")


def _source(number: int, entry: Saved | Sample, problems: list[str]) -> TrajectorySource:
    if isinstance(entry, Sample):
        entry = entry.to_experience()
    if isinstance(entry, Experience):
        return RecordSource([(number, 0)], [entry])
    if isinstance(entry, Experiences):
        return RecordSource([(number, i) for i in range(len(entry))], entry.rows())
    if isinstance(entry, (list, tuple)) and all(isinstance(row, Experience) for row in entry):
        return RecordSource([(number, i) for i in range(len(entry))], entry)
    if isinstance(entry, BufferItem):
        return ItemSource(number, entry)
    other: Any = entry
    sequences: Any = getattr(other, "sequences", None)
    if isinstance(sequences, torch.Tensor) and sequences.dim() == 0:
        raise ValueError("sequences: got a 0-dimensional tensor, expected one or two dimensions; left out")
    is_item = isinstance(sequences, torch.Tensor) and sequences.dim() == 1
    if isinstance(entry, ExperienceBatch):
        return BatchSource(
            number, dataclasses.replace(entry, sequences=sequences[None]) if is_item else entry, problems
        )
    if is_item:
        return ItemSource(number, other)
    if isinstance(sequences, (list, torch.Tensor)):
        # A batch of LightRFT itself, or any object with its attributes.
        names = [field.name for field in dataclasses.fields(ExperienceBatch) if field.name != "origin"]
        fields: dict[str, Any] = {name: getattr(other, name, None) for name in names}
        return BatchSource(number, ExperienceBatch(**fields), problems)
    raise ValueError(f"got {type(entry).__name__}, expected an experience, a batch or a buffer item")


class BatchSource(TrajectorySource):
    """The samples of a batch, padded or packed.

    Args:
        experience: Number of the batch among the experiences.
        batch: The batch.
        problems: Gets a message for each field that does not fit.

    >>> batch = ExperienceBatch(torch.tensor([[1, 2, 3]]), torch.tensor([[-0.5]]), *[None] * 6, {})
    >>> BatchSource(0, batch, []).slots(0)
    1
    """

    def __init__(self, experience: int, batch: ExperienceBatch, problems: list[str]) -> None:
        self.batch = batch
        info, self.shared_info = split_info(batch.info, len(batch))
        coerced = coerce_batch(dataclasses.replace(batch, info=info) if self.shared_info else batch)
        self.ragged, self.numbers = coerced.ragged, coerced.numbers
        problems += [f"experiences[{experience}]: {problem}" for problem in coerced.problems]
        super().__init__([(experience, i) for i in range(len(self.ragged))])

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        name = _BATCH_NAMES.get(name, name)
        if name in self.numbers:
            return self.numbers[name][i : i + 1]
        row = self.ragged.row(name, i)
        return None if row is None else to_numpy(row)

    def padded(self, i: int) -> NDArray[np.int64] | None:
        row = self.batch.sequences[i]
        return None if len(row) == self.ragged.tokens[i] else to_numpy(row).astype(np.int64)

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        readers: dict[str, Callable[[], NDArray[Any]]] = {}
        for name, column in self.ragged.columns.items():
            per_token = isinstance(column, torch.Tensor) and column.dim() == 1
            if name.startswith("extras.") and per_token and i not in self.ragged.origin.absent.get(name, ()):
                readers[name.removeprefix("extras.")] = partial(self._read_column, i, name)
        return readers

    def _read_column(self, i: int, name: str) -> NDArray[Any]:
        row = self.ragged.row(name, i)
        return np.empty(0) if row is None else to_numpy(row)

    def info(self, i: int) -> Mapping[Any, Any] | None:
        info = None if self.ragged.info is None else self.ragged.infos[0][i]
        return join_info(self.batch.info or {}, info or {}, self.shared_info) if self.shared_info else info

    def entry(self, i: int, name: str) -> Any:
        return self.ragged.value(name, i)

    def slots(self, i: int) -> int:
        return int(self.ragged.responses[i])


class ItemSource(TrajectorySource):
    """One buffer item, also LightRFT's, with padding or without.

    Args:
        experience: Number of the item among the experiences.
        item: The item.

    Raises:
        ValueError: If the item has no tokens, or more response slots than tokens.

    >>> ItemSource(0, BufferItem(torch.tensor([1, 2, 3]), torch.tensor([-0.5]), *[None] * 6, {})).slots(0)
    1
    """

    def __init__(self, experience: int, item: BufferItem) -> None:
        super().__init__([(experience, 0)])
        self.item = item
        tokens = self.get("sequences")
        if tokens is None:
            raise ValueError("sequences: got None, expected token ids")
        width = len(tokens)
        widths = {name: len(row) for name in _RESPONSE_FIELDS if (row := self._row(name)) is not None}
        slots = widths.get("action_mask", max(widths.values(), default=0))
        if slots > width:
            raise ValueError(f"got {slots} response slots, expected at most its {width} tokens")
        mask = self._row("attention_mask")
        attended = np.arange(width) if mask is None or len(mask) != width else np.flatnonzero(mask)
        first, last = (int(attended[0]), int(attended[-1]) + 1) if len(attended) else (width, width)
        begin = max(self.get("action_start") or 0, first - (width - slots))
        self.widths: dict[str, int] = {"sequence": width, "response": slots}
        self.spans: dict[str, tuple[int, int]] = {
            "sequence": (first, last),
            "response": (begin, max(min(slots, last - (width - slots)), begin)),
        }

    def get(self, name: str) -> Any:
        """Return a field without changing the item: an item caches what is read as an attribute."""
        if isinstance(self.item, BufferItem):
            return peek_field(self.item.__dict__, name)
        return getattr(self.item, name, None)

    def _row(self, name: str) -> NDArray[Any] | None:
        row = self.get(name)
        return None if row is None else to_numpy(torch.as_tensor(row)).reshape(-1)

    def read(self, i: int, name: str) -> NDArray[Any] | None:
        name = _BATCH_NAMES.get(name, name)
        row, axis = self._row(name), BATCH_FIELDS[name].axis
        if row is None or len(row) != self.widths[axis]:
            return row  # of another length: not cut
        start, stop = self.spans[axis]
        return row[start:stop]

    def extras(self, i: int) -> dict[str, Callable[[], NDArray[Any]]]:
        start, stop = self.spans["response"]
        return {
            name: partial(to_numpy, tensor[start:stop])
            for name, tensor in (self.get("extras") or {}).items()
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 1
        }

    def padded(self, i: int) -> NDArray[np.int64] | None:
        row, (start, stop) = self._row("sequences"), self.spans["sequence"]
        return None if row is None or stop - start == len(row) else row.astype(np.int64)

    def info(self, i: int) -> Mapping[Any, Any] | None:
        info: Mapping[Any, Any] | None = self.get("info")
        return info if info is None else unwrap_info(info)

    def entry(self, i: int, name: str) -> Any:
        return self.get(name)

    def slots(self, i: int) -> int:
        start, stop = self.spans["response"]
        return stop - start


# --- batches with fields that do not fit ----------------------------------------------------------------------------


@dataclasses.dataclass
class CoercedBatch:
    """The readable part of a batch."""

    ragged: RaggedBatch
    numbers: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    """[B] Per-token fields that came as one number per sample."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """Fields that do not fit, with the reason."""


def coerce_batch(batch: ExperienceBatch) -> CoercedBatch:
    """Read the fields of a batch that fit together.

    Args:
        batch: The batch.

    Returns:
        The readable part, and messages for the rest.

    Raises:
        ValueError: If the tokens cannot be read.

    >>> tokens, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 2, dtype=torch.bool)
    >>> coerced = coerce_batch(ExperienceBatch(tokens, torch.zeros(2, 2), None, torch.zeros(2, 3), None, torch.ones(2),
    ...                                        None, mask, None))
    >>> coerced.numbers["advantages"].tolist(), coerced.problems, coerced.ragged.row("action_log_probs", 1).tolist()
    ([1.0, 1.0], ['values: got 3 columns, expected 2, as action_log_probs has'], [0.0, 0.0])
    """
    # Pixels are not saved, so they need not be split by sample.
    without: dict[str, Any] = dict.fromkeys((*BATCH_MEDIA, "media"))
    batch = dataclasses.replace(batch, **without)
    try:
        return CoercedBatch(ragged_from_batch(batch))
    except ValueError:
        return _coerce_fields(batch)


def _coerce_fields(batch: ExperienceBatch) -> CoercedBatch:
    """Add fields one by one, masks first, if each fits those before it."""
    without: dict[str, Any] = dict.fromkeys((*_CHECK_ORDER, "extras"))
    accepted = dataclasses.replace(batch, **without)
    coerced = CoercedBatch(ragged_from_batch(accepted))
    width = _response_width(batch)
    entries = [(name, name, getattr(batch, name)) for name in _CHECK_ORDER]
    extras = batch.extras if isinstance(batch.extras, dict) else {}
    for field, name, content in [*entries, *(("extras", name, content) for name, content in extras.items())]:
        if content is None:
            continue
        if field in _VALUE_FIELDS and (numbers := _one_per_sample(content, len(batch), width)) is not None:
            coerced.numbers[name] = numbers
            continue
        try:
            content = _coerce_layout(name, content, accepted, coerced.ragged)
            change: dict[str, Any] = {field: content if field == name else {**(accepted.extras or {}), name: content}}
            trial = dataclasses.replace(accepted, **change)
            coerced.ragged = ragged_from_batch(trial)
        except Exception as error:  # a user's object may raise anything
            coerced.problems.append(str(error))
        else:
            accepted = trial
    return coerced


def _response_width(batch: ExperienceBatch) -> int | None:
    """Return A of a padded batch: that of the mask, or of most fields."""
    widths: Counter[int] = Counter()
    for name in ("action_mask", *_VALUE_FIELDS):
        tensor = getattr(batch, name)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and len(batch) == 1:
            tensor = tensor[None]
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and len(tensor) == len(batch):
            widths[tensor.shape[1]] += 1
            if name == "action_mask":
                break
    return widths.most_common(1)[0][0] if widths else None


def _one_per_sample(content: Any, count: int, width: int | None) -> NDArray[Any] | None:
    """Return [B] one number per sample, if that is what `content` has."""
    if not isinstance(content, torch.Tensor) or tuple(content.shape) == (count, width):
        return None
    if content.dim() == 0:
        return np.repeat(to_numpy(content)[None], count)
    return to_numpy(content).reshape(-1) if tuple(content.shape) in ((count,), (count, 1)) else None


def _coerce_layout(name: str, content: Any, accepted: ExperienceBatch, ragged: RaggedBatch) -> Any:
    """Convert a field to the layout of a batch, if it has another unambiguous one."""
    count = len(accepted)
    if name in SAMPLE_LISTS:
        if isinstance(content, torch.Tensor) and content.dim():
            return list(content)
        return [content] if name == "raw_images" and count == 1 and not isinstance(content, (list, tuple)) else content
    if not isinstance(content, torch.Tensor) or name not in BATCH_FIELDS:
        return content
    if accepted.layout == "packed" and content.dim() == 2 and len(content) == count and name in _RESPONSE_FIELDS:
        return [row[len(row) - int(length) :] for row, length in zip(content, ragged.responses, strict=True)]
    if content.dim() == 1 and count == 1 and accepted.layout == "padded":
        return content[None]
    mask = accepted.action_mask
    if name == "action_entropy" and content.dim() == 1 and isinstance(mask, torch.Tensor):
        sampled = mask.to(content.device) != 0
        if int(sampled.sum()) == len(content):  # those of the sampled tokens, concatenated
            zeros = torch.zeros(sampled.shape, dtype=content.dtype, device=content.device)
            return zeros.masked_scatter(sampled, content)
    return content


# --- info -----------------------------------------------------------------------------------------------------------


def split_info(info: Mapping[Any, Any] | None, count: int) -> tuple[Any, dict[Any, Any]]:
    """Split an `info` into the entries per sample and those of the whole batch: tensors and arrays of another length.

    >>> split_info({"reward": torch.ones(2), "bins": np.arange(3), "parts": {"a": torch.ones(1)}}, 2)
    ({'reward': tensor([1., 1.]), 'parts': {}}, {'bins': array([0, 1, 2]), 'parts': {'a': tensor([1.])}})
    """
    if not isinstance(info, dict):
        return info, {}
    per_sample: dict[Any, Any] = {}
    shared: dict[Any, Any] = {}
    for name, content in info.items():
        if isinstance(content, dict):
            per_sample[name], shared_content = split_info(content, count)
            if shared_content:
                shared[name] = shared_content
        elif isinstance(content, (torch.Tensor, np.ndarray)) and content.ndim and len(content) != count:
            shared[name] = content
        else:
            per_sample[name] = content
    return (per_sample, shared) if shared else (info, {})


def join_info(info: Mapping[Any, Any], sample: Mapping[Any, Any], shared: Mapping[Any, Any]) -> dict[Any, Any]:
    """Join the `info` of a sample and that of the whole batch, in the order of the batch's `info`."""
    join_media: dict[Any, Any] = {}
    for name, content in info.items():
        if isinstance(content, dict) and name in sample and name in shared:
            join_media[name] = join_info(content, sample[name], shared[name])
        elif name in sample or name in shared:
            join_media[name] = sample[name] if name in sample else shared[name]
    return join_media


def unwrap_info(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace tensors of one entry in the `info` of one sample by numbers.

    >>> unwrap_info({"reward": torch.tensor([0.5]), "parts": {"a": torch.tensor([1])}, "bins": [1]})
    {'reward': 0.5, 'parts': {'a': 1}, 'bins': [1]}
    """
    return {
        name: unwrap_info(content)
        if isinstance(content, dict)
        else content.item()
        if isinstance(content, torch.Tensor) and content.shape == (1,)
        else content
        for name, content in info.items()
    }


try:
    import torch
except ModuleNotFoundError as error:
    raise explain_missing(__name__, error) from None


T = TypeVar("T")
P = ParamSpec("P")
Stats = dict[str, float]
_Plan = dict[int, tuple[list[tuple[int, str, float | None]], list[int]]]
"""By rank: the samples to save, with reason and weight; and those to count in statistics."""
_MAX_WAITING = 2
"""With `background=True`, saves that may wait for the one being written."""
_MAX_ERRORS = 100
"""Errors whose message is remembered."""


class TrajectorySaver:
    """Writer of samples of a rollout as JSON, with their texts, numbers and images.

    Args:
        save_dir: The folder, created if missing.
        tokenizer: Any object with `decode(ids)`.
        save_images_separately: Write PNG files to `save_dir/images`, each content once; else base64 in the JSON.
        max_image_size: Larger images are saved smaller.
        mark_high_entropy_tokens: State for each token of `generated_tokens` and `pure_generated_tokens` whether it is
            among the `high_entropy_token_ratio` of its sample with the highest entropy (see `high_entropy_mask`).
        high_entropy_token_ratio: The share of tokens that are marked.
        keep: How to select samples if there are more than `num_samples`: `"groups"`, `"first"`, `"random"`, a
            function, or `"auto"`: groups if samples have ids, else the first (see `rollbook.io.trajectories.select`).
        background: Write in a thread. A save that finds two others waiting is dropped and counted.
        process_group: The processes that call together: by default those of `torch.distributed`, once initialized;
            `rollbook.core.process_group.SINGLE_PROCESS` for a saver that only this process calls.
        wait_seconds: How long a save waits for all of them. After that, the first process saves its own samples, and
            the next save of that prefix does not wait: code that calls the saver on rank 0 only works.

    Attributes:
        errors: The last error messages.
        error_count: The number of errors.
        dropped: The number of saves that found no room.

    Raises:
        ValueError: If an argument is invalid.

    >>> import tempfile
    >>> from rollbook import EID, Experience
    >>> class Letters:
    ...     eos_token_id = 0
    ...     def decode(self, ids, skip_special_tokens=False):
    ...         return "".join("." if i == 0 else chr(96 + i) for i in ids)
    >>> record = Experience(
    ...     tokens=[1, 2, 3, 4, 0], prompt_length=2, reward=1.0, entropy=[0.5, 0.25, 0.0], eid=EID(7, "a", suffix="s")
    ... )
    >>> folder = tempfile.TemporaryDirectory()
    >>> saver = TrajectorySaver(folder.name, Letters(), mark_high_entropy_tokens=True)
    >>> path, stats = saver.save_trajectories([record], step=7, compute_stats=True)
    >>> os.path.basename(path), stats["trajectory/policy_entropy_mean"]
    ('trajectories_step_7.json', 0.25)
    >>> import json
    >>> saved, = json.load(open(path))
    >>> saved["full_sequence"], saved["generated_text"], saved["uid"], saved["kept"]
    ('abcd.', 'cd', '7/a/0/0/s', 'all')
    >>> saved["generated_tokens"][0]
    {'text': 'c', 'high_entropy': True, 'entropy_score': 0.5}
    >>> folder.cleanup()
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        tokenizer: Tokenizer,
        save_images_separately: bool = True,
        max_image_size: int = 512,
        mark_high_entropy_tokens: bool = False,
        high_entropy_token_ratio: float = 0.2,
        *,
        keep: str | Callable[[list[Candidate], int], Sequence[Any]] = "auto",
        background: bool = False,
        process_group: ProcessGroup | None = None,
        wait_seconds: float = 10.0,
    ) -> None:
        self.save_dir = Path(save_dir)
        self.tokenizer = tokenizer
        self.save_images_separately = check_bool("save_images_separately", save_images_separately)
        self.max_image_size = check_int("max_image_size", max_image_size, 1)
        self.mark_high_entropy_tokens = check_bool("mark_high_entropy_tokens", mark_high_entropy_tokens)
        self.high_entropy_token_ratio = check_float("high_entropy_token_ratio", high_entropy_token_ratio)
        if not callable(keep):
            check_choice("keep", keep, SELECTION_METHODS)
        self.keep = keep
        if not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer: got {type(tokenizer).__name__}, expected an object with decode(ids)")
        self._fixed_process_group = None if process_group is None else check_process_group(process_group)
        self._rendezvous = Rendezvous(str(self.save_dir), check_float("wait_seconds", wait_seconds, 0))
        self._worker = BackgroundWriter(_MAX_WAITING) if check_bool("background", background) else None
        self._image_encoder = ImageEncoder(self.max_image_size)
        self._lock = threading.Lock()
        self.errors: deque[str] = deque(maxlen=_MAX_ERRORS)
        self.error_count = 0
        self.dropped = 0
        self._unreported = 0
        self._last_stats: Stats | None = None
        self._advised = False
        if self._process_group.rank == 0:
            _ = self._files  # created now: a folder that cannot be created is an error of the constructor

    @property
    def _process_group(self) -> ProcessGroup:
        return current_process_group() if self._fixed_process_group is None else self._fixed_process_group

    @cached_property
    def _files(self) -> TrajectoryFiles:
        return TrajectoryFiles(self.save_dir, self.save_images_separately)

    @cached_property
    def _encoder(self) -> TrajectoryEncoder:
        mark = self._high_entropy_tokens if self.mark_high_entropy_tokens else None
        return TrajectoryEncoder(Decoder(self.tokenizer), mark, self.save_images_separately)

    def _high_entropy_tokens(self, entropy: NDArray[Any]) -> NDArray[Any]:
        rows = torch.from_numpy(np.ascontiguousarray(entropy))[None]
        return np.flatnonzero(high_entropy_mask(rows, None, self.high_entropy_token_ratio)[0].numpy())

    def save_trajectories(
        self,
        experiences: Saved,
        step: int,
        num_samples: int = 10,
        prefix: str = DEFAULT_PREFIX,
        compute_stats: bool | Literal["all"] = False,
    ) -> tuple[str | None, Stats | None]:
        """Save `num_samples` samples, or all if there are fewer, as `save_dir/{prefix}_step_{step}.json`.

        With several processes, each calls it with its samples, and the first writes the union. If some do not call it
        within `wait_seconds`, the first writes its own samples.

        Args:
            experiences: Batches, buffer items and records, in any mix; text and vision.
            step: The training step.
            num_samples: How many samples to save.
            prefix: The beginning of the file name.
            compute_stats: Compute means over the saved samples, or with `"all"` over every sample of every process.

        Returns:
            The path of the file and the statistics; each `None` if there is none: nothing to save, or not the first
            process. After an error the statistics have `trajectory/save_errors`. With `background=True` the file
            appears later, and the statistics are those of the last finished save.
        """
        try:
            return self._save(
                experiences,
                check_int("step", step, -(1 << 62)),
                check_int("num_samples", num_samples),
                check_prefix(prefix),
                compute_stats if compute_stats == "all" else check_bool("compute_stats", compute_stats),
            )
        except Exception as error:  # training goes on
            return None, self._report(None, [f"{type(error).__name__}: {error}"])

    def flush(self) -> None:
        """Wait until everything is written (with `background=True`)."""
        if self._worker is not None:
            self._worker.flush()

    # --- one save, in every process ---------------------------------------------------------------------------

    def _save(
        self, experiences: Saved, step: int, count: int, prefix: str, compute_stats: bool | Literal["all"]
    ) -> tuple[str | None, Stats | None]:
        """Gather a few numbers of every sample in the first process, which selects; then the selected samples."""
        process_group = self._process_group
        problems: list[str] = []
        if process_group is not SINGLE_PROCESS and not self._meet(process_group, prefix, step, problems):
            if process_group.rank:
                return None, None
            process_group = SINGLE_PROCESS
        samples = attempt(problems, _read_samples, experiences, step, process_group.rank)
        if samples is not None:
            problems += samples.problems
        gathered = gather_to_first(process_group, None if samples is None else samples.candidates, problems)
        plan: _Plan | None = None
        if gathered is not None:
            problems = [problem for _, faults in gathered for problem in faults]
            plan = attempt(problems, self._plan, gathered, count, f"{prefix} {step}")
        plan = broadcast_from_first(process_group, plan)
        if plan is None:  # in every process: nothing to save, or the selection failed
            return (None, None) if gathered is None else (None, self._report(None, problems))
        faults: list[str] = []
        selected, counted = plan.get(process_group.rank, ([], []))
        trajectories = [] if samples is None else self._take(samples, selected, faults)
        measured = self._measure(samples, counted, faults) if samples is not None and compute_stats == "all" else []
        results = gather_to_first(process_group, (trajectories, measured), faults)
        if results is None:
            return None, None
        problems += [problem for _, faults in results for problem in faults]
        parts = [rank_results for rank_results, _ in results if rank_results is not None]
        all_trajectories = [trajectory for rank_results, _ in parts for trajectory in rank_results]
        all_measured = (
            [stats for _, rank_results in parts for stats in rank_results] if compute_stats == "all" else None
        )

        def write() -> tuple[bool, Stats | None]:
            written = attempt(problems, self._write, all_trajectories, step, prefix, problems)
            measured = all_measured if all_measured is not None else written or []
            return written is not None, mean_stats(measured) if compute_stats else None

        if self._worker is not None:
            return self._write_in_background(self._worker, write, problems, prefix, step, bool(compute_stats))
        done, stats = write()
        return str(self._files.path(prefix, step)) if done else None, self._report(stats, problems)

    def _meet(self, process_group: ProcessGroup, prefix: str, step: int, problems: list[str]) -> bool:
        """Whether every process takes part. If only some others do, their samples are missing: a problem."""
        together, present = self._rendezvous.meet(process_group, prefix, step)
        if not together and len(present) > 1:
            problems.append(
                f"ranks {present} called save_trajectories within {self._rendezvous.seconds:g} s, and others did not: "
                "only rank 0's samples are saved"
            )
        return together

    def _plan(self, gathered: list[tuple[Any, list[str]]], count: int, seed: str) -> _Plan | None:
        """Plan what each process sends; `None` if there is nothing."""
        unique: dict[str, Candidate] = {}
        for candidates, _ in gathered:
            for candidate in candidates or ():
                unique.setdefault(candidate.uid, candidate)  # several processes may have the same sample
        if not unique:
            return None
        plan: _Plan = {}
        for candidate in unique.values():
            plan.setdefault(candidate.rank, ([], []))[1].append(candidate.index)
        for selection in select(list(unique.values()), count, self.keep, seed):
            candidate = selection.candidate
            plan[candidate.rank][0].append((candidate.index, selection.reason, selection.weight))
        return plan

    def _take(
        self, samples: TrajectorySet, selected: list[tuple[int, str, float | None]], faults: list[str]
    ) -> list[Trajectory]:
        """Return the selected samples of this process."""
        trajectories: list[Trajectory] = []
        for index, reason, weight in selected:
            trajectory = attempt(faults, samples.trajectory, index, self._image_encoder)
            if trajectory is not None:
                trajectory.reason, trajectory.weight = reason, weight
                faults += [f"{trajectory.eid.uid}: {note}" for note in trajectory.notes]
                trajectories.append(trajectory)
        return trajectories

    def _measure(self, samples: TrajectorySet, counted: list[int], faults: list[str]) -> list[ResponseStats]:
        """Measure the samples that are counted in this process."""

        def measure(index: int) -> ResponseStats:
            trajectory = samples.trajectory(index, None)
            return measure_response(trajectory, extract_response(trajectory, self._encoder.decoder))

        attempts = (attempt(faults, measure, index) for index in counted)
        return [stats for stats in attempts if stats is not None]

    # --- in the first process ---------------------------------------------------------------------------------

    def _write(
        self, trajectories: list[Trajectory], step: int, prefix: str, problems: list[str]
    ) -> list[ResponseStats]:
        """Write the samples and return their statistics."""
        without_entropy = not any("action_entropy" in trajectory.arrays for trajectory in trajectories)
        if self.mark_high_entropy_tokens and trajectories and without_entropy:
            if not self._advised:
                _warn(
                    "mark_high_entropy_tokens: no sample has entropies, and none is marked; a maker records them with "
                    "MakerConfig(entropy=True)"
                )
            self._advised = True
        records: list[bytes] = []
        written: list[ResponseStats] = []
        files: dict[str, EncodedImage] = {}
        names: dict[str, str] = {}
        for trajectory in trajectories:
            owner = f"_rank{trajectory.rank}" if trajectory.rank else ""
            stem = f"{image_stem(prefix, step)}{owner}_exp{trajectory.experience}_sample{trajectory.row}_img"
            new_names = dict(names)  # an image of an earlier record keeps that record's file
            for k, image in enumerate(trajectory.images):
                if image is not None:
                    new_names.setdefault(image.sha256, f"{stem}{k}.png")
            paths = [None if image is None else f"{IMAGES}/{new_names[image.sha256]}" for image in trajectory.images]
            encoded = attempt(problems, self._encoder.encode, trajectory, step, paths)
            if encoded is not None:
                records.append(encoded[0])
                written.append(encoded[1])
                names = new_names
                files |= {new_names[image.sha256]: image for image in trajectory.images if image is not None}
        self._files.write(prefix, step, records, files if self.save_images_separately else {})
        return written

    def _write_in_background(
        self,
        worker: BackgroundWriter,
        write: Callable[[], tuple[bool, Stats | None]],
        problems: list[str],
        prefix: str,
        step: int,
        compute_stats: bool,
    ) -> tuple[str | None, Stats | None]:
        """Leave the writing to the thread, if it has room."""

        def job() -> None:
            _, stats = write()
            with self._lock:
                self._last_stats = stats
            self._record(problems)

        accepted = worker.submit(job)
        if not accepted:
            self.dropped += 1
            self._record(problems)
        with self._lock:
            stats = self._last_stats if compute_stats else None
        if self.dropped:
            stats = {**(stats or {}), "trajectory/dropped": float(self.dropped)}
        return str(self._files.path(prefix, step)) if accepted else None, self._report(stats, [])

    # --- errors -----------------------------------------------------------------------------------------------

    def _record(self, problems: list[str]) -> None:
        """Remember errors, and warn about the first."""
        with self._lock:
            first = problems and not self.error_count
            self.errors.extend(problems)
            self.error_count += len(problems)
            self._unreported += len(problems)
        if first:
            _warn(f"saving trajectories: {problems[0]} (further errors are counted)")

    def _report(self, stats: Stats | None, problems: list[str]) -> Stats | None:
        """Return the statistics with the number of errors since the last report, if there were any."""
        self._record(problems)
        with self._lock:
            count, self._unreported = self._unreported, 0
        return {**(stats or {}), "trajectory/save_errors": float(count)} if count else stats


def _read_samples(experiences: Saved, step: int, rank: int) -> TrajectorySet:
    problems: list[str] = []
    return TrajectorySet(read_sources(experiences, problems), step, rank, problems)


def _warn(message: str) -> None:
    with contextlib.suppress(Warning):  # also if warnings are errors, training goes on
        warn_user(message)


def mean_stats(measured: Sequence[ResponseStats]) -> Stats:
    """Average statistics, by LightRFT's names; empty for no samples.

    >>> mean_stats([ResponseStats(0.5, {"wait": 1}, None, 3), ResponseStats(0.25, {}, 0.5, 4)])
    {'trajectory/repeat_score_mean': 0.375, 'trajectory/reflection_pattern_score_mean': 0.5,
     'trajectory/policy_entropy_mean': 0.5, 'trajectory/response_token_count_mean': 3.5}
    """
    columns: dict[str, list[float]] = {
        "repeat_score": [stats.repeat_score for stats in measured],
        "reflection_pattern_score": [stats.reflection_score for stats in measured],
        "policy_entropy": [stats.policy_entropy for stats in measured if stats.policy_entropy is not None],
        "response_token_count": [stats.tokens for stats in measured],
    }
    return {f"trajectory/{name}_mean": sum(column) / len(column) for name, column in columns.items() if column}


class SaverArgs(Protocol):
    """LightRFT's training arguments, as far as `create_trajectory_saver` reads them."""

    save_trajectories: bool
    save_path: str


def create_trajectory_saver(args: SaverArgs, tokenizer: Tokenizer) -> TrajectorySaver | None:
    """Create a saver in `{args.save_path}/trajectories`.

    Args:
        args: LightRFT's training arguments. `mark_high_entropy_tokens` (default False) and `high_entropy_token_ratio`
            (default 0.2) are read, too.
        tokenizer: Any object with `decode(ids)`.

    Returns:
        The saver; `None` unless `args.save_trajectories`.

    >>> from types import SimpleNamespace
    >>> create_trajectory_saver(SimpleNamespace(save_trajectories=False), None) is None
    True
    """
    if not getattr(args, "save_trajectories", False):
        return None
    ratio = getattr(args, "high_entropy_token_ratio", None)
    return TrajectorySaver(
        Path(args.save_path) / "trajectories",
        tokenizer,
        mark_high_entropy_tokens=bool(getattr(args, "mark_high_entropy_tokens", False)),
        high_entropy_token_ratio=0.2 if ratio is None else ratio,
    )


# --- processes ------------------------------------------------------------------------------------------------------


def current_process_group() -> ProcessGroup:
    """Return the processes of `torch.distributed` if it is initialized, else `SINGLE_PROCESS`."""
    import torch.distributed as dist

    return ProcessGroup() if dist.is_available() and dist.is_initialized() else SINGLE_PROCESS


class Rendezvous:
    """Agreement before each save on whether every process takes part.

    Each process registers in the store of `torch.distributed`. The first process decides when all have registered or
    `seconds` have passed. If the first does not register, the others close the save themselves, so that no process
    waits forever. After a save without the others, saves of that prefix do not wait, until one of them registers late.
    """

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._calls: dict[tuple[str, int], int] = {}
        self._alone: dict[str, str] = {}
        """By prefix, the key of its last save, if that was without the others."""

    def meet(self, process_group: ProcessGroup, prefix: str, step: int) -> tuple[bool, list[int]]:
        """Return whether all processes save together, and which ones came. The answer is the same in all of them."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC2701, RUF100

        store, group = _get_default_store(), dist.get_process_group_ranks(process_group.group)
        number = self._calls[prefix, step] = self._calls.get((prefix, step), -1) + 1
        identity = repr((self.folder, prefix, step, number, group)).encode()
        key = f"rollbook/save/{hashlib.blake2b(identity, digest_size=16).hexdigest()}"
        places = range(len(group))

        def present(key: str) -> list[int]:
            return [rank for rank in places if rank == process_group.rank or store.check([f"{key}/{rank}"])]

        store.set(f"{key}/{process_group.rank}", "here")
        last = self._alone.get(prefix)
        waits = last is None or len(present(last)) > 1  # another process came after the last save was over
        # The first process may arrive as late as `seconds`, and then waits as long for others.
        limit = (self.seconds if process_group.rank == 0 else 2 * self.seconds) if waits else 0.0
        deadline, pause = time.monotonic() + limit, 0.001
        arrived = present(key) if process_group.rank == 0 else []
        while time.monotonic() < deadline:
            if len(arrived) == len(group) or (process_group.rank and store.check([f"{key}/decision"])):
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            arrived = present(key) if process_group.rank == 0 else []
        decision = "together" if len(arrived) == len(group) else "apart"
        # The first decision in the store counts for all.
        together = store.compare_set(f"{key}/decision", "", decision) == b"together"
        if together:
            self._alone.pop(prefix, None)
        else:
            self._alone[prefix] = key
        return together, present(key)


def attempt(problems: list[str], function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T | None:
    """Call a function; if it raises, add the error to `problems` and return `None`.

    >>> problems = []
    >>> attempt(problems, int, "7"), attempt(problems, int, "x"), problems
    (7, None, ["ValueError: invalid literal for int() with base 10: 'x'"])
    """
    try:
        return function(*arguments, **options)
    except Exception as error:  # the other processes wait for this one
        problems.append(f"{type(error).__name__}: {error}")
        return None


def gather_to_first(
    process_group: ProcessGroup, payload: T, problems: list[str]
) -> list[tuple[T | None, list[str]]] | None:
    """Gather every process's payload and problems in the first process, by rank; `None` elsewhere.

    A payload that cannot be pickled is sent as `None`, with a problem.
    """
    if process_group is SINGLE_PROCESS:
        return [(payload, problems)]
    import torch.distributed as dist

    pickled = attempt(problems, pickle.dumps, payload) or pickle.dumps(None)
    parts: list[Any] | None = [None] * dist.get_world_size(process_group.group) if process_group.rank == 0 else None
    dist.gather_object((pickled, problems), parts, group=process_group.group, group_dst=0)
    return None if parts is None else [(pickle.loads(pickled), faults) for pickled, faults in parts]


def broadcast_from_first(process_group: ProcessGroup, payload: T) -> T:
    """Return the first process's payload in every process."""
    if process_group is SINGLE_PROCESS:
        return payload
    import torch.distributed as dist

    box = [payload]
    dist.broadcast_object_list(box, group=process_group.group, group_src=0)
    return box[0]


# --- LightRFT's helpers -------------------------------------------------------------------------------------------


def create_high_entropy_mask(
    entropy: torch.Tensor, action_mask: torch.Tensor, high_entropy_token_ratio: float
) -> torch.Tensor:
    """Mark the tokens with the highest entropies; see `rollbook.algorithms.filters.high_entropy_mask`.

    Args:
        entropy: [B, A] Entropies.
        action_mask: [B, A] Which tokens count.
        high_entropy_token_ratio: Share of the tokens of each row that are marked.

    Returns:
        [B, A] 0 and 1 in the type of the entropies; for a ratio outside (0, 1), a copy of the mask.

    >>> create_high_entropy_mask(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0, 1, 1]]), 0.5)
    tensor([[0., 0., 1.]])
    """
    if not 0 < high_entropy_token_ratio < 1:
        return action_mask.clone()
    marked: torch.Tensor = high_entropy_mask(entropy, action_mask, high_entropy_token_ratio)
    return marked.view(torch.uint8).to(entropy.dtype)  # twice as fast as from bool


def _calculate_repeatness(s: str) -> float:
    """`repeat_score`."""
    return repeat_score(s)


def _check_reflection_pattern(text: str) -> dict[str, int]:
    """Return the counts of `count_reflections`; for an empty text, 0 for each phrase."""
    return count_reflections(text) or dict.fromkeys(REFLECTIONS, 0)


def _calculate_reflection_pattern_score(text: str) -> int:
    """Count the reflection phrases."""
    return sum(count_reflections(text).values())


def _calculate_entropy_from_log_probs(log_probs: torch.Tensor | None) -> float:
    """Return the mean entropy of distributions [T, V]; of log-probs of sampled tokens [T], their standard deviation,
    which is not an entropy and is saved as `action_log_prob_std`. 0 of one number or none.

    >>> round(_calculate_entropy_from_log_probs(torch.tensor([-0.1, -0.5, -2.0, -0.3])), 4)
    0.8655
    """
    if log_probs is None or log_probs.numel() <= 1:
        return 0.0
    if log_probs.dim() == 2:
        values = log_probs.detach().double()
        return float(torch.special.entr(values.exp()).sum(-1).mean())
    return sample_std(to_numpy(log_probs).reshape(-1))


__all__ = [
    "TrajectorySaver",
    "create_high_entropy_mask",
    "create_trajectory_saver",
]
