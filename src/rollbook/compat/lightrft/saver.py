"""Saving what the model did, for people: LightRFT's `TrajectorySaver`, its file names, JSON keys and return values.

Invariant: saving never stops training: whatever goes wrong is counted, reported as a metric and said once. What is
saved of a sample does not depend on whether it came padded, packed, as an item or as a record, nor on how many
processes there are; `full_sequence` alone, as LightRFT's, is of the row as it was given, with what padding it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollbook.algorithms.masks import high_entropy_mask
from rollbook.compat.lightrft.saver_sources import sources_of
from rollbook.core.checks import check_bool, check_choice, check_float, check_int
from rollbook.core.errors import explain_missing
from rollbook.core.metrics import advise
from rollbook.core.process_group import ALONE, Ranks, check_ranks
from rollbook.io.response_text import REFLECTIONS, Decoder, reflections, repeat_score
from rollbook.io.trajectories import (
    KEEP,
    Candidate,
    Measures,
    Renderer,
    Sample,
    Samples,
    choose,
    host,
    measured,
    response_of,
    spread_of,
)
from rollbook.io.trajectory_files import (
    DEFAULT_PREFIX,
    IMAGES,
    Background,
    Files,
    Picture,
    Pictures,
    check_prefix,
    stem,
)

__all__ = [
    *[
        "TrajectorySaver",
        "create_high_entropy_mask",
        "create_trajectory_saver",
    ]
]

T = TypeVar("T")


def here() -> Ranks:
    """The processes of `torch.distributed` if it is initialised, else this one alone."""
    import torch.distributed as dist

    return Ranks() if dist.is_available() and dist.is_initialized() else ALONE


class Rendezvous:
    """Finds out, before each save, whether every process takes part in it.

    Each process writes its presence into the store of `torch.distributed` and the first decides, by what is there when
    all have come or `seconds` are over. Nobody waits for one that never comes: a process that the first does not come
    to meet closes the save itself. A prefix that was saved without the others is not waited for again, until one of
    them has come late.
    """

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._calls: dict[tuple[str, int], int] = {}
        self._alone: dict[str, str] = {}
        """By prefix, the key of its last save, where that was without the others."""

    def met(self, ranks: Ranks, prefix: str, step: int) -> tuple[bool, list[int]]:
        """Whether all processes save together, and which ones came: the first one's answer, in each of them."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        store, group = _get_default_store(), dist.get_process_group_ranks(ranks.group)
        number = self._calls[prefix, step] = self._calls.get((prefix, step), -1) + 1
        named = repr((self.folder, prefix, step, number, group)).encode()
        key = f"rollbook/save/{hashlib.blake2b(named, digest_size=16).hexdigest()}"
        places = range(len(group))

        def present(of: str) -> list[int]:
            return [rank for rank in places if rank == ranks.rank or store.check([f"{of}/{rank}"])]

        store.set(f"{key}/{ranks.rank}", "here")
        before = self._alone.get(prefix)
        waits = before is None or len(present(before)) > 1  # somebody came after the last save was over
        # The first may come as late as it then waits for others.
        limit = (self.seconds if ranks.rank == 0 else 2 * self.seconds) if waits else 0.0
        deadline, pause = time.monotonic() + limit, 0.001
        arrived = present(key) if ranks.rank == 0 else []
        while time.monotonic() < deadline:
            if len(arrived) == len(group) or (ranks.rank and store.check([f"{key}/decision"])):
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            arrived = present(key) if ranks.rank == 0 else []
        wanted = "together" if len(arrived) == len(group) else "apart"
        # Whoever is first to say so decides for all.
        together = store.compare_set(f"{key}/decision", "", wanted) == b"together"
        if together:
            self._alone.pop(prefix, None)
        else:
            self._alone[prefix] = key
        return together, present(key)


def attempted(problems: list[str], make: Callable[..., T], *given: Any) -> T | None:
    """What `make(*given)` gives; if it raises, nothing, and what went wrong in `problems`.

    >>> said = []
    >>> attempted(said, int, "7"), attempted(said, int, "x"), said
    (7, None, ["ValueError: invalid literal for int() with base 10: 'x'"])
    """
    try:
        return make(*given)
    except Exception as error:  # whatever it is, the other processes wait for this one
        problems.append(f"{type(error).__name__}: {error}")
        return None


def to_first(ranks: Ranks, item: Any, problems: list[str]) -> list[tuple[Any, list[str]]] | None:
    """In the first process, every process's item and problems, by rank; elsewhere `None`. An item that cannot be sent
    is `None`, and one more problem."""
    if ranks is ALONE:
        return [(item, problems)]
    import torch.distributed as dist

    sent = attempted(problems, pickle.dumps, item) or pickle.dumps(None)
    parts: list[Any] | None = [None] * dist.get_world_size(ranks.group) if ranks.rank == 0 else None
    dist.gather_object((sent, problems), parts, group=ranks.group, group_dst=0)
    return None if parts is None else [(pickle.loads(data), said) for data, said in parts]


def from_first(ranks: Ranks, item: Any) -> Any:
    """The first process's item, in every process."""
    if ranks is ALONE:
        return item
    import torch.distributed as dist

    box = [item]
    dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    return box[0]


try:
    import numpy as np
    import torch
    from numpy.typing import NDArray
except ModuleNotFoundError as error:
    raise explain_missing(__name__, error) from None


Stats = dict[str, float]
_WAITING = 2
"""With `background=True`, so many saves may wait for the one that is being written."""
_MAX_ERRORS = 100
"""So many errors are kept in words."""


class TrajectorySaver:
    """Saves samples of a rollout as JSON, with their texts, numbers and images.

    - `save_dir`: the folder, made if it is not there. `tokenizer`: any object with `decode(ids)`.
    - `save_images_separately`: PNG files in `save_dir/images`, each content once; else base64 in the JSON.
      `max_image_size`: larger images are saved smaller (the caller's stay as they are).
    - `mark_high_entropy_tokens`: with entropies, `generated_tokens` and `pure_generated_tokens` say of each token
      whether it is among the `high_entropy_token_ratio` of its sample with the highest (see `high_entropy_mask`).
    - `keep`: which samples, if there are more than asked for: `"groups"`, `"first"`, `"random"`, a function, or
      `"auto"`: groups where samples have ids, else the first (see `rollbook.io.trajectories.choose`).
    - `background`: write in a thread of its own; what finds two saves waiting is dropped and counted.
    - `ranks`: the processes that call together; by default those of `torch.distributed`, once it is initialised, and
      `rollbook.core.process_group.ALONE` for a saver that only this process calls.
    - `wait_seconds`: how long a save waits for all of them to call it. Then the first saves its own samples alone, and
      the next save of that prefix does not wait; code that calls the saver on rank 0 only works.

    `errors`: the last errors, in words; `error_count`: how many there were; `dropped`: saves that found no room.

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
        tokenizer: Any,
        save_images_separately: bool = True,
        max_image_size: int = 512,
        mark_high_entropy_tokens: bool = False,
        high_entropy_token_ratio: float = 0.2,
        *,
        keep: str | Callable[[list[Candidate], int], Sequence[Any]] = "auto",
        background: bool = False,
        ranks: Ranks | None = None,
        wait_seconds: float = 10.0,
    ) -> None:
        self.save_dir = Path(save_dir)
        self.tokenizer = tokenizer
        self.save_images_separately = check_bool("save_images_separately", save_images_separately)
        self.max_image_size = check_int("max_image_size", max_image_size, 1)
        self.mark_high_entropy_tokens = check_bool("mark_high_entropy_tokens", mark_high_entropy_tokens)
        self.high_entropy_token_ratio = check_float("high_entropy_token_ratio", high_entropy_token_ratio)
        if not callable(keep):
            check_choice("keep", keep, KEEP)
        self.keep = keep
        if not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer: got {type(tokenizer).__name__}, expected an object with decode(ids)")
        self._given_ranks = None if ranks is None else check_ranks(ranks)
        self._rendezvous = Rendezvous(str(self.save_dir), check_float("wait_seconds", wait_seconds, 0))
        self._worker = Background(_WAITING) if check_bool("background", background) else None
        self._pictures = Pictures(self.max_image_size)
        self._lock = threading.Lock()
        self.errors: deque[str] = deque(maxlen=_MAX_ERRORS)
        self.error_count = 0
        self.dropped = 0
        self._unreported = 0
        self._last_stats: Stats | None = None
        self._advised = False
        if self._ranks.rank == 0:
            _ = self._files  # made now: a folder that cannot be is the constructor's error

    @property
    def _ranks(self) -> Ranks:
        return here() if self._given_ranks is None else self._given_ranks

    @cached_property
    def _files(self) -> Files:
        return Files(self.save_dir, self.save_images_separately)

    @cached_property
    def _renderer(self) -> Renderer:
        mark = self._high_entropy_tokens if self.mark_high_entropy_tokens else None
        return Renderer(Decoder(self.tokenizer), mark, self.save_images_separately)

    def _high_entropy_tokens(self, entropy: NDArray[Any]) -> NDArray[Any]:
        rows = torch.from_numpy(np.ascontiguousarray(entropy))[None]
        return np.flatnonzero(high_entropy_mask(rows, None, self.high_entropy_token_ratio)[0].numpy())

    def save_trajectories(
        self,
        experiences: Any,
        step: int,
        num_samples: int = 10,
        prefix: str = DEFAULT_PREFIX,
        compute_stats: bool | Literal["all"] = False,
    ) -> tuple[str | None, Stats | None]:
        """Save `num_samples` samples, or all if there are fewer, as `save_dir/{prefix}_step_{step}.json`.

        - `experiences`: batches, buffer items and records, in any mix; text and vision.
        - `compute_stats`: means over the samples saved; with `"all"`, over every sample of every process.

        Where there are several processes each calls it, with what samples it has, and the first writes them all, one
        that several have once. If some do not call it within `wait_seconds`, the first writes its own. Gives the file's
        path and the statistics, each `None` where there is none: nothing to save, or not the first process. If anything
        went wrong, the statistics have `trajectory/save_errors`, asked for or not. With `background=True` the file
        comes a little later, and the statistics are those of the last save that is done.
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
            return None, self._reported(None, [f"{type(error).__name__}: {error}"])

    def flush(self) -> None:
        """Wait until everything is written; what `background=True` left to do."""
        if self._worker is not None:
            self._worker.flush()

    # --- one save, in every process ---------------------------------------------------------------------------

    def _save(
        self, experiences: Any, step: int, count: int, prefix: str, compute_stats: bool | Literal["all"]
    ) -> tuple[str | None, Stats | None]:
        """Two rounds: a few numbers of every sample go to the first process, which chooses; then the chosen samples."""
        ranks = self._ranks
        problems: list[str] = []
        if ranks is not ALONE and not self._met(ranks, prefix, step, problems):
            if ranks.rank:
                return None, None
            ranks = ALONE
        mine = attempted(problems, _collect, experiences, step, ranks.rank)
        if mine is not None:
            problems += mine.problems
        told = to_first(ranks, None if mine is None else mine.candidates, problems)
        plan: _Plan | None = None
        if told is not None:
            problems = [problem for _, said in told for problem in said]
            plan = attempted(problems, self._plan, told, count, f"{prefix} {step}")
        plan = from_first(ranks, plan)
        if plan is None:  # nothing to save, or no choice could be made: every process knows
            return (None, None) if told is None else (None, self._reported(None, problems))
        faults: list[str] = []
        chosen, counted = plan.get(ranks.rank, ([], []))
        samples = [] if mine is None else self._taken(mine, chosen, faults)
        measures = self._measured(mine, counted, faults) if mine is not None and compute_stats == "all" else []
        told = to_first(ranks, (samples, measures), faults)
        if told is None:
            return None, None
        problems += [problem for _, said in told for problem in said]
        parts = [part for part, _ in told if part is not None]
        kept = [one for some, _ in parts for one in some]
        every = [one for _, some in parts for one in some] if compute_stats == "all" else None

        def write() -> tuple[bool, Stats | None]:
            saved = attempted(problems, self._written, kept, step, prefix, problems)
            found = every if every is not None else saved or []
            return saved is not None, means(found) if compute_stats else None

        if self._worker is not None:
            return self._left_to(self._worker, write, problems, prefix, step, bool(compute_stats))
        done, stats = write()
        return str(self._files.path(prefix, step)) if done else None, self._reported(stats, problems)

    def _met(self, ranks: Ranks, prefix: str, step: int, problems: list[str]) -> bool:
        """Whether every process takes part; what is missing in the file, if only some others do, is a problem."""
        together, present = self._rendezvous.met(ranks, prefix, step)
        if not together and len(present) > 1:
            problems.append(
                f"ranks {present} called save_trajectories within {self._rendezvous.seconds:g} s, and others did not: "
                "only rank 0's samples are saved"
            )
        return together

    def _plan(self, told: list[tuple[Any, list[str]]], count: int, seed: str) -> _Plan | None:
        """What each process is to send; `None` if there is nothing."""
        unique: dict[str, Candidate] = {}
        for candidates, _ in told:
            for one in candidates or ():
                unique.setdefault(one.uid, one)  # samples that several processes hold are one
        if not unique:
            return None
        plan: _Plan = {}
        for one in unique.values():
            plan.setdefault(one.rank, ([], []))[1].append(one.index)
        for kept in choose(list(unique.values()), count, self.keep, seed):
            plan[kept.candidate.rank][0].append((kept.candidate.index, kept.reason, kept.weight))
        return plan

    def _taken(self, mine: Samples, chosen: list[tuple[int, str, float | None]], faults: list[str]) -> list[Sample]:
        """The chosen samples of this process."""
        found: list[Sample] = []
        for index, why, weight in chosen:
            sample = attempted(faults, mine.sample, index, self._pictures)
            if sample is not None:
                sample.why, sample.weight = why, weight
                faults += [f"{sample.eid.uid}: {note}" for note in sample.notes]
                found.append(sample)
        return found

    def _measured(self, mine: Samples, counted: list[int], faults: list[str]) -> list[Measures]:
        """The measures of this process's samples that are not another's too."""

        def one(index: int) -> Measures:
            sample = mine.sample(index, None)
            return measured(sample, response_of(sample, self._renderer.decoder))

        found = (attempted(faults, one, index) for index in counted)
        return [measures for measures in found if measures is not None]

    # --- in the first process ---------------------------------------------------------------------------------

    def _written(self, kept: list[Sample], step: int, prefix: str, problems: list[str]) -> list[Measures]:
        """Write the samples, and give their measures."""
        if self.mark_high_entropy_tokens and kept and not any("action_entropy" in one.arrays for one in kept):
            if not self._advised:
                _say("mark_high_entropy_tokens: no sample has entropies, and none is marked; a maker records them with "
                     "MakerConfig(entropy=True)")  # fmt: skip
            self._advised = True
        records: list[bytes] = []
        found: list[Measures] = []
        images: dict[str, Picture] = {}
        names: dict[str, str] = {}
        for sample in kept:
            owner = f"_rank{sample.rank}" if sample.rank else ""
            name = f"{stem(prefix, step)}{owner}_exp{sample.experience}_sample{sample.row}_img"
            shown = dict(names)  # of an image that an earlier record shows, that one's file
            for k, picture in enumerate(sample.images):
                if picture is not None:
                    shown.setdefault(picture.sha256, f"{name}{k}.png")
            paths = [None if one is None else f"{IMAGES}/{shown[one.sha256]}" for one in sample.images]
            made = attempted(problems, self._renderer.record, sample, step, paths)
            if made is not None:
                records.append(made[0])
                found.append(made[1])
                names = shown
                images |= {shown[one.sha256]: one for one in sample.images if one is not None}
        self._files.write(prefix, step, records, images if self.save_images_separately else {})
        return found

    def _left_to(
        self,
        worker: Background,
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
            self._failed(problems)

        taken = worker.submit(job)
        if not taken:
            self.dropped += 1
            self._failed(problems)
        with self._lock:
            stats = self._last_stats if compute_stats else None
        if self.dropped:
            stats = {**(stats or {}), "trajectory/dropped": float(self.dropped)}
        return str(self._files.path(prefix, step)) if taken else None, self._reported(stats, [])

    # --- errors -----------------------------------------------------------------------------------------------

    def _failed(self, problems: list[str]) -> None:
        """Remember errors, and say the first."""
        with self._lock:
            first = problems and not self.error_count
            self.errors.extend(problems)
            self.error_count += len(problems)
            self._unreported += len(problems)
        if first:
            _say(f"saving trajectories: {problems[0]} (further errors are counted)")

    def _reported(self, stats: Stats | None, problems: list[str]) -> Stats | None:
        """The statistics, and the errors since the last ones, if there were any."""
        self._failed(problems)
        with self._lock:
            count, self._unreported = self._unreported, 0
        return {**(stats or {}), "trajectory/save_errors": float(count)} if count else stats


def _collect(experiences: Any, step: int, rank: int) -> Samples:
    problems: list[str] = []
    return Samples(sources_of(experiences, problems), step, rank, problems)


_Plan = dict[int, tuple[list[tuple[int, str, float | None]], list[int]]]
"""By rank: the samples to save, with why and their weight; and those that count for statistics."""


def _say(message: str) -> None:
    with contextlib.suppress(Warning):  # a warning that is made an error must not stop training either
        advise(message)


def means(measures: Sequence[Measures]) -> Stats:
    """The statistics of a save, by LightRFT's names; none of nothing.

    >>> means([Measures(0.5, {"wait": 1}, None, 3), Measures(0.25, {}, 0.5, 4)])
    {'trajectory/repeat_score_mean': 0.375, 'trajectory/reflection_pattern_score_mean': 0.5,
     'trajectory/policy_entropy_mean': 0.5, 'trajectory/response_token_count_mean': 3.5}
    """
    columns: dict[str, list[float]] = {
        "repeat_score": [one.repeat_score for one in measures],
        "reflection_pattern_score": [one.reflection_score for one in measures],
        "policy_entropy": [one.policy_entropy for one in measures if one.policy_entropy is not None],
        "response_token_count": [one.tokens for one in measures],
    }
    return {f"trajectory/{name}_mean": sum(some) / len(some) for name, some in columns.items() if some}


def create_trajectory_saver(args: Any, tokenizer: Any) -> TrajectorySaver | None:
    """A saver as training arguments ask for it, in `{args.save_path}/trajectories`; `None` unless
    `args.save_trajectories`.

    Reads `mark_high_entropy_tokens` (False) and `high_entropy_token_ratio` (0.2) too, where there are any.

    >>> from types import SimpleNamespace
    >>> create_trajectory_saver(SimpleNamespace(save_trajectories=False), None) is None
    True
    """
    if not getattr(args, "save_trajectories", False):
        return None
    return TrajectorySaver(
        Path(args.save_path) / "trajectories",
        tokenizer,
        mark_high_entropy_tokens=bool(getattr(args, "mark_high_entropy_tokens", False)),
        high_entropy_token_ratio=getattr(args, "high_entropy_token_ratio", 0.2),
    )


# --- LightRFT's helpers -------------------------------------------------------------------------------------------


def create_high_entropy_mask(
    entropy: torch.Tensor, action_mask: torch.Tensor, high_entropy_token_ratio: float
) -> torch.Tensor:
    """(B, A) `high_entropy_mask` in the entropies' type; with a ratio that marks all, a copy of the action mask.

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
    """`reflections`; of an empty text, 0 of each."""
    return reflections(text) or dict.fromkeys(REFLECTIONS, 0)


def _calculate_reflection_pattern_score(text: str) -> int:
    """How many phrases of reflection there are."""
    return sum(reflections(text).values())


def _calculate_entropy_from_log_probs(log_probs: torch.Tensor | None) -> float:
    """Of whole distributions (T, V), their mean entropy; of chosen tokens' log-probs [T], their standard deviation,
    which is no entropy, and which records have as `action_log_prob_std`. 0 of one number or none.

    >>> round(_calculate_entropy_from_log_probs(torch.tensor([-0.1, -0.5, -2.0, -0.3])), 4)
    0.8655
    """
    if log_probs is None or log_probs.numel() <= 1:
        return 0.0
    if log_probs.dim() == 2:
        values = log_probs.detach().double()
        return float(torch.special.entr(values.exp()).sum(-1).mean())
    return spread_of(host(log_probs).reshape(-1))
