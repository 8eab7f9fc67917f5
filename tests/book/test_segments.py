"""Segment stores: writes are durable, reads are private, names stay inside; disks that forget, fill up and fail."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import Experience
from rollbook.book import disk as disk_module
from rollbook.book.disk import Disk, network_mount, watch_failpoints
from rollbook.book.errors import (
    CorruptBookError,
    MissingSegmentError,
    NewerLayoutError,
    SegmentBusyError,
    WriterStoppedError,
)
from rollbook.book.segments.files import (
    ALIGN,
    HEADER,
    FileSegmentStore,
    MemorySegmentStore,
    Place,
    SegmentStore,
    new_name,
)
from rollbook.book.segments.fsspec import FsspecSegmentStore, _LRUCache
from rollbook.core import wire
from tests.book.forgetful import FailingDisk, ForgetfulDisk

NAME = "0000019a4b1c2d3e-0123456789abcdef.rbs"
LARGE = 200_000  # a part that is mapped, not copied
KINDS = ("folder", "memory", "object", "file")


def open_store(kind: str, folder: Path, disk: Disk | None = None, segment_bytes: int = 256 << 20) -> SegmentStore:
    if kind == "folder":
        return FileSegmentStore(folder, disk, segment_bytes)
    if kind == "memory":
        return MemorySegmentStore(segment_bytes)
    if kind == "object":
        return FsspecSegmentStore("memory://" + folder.name, prefix="data/of/a/book")
    return FsspecSegmentStore(f"file://{folder}", prefix="objects", disk=disk)


@pytest.fixture(params=KINDS)
def store(request: Any, tmp_path: Path) -> SegmentStore:
    return open_store(request.param, tmp_path)


@pytest.fixture
def unwatched() -> Iterator[None]:
    yield
    watch_failpoints(None)


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns, as JSON, in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)  # a child that hangs ends, and its missing answer is an error
        try:
            os.write(writer, json.dumps(work()).encode())
        except BaseException as error:
            os.write(writer, json.dumps(f"raised {error!r}").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = json.loads(file.read())
    os.waitpid(pid, 0)
    return answer


# --- every store ----------------------------------------------------------------------------------------------------


class Cut(BaseException):
    """The end of a process, at a window."""


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.sampled_from([0, 1, 63, 64, 65, 500, 5000, LARGE]), max_size=4)),
        st.tuples(st.sampled_from(["seal", "reopen", "power", "cut", "remove"]), st.integers(0, 1 << 30)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(steps=STEPS, seed=st.integers(0, 1 << 30), lucky=st.booleans())
def test_what_was_put_stays(kind: str, steps: list[tuple[str, Any]], seed: int, lucky: bool) -> None:
    """Random puts, seals, removals, reopenings, crashes inside a put and power losses: every put that returned is
    there, unless its segment was removed."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, f"book{seed}")
        folder.mkdir()

        def new_store() -> tuple[ForgetfulDisk, SegmentStore]:
            disk = ForgetfulDisk(Path(name, "attic"), chance.randrange(1 << 30) if lucky else None)
            return disk, open_store(kind, folder, disk, segment_bytes=8192)

        disk, store = new_store()
        stored: dict[Place, bytes] = {}
        for step, part_sizes in steps:
            if step == "put":
                parts = [chance.randbytes(size) for size in part_sizes]
                places = store.put(parts)
                assert [place.length for place in places] == part_sizes
                assert all(place.offset % ALIGN == 0 and place.offset >= ALIGN for place in places)
                assert len({place.segment for place in places}) <= 1
                stored |= zip(places, parts, strict=True)
            elif step == "seal":
                store.seal()
            elif step == "remove":
                segments = list(store.segments())
                if segments:
                    segment = segments[part_sizes % len(segments)]
                    if store.busy(segment):
                        with pytest.raises(SegmentBusyError):
                            store.remove(segment)
                    else:
                        store.remove(segment)
                        store.remove(segment)
                        removed = [place for place in stored if place.segment == segment]
                        for place in removed:
                            del stored[place]
                            with pytest.raises(MissingSegmentError):
                                (store if kind == "memory" else open_store(kind, folder, disk)).get(place)
                        assert not store.has(segment)
            elif kind in ("folder", "file"):
                if step == "cut":

                    def lose_power(at: str, window: str = chance.choice(["after write", "after sync"])) -> None:
                        if at == window:
                            raise Cut

                    watch_failpoints(lose_power)
                    try:
                        with pytest.raises(Cut):
                            store.put([chance.randbytes(part_sizes % 9000), b"lost"])
                    finally:
                        watch_failpoints(None)
                if step != "reopen":
                    disk.power_loss()
                else:
                    store.close()
                disk, store = new_store()
                assert not any(map(store.busy, store.segments()))
            sizes = store.segments()
            assert list(sizes) == sorted(sizes)
            for place, data in stored.items():
                assert place.stop <= sizes[place.segment] and store.has(place.segment)
                view = store.get(place)
                assert view == data and not view.readonly


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_disk_forgets(tmp_path: Path, forgotten: str) -> None:
    """The trial above would notice a store that leaves out a sync."""

    class Lazy(ForgetfulDisk):
        pass

    setattr(Lazy, forgotten, lambda self, path: None)
    disk = Lazy(tmp_path / "attic")
    [place] = FileSegmentStore(tmp_path, disk).put([b"data"])
    disk.power_loss()
    with pytest.raises((CorruptBookError, MissingSegmentError)):
        FileSegmentStore(tmp_path).get(place)


def test_views_are_private(store: SegmentStore) -> None:
    """Changing what was read changes neither the store nor what others have read or will read."""
    rows = [Experience(tokens=list(range(40_000)), reward=1.0)]
    [small, large] = store.put([b"x" * 10, wire.encode(rows)])
    assert store.private
    before = store.get(small)
    store.get(small)[:] = bytes(10)
    assert before == store.get(small) == b"x" * 10
    private = wire.decode(store.get(large), private=True)
    private[0].tokens.zero_()
    assert private[0].tokens.sum() == 0
    assert wire.decode(store.get(large), private=True) == rows


def test_places_that_are_not_there(store: SegmentStore) -> None:
    [place], [second] = store.put([b"x" * 100]), store.put([bytes(range(200))])
    pieces = [Place(second.segment, second.offset + 3, 4), place, Place(second.segment, second.offset, 0), second]
    assert [bytes(piece) for piece in store.get_many(pieces)] == [b"\3\4\5\6", b"x" * 100, b"", bytes(range(200))]
    size = store.segments()[place.segment]
    reads: list[Callable[[Place], Any]] = [store.get, lambda place: store.get_many([second, place])]
    for read in reads:
        with pytest.raises(CorruptBookError, match="reaches to byte"):
            read(Place(place.segment, 64, size - 63))
        with pytest.raises(CorruptBookError, match="reaches to byte"):
            read(Place(place.segment, 1 << 50, 1 << 50))
        for offset, length in [(0, 10), (-64, 10), (64, -1), ("64", 10), (64.0, 10), (64, None)]:
            with pytest.raises(CorruptBookError, match="no part lies at"):
                read(Place(place.segment, offset, length))  # type: ignore[arg-type]
        other = new_name()
        with pytest.raises(MissingSegmentError, match=other):
            read(Place(other, 64, 10))
    assert not store.has(other) and not store.busy(other)
    store.remove(other)


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", "a/b.rbs", "/etc/passwd", "x.rbs", NAME + "\n", NAME + "\0", NAME.upper(), "../" + NAME],
        *[NAME + "/..", "./" + NAME, NAME[:-4], NAME + ".rbs", NAME.replace("0", "\u0660"), 7, None, NAME.encode()],
    ],
    ids=repr,
)
def test_hostile_names(store: SegmentStore, name: Any) -> None:
    store.put([b"something"])
    reads = (lambda name: store.get(Place(name, 64, 1)), lambda name: store.get_many([Place(name, 64, 1)]))
    for use in (store.has, store.busy, store.remove, *reads):
        with pytest.raises(CorruptBookError, match="not a segment's name"):
            use(name)


def test_parts_of_many_kinds(store: SegmentStore) -> None:
    parts = [b"bytes", bytearray(b"array"), memoryview(b"view"), np.arange(6, dtype=np.int32).reshape(2, 3), b""]
    places = store.put(parts)  # type: ignore[arg-type]
    assert [bytes(store.get(place)) for place in places] == [memoryview(part).tobytes() for part in parts]
    assert store.put([]) == []
    before = store.segments()
    with pytest.raises(ValueError, match="strided"):
        store.put([b"good", memoryview(b"strided")[::2]])
    with pytest.raises(TypeError):
        store.put(["text"])  # type: ignore[list-item]
    assert store.segments() == before
    assert store.get(store.put([b"after"])[0]) == b"after"


def test_threads_put_at_once(store: SegmentStore) -> None:
    stored: dict[Place, bytes] = {}

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(10):
            parts = [chance.randbytes(chance.randrange(2000)) for _ in range(2)]
            stored.update(zip(store.put(parts), parts, strict=True))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stored) == 120
    assert all(store.get(place) == data for place, data in stored.items())


def test_closed_stores_take_nothing(store: SegmentStore) -> None:
    [place] = store.put([b"before"])
    view = store.get(place)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.put([b"after"])
    assert view == store.get(place) == b"before"
    assert not store.busy(place.segment)


def test_windows_are_reached_in_order(tmp_path: Path, unwatched: None) -> None:
    for kind in ("folder", "object", "file"):
        seen: list[str] = []
        watch_failpoints(seen.append)
        open_store(kind, tmp_path).put([b"x"])
        assert seen == ["after write", "after sync"]


# --- a folder -------------------------------------------------------------------------------------------------------


def test_small_puts_share_a_file_and_large_ones_start_another(tmp_path: Path) -> None:
    store = FileSegmentStore(tmp_path, segment_bytes=1024)
    small = [store.put([b"x" * 64])[0] for _ in range(15)]
    assert len({place.segment for place in small}) == 1 and small[-1].stop == 1024
    [next_one] = store.put([b"y"])
    [large] = store.put([b"z" * 5000])
    [after] = store.put([b"w"])
    assert len({small[0].segment, next_one.segment, large.segment, after.segment}) == 4
    assert [store.busy(name) for name in store.segments()] == [False, False, False, True]
    store.seal()
    assert not store.busy(after.segment)
    assert store.put([b"v"])[0].segment not in (after.segment, large.segment)
    assert all(Path(store.folder, name).read_bytes()[:64] == HEADER for name in store.segments())


def test_a_growing_and_a_removed_segment(tmp_path: Path) -> None:
    """A view stays what it is while its file grows and after it is gone; a reader needs no reopening."""
    writer, reader = FileSegmentStore(tmp_path), FileSegmentStore(tmp_path)
    parts = [os.urandom(LARGE) for _ in range(4)]
    places, views = [], []
    for part in parts:
        places += writer.put([part])
        views.append(reader.get(places[-1]))
    with pytest.raises(SegmentBusyError):
        reader.remove(places[0].segment)
    writer.seal()
    reader.remove(places[0].segment)
    gc.collect()
    assert views == parts and reader.segments() == {}
    views[0][:10] = bytes(10)
    assert views[0] == bytes(10) + parts[0][10:] and views[1:] == parts[1:]
    for store in (writer, reader):
        with pytest.raises(MissingSegmentError):
            store.get(places[0])


def test_reading_keeps_nothing_open(tmp_path: Path) -> None:
    """A thousand frames that are held cost no descriptor, and those that are let go no memory."""
    store = FileSegmentStore(tmp_path)
    places = store.put([bytes(LARGE)] * 3)

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(places[0].segment)

    before = len(os.listdir("/proc/self/fd"))
    views = [store.get(places[i % 3]) for i in range(1000)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert maps() > 0
    last = np.frombuffer(views[-1], dtype=np.uint8)[5:10]
    del views
    assert maps() == 1 and not last.any()
    del last
    assert maps() == 0


def test_without_maps_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no map (too many, or a file system without), the bytes are read."""
    store = FileSegmentStore(tmp_path)
    data = os.urandom(LARGE)
    [place] = store.put([data])

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "no more maps")

    with monkeypatch.context() as patch:
        patch.setattr(disk_module, "_Map", refuse)
        assert store.get(place) == data
    monkeypatch.setattr(disk_module, "_MAX_MAPS", len(disk_module._live_maps) + 3)
    views = [store.get(place) for _ in range(10)]
    assert all(view == data for view in views)
    assert Path("/proc/self/maps").read_text().count(place.segment) == 3


def test_a_store_that_is_dropped_unlocks(tmp_path: Path) -> None:
    store = FileSegmentStore(tmp_path)
    [place] = store.put([b"x"])
    other = FileSegmentStore(tmp_path)
    assert other.busy(place.segment)
    del store
    gc.collect()
    assert not other.busy(place.segment)


def test_reading_a_book_makes_nothing(tmp_path: Path) -> None:
    store = FileSegmentStore(tmp_path / "none")
    assert store.segments() == {} and not store.has(new_name())
    store.seal()
    store.close()
    assert not (tmp_path / "none").exists()


def test_forked_children_write_for_themselves(tmp_path: Path) -> None:
    store = FileSegmentStore(tmp_path)
    [first] = store.put([b"parent"])
    view = store.get(first)

    def child() -> Any:
        inherited = [target for fd in os.listdir("/proc/self/fd") if first.segment in (target := link(fd))]
        [child_place] = store.put([b"child"])
        return (
            inherited,
            child_place.segment,
            child_place.offset,
            bytes(view).decode(),
            bytes(store.get(first)).decode(),
        )

    def link(fd: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""

    inherited, segment, offset, seen, read = in_child(child)
    assert inherited == [] and segment != first.segment and (seen, read) == ("parent", "parent")
    assert store.busy(first.segment) and not store.busy(segment)
    [second] = store.put([b"again"])
    assert (second.segment, second.offset) == (first.segment, 128)
    assert store.get(Place(segment, offset, 5)) == b"child"


def test_a_fork_in_the_middle_of_a_put(tmp_path: Path, unwatched: None) -> None:
    """The lock that another thread held when the process was forked does not stop the child."""
    store = FileSegmentStore(tmp_path)
    inside, leave = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name == "after write":
            inside.set()
            leave.wait(60)

    watch_failpoints(wait)
    thread = threading.Thread(target=lambda: places.extend(store.put([b"slow"])))
    places: list[Place] = []
    thread.start()
    assert inside.wait(60)

    def child() -> Any:
        watch_failpoints(None)
        return store.put([b"child"])[0].segment

    segment = in_child(child)
    leave.set()
    thread.join()
    assert store.segments().keys() == {segment, places[0].segment}
    assert store.get(places[0]) == b"slow" and store.get(Place(segment, 64, 5)) == b"child"


WRITER = """
import sys
from rollbook.book.segments.files import FileSegmentStore
store = FileSegmentStore(sys.argv[1], segment_bytes=4096)
for i in range(40):
    [place] = store.put([b"%d" % i * 100])
    print(place.segment, place.offset, place.length, flush=True)
sys.stdin.read()
"""


def test_two_processes_and_a_kill(tmp_path: Path) -> None:
    """Each writes its own files; the open one is busy for as long as its writer lives, and free when it is killed."""
    store = FileSegmentStore(tmp_path, segment_bytes=4096)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        own_places, child_places = [], []
        for i in range(40):
            own_places += store.put([b"%d" % i * 90])
            segment, offset, length = other.stdout.readline().split()
            child_places.append(Place(segment, int(offset), int(length)))
        assert not {place.segment for place in own_places} & {place.segment for place in child_places}
        for i, (own_place, child_place) in enumerate(zip(own_places, child_places, strict=True)):
            assert store.get(own_place) == b"%d" % i * 90 and store.get(child_place) == b"%d" % i * 100
        busy = {name for name in store.segments() if store.busy(name)}
        assert busy == {own_places[-1].segment, child_places[-1].segment}
        with pytest.raises(SegmentBusyError):
            store.remove(child_places[-1].segment)
        other.send_signal(signal.SIGKILL)
        other.wait(60)
    assert not store.busy(child_places[-1].segment)
    store.remove(child_places[-1].segment)
    assert not store.has(child_places[-1].segment)


def test_a_file_removed_before_its_writer_locked_it(tmp_path: Path) -> None:
    """A remover may meet a file between its making and its locking: the writer sees it and makes another."""
    remover = FileSegmentStore(tmp_path)

    class Raced(Disk):
        left = 2

        def try_lock(self, fd: int, shared: bool = False) -> bool:
            if self.left:
                self.left -= 1
                [name] = remover.segments()
                remover.remove(name)
            return super().try_lock(fd, shared)

    [place] = FileSegmentStore(tmp_path, Raced()).put([b"kept"])
    assert remover.segments() == {place.segment: 128} and remover.get(place) == b"kept"


def test_looking_never_stops_a_writer(tmp_path: Path) -> None:
    """`busy` holds a lock for a moment: writers that start segments and removers get by."""
    store, looker = FileSegmentStore(tmp_path, segment_bytes=64), FileSegmentStore(tmp_path)
    done = threading.Event()
    errors: list[Exception] = []

    def look() -> None:
        try:
            while not done.is_set():
                for name in looker.segments():
                    looker.busy(name)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        places = [store.put([b"%d" % i])[0] for i in range(60)]
        store.seal()
        for place in places[:30]:
            store.remove(place.segment)
    finally:
        done.set()
        thread.join()
    assert not errors
    fd = os.open(Path(store.folder, places[-1].segment), os.O_RDONLY)
    assert Disk().try_lock(fd, shared=True) and not store.busy(places[-1].segment), "others look at the same time"
    os.close(fd)
    assert [bytes(store.get(place)) for place in places[30:]] == [b"%d" % i for i in range(30, 60)]
    assert list(store.segments()) == [place.segment for place in places[30:]]


# --- disks that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "at", "code", "written"),
    [
        ("sync", 2, errno.EIO, 0),
        ("append", 2, errno.ENOSPC, 100),
        ("append", 2, errno.ENOSPC, 0),
        ("append", 2, errno.EIO, 5000),
    ],
)
def test_a_failed_write_stops_the_writer(tmp_path: Path, operation: str, at: int, code: int, written: int) -> None:
    disk = FailingDisk(operation, at, code, written)
    store = FileSegmentStore(tmp_path, disk)
    [first] = store.put([b"before"])
    with pytest.raises(OSError) as caught:
        store.put([b"x" * 5000])
    assert caught.value.errno == code and first.segment in str(caught.value)
    calls = dict(disk.calls)
    for _ in range(3):
        with pytest.raises(WriterStoppedError, match=os.strerror(code)) as stopped:
            store.put([b"after"])
        assert stopped.value.__cause__ is caught.value
    assert disk.calls == calls, "nothing was tried again"
    assert store.get(first) == b"before" and not store.busy(first.segment)
    reopened = FileSegmentStore(tmp_path, disk)
    [later] = reopened.put([b"after"])
    assert later.segment != first.segment and reopened.get(later) == b"after"


@pytest.mark.parametrize("at", [1, 2])
def test_a_failed_folder_sync_stops_the_writer(tmp_path: Path, at: int) -> None:
    (tmp_path / "segments").mkdir()
    store = FileSegmentStore(tmp_path, FailingDisk("sync_folder", at, errno.EIO))
    with pytest.raises(OSError, match=tmp_path.name):
        store.put([b"x"])
    with pytest.raises(WriterStoppedError):
        store.put([b"x"])


def test_a_file_that_cannot_be_made_can_be_tried_again(tmp_path: Path) -> None:
    """Nothing was written that could be in doubt."""
    store = FileSegmentStore(tmp_path, FailingDisk("create", 1, errno.EMFILE))
    with pytest.raises(OSError):
        store.put([b"x"])
    assert store.get(store.put([b"x"])[0]) == b"x"


def test_an_interrupt_in_a_put_starts_another_segment(tmp_path: Path, unwatched: None) -> None:
    store = FileSegmentStore(tmp_path)
    [first] = store.put([b"before"])

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    watch_failpoints(interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put([b"in doubt"])
    watch_failpoints(None)
    [second] = store.put([b"after"])
    assert second.segment != first.segment
    assert store.get(first) == b"before" and store.get(second) == b"after"


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """A real short write: the kernel takes what fits, then refuses."""

    def child() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        store = FileSegmentStore(tmp_path)
        [place] = store.put([b"fits"])
        try:
            store.put([b"x" * 300, b"y" * 3000])
        except OSError as error:
            return place.segment, error.errno, error.filename, store.segments()[place.segment]
        return None

    segment, code, path, size = in_child(child)
    assert code == errno.EFBIG and path == str(tmp_path / "segments" / segment) and size == 1000
    assert FileSegmentStore(tmp_path).get(Place(segment, 64, 4)) == b"fits"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    target = Path("/proc/self/nowhere") if os.geteuid() == 0 else tmp_path / "closed"
    if os.geteuid():
        target.mkdir(mode=0o500)
    with pytest.raises(OSError, match=target.name):
        FileSegmentStore(target / "book").put([b"x"])


# --- files that are not what they should be -------------------------------------------------------------------------


def test_every_byte_of_the_header_counts(tmp_path: Path) -> None:
    store = FileSegmentStore(tmp_path)
    [place] = store.put([b"data"])
    store.seal()
    path = Path(store.folder, place.segment)
    good = path.read_bytes()
    for at in range(ALIGN):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        with pytest.raises((CorruptBookError, NewerLayoutError), match=place.segment):
            store.get(place)
    newer = struct.pack("<8sII40x", good[:8], 2, 128)
    path.write_bytes(newer + struct.pack("<Q", xxhash.xxh3_64_intdigest(newer)) + good[64:])
    with pytest.raises(NewerLayoutError, match="layout 2"):
        store.get(place)
    for length in (0, 10, 63):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptBookError, match="cut short"):
            store.get(place)
    path.write_bytes(good[:66])
    with pytest.raises(CorruptBookError, match="reaches to byte 68"):
        store.get(place)
    path.write_bytes(good)
    assert store.get(place) == b"data"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_links_pipes_and_folders_are_not_followed(tmp_path: Path, kind: str) -> None:
    """A whole and valid segment outside of the book cannot be reached by a link, and a pipe does not hang a reader."""
    secret = FileSegmentStore(tmp_path / "secret")
    [place] = secret.put([b"secret"])
    secret.close()
    store = open_store(kind, tmp_path / "book")
    store.put([b"mine"])
    folder = tmp_path / "book" / ("segments" if kind == "folder" else "objects")
    before = store.segments()
    names = [place.segment, new_name(), new_name()]
    (folder / names[0]).symlink_to(Path(secret.folder, place.segment))
    os.mkfifo(folder / names[1])
    (folder / names[2]).mkdir()
    for name in names:
        with pytest.raises(CorruptBookError, match="expected a plain file"):
            store.get(Place(name, place.offset, place.length))
        assert not store.has(name)
    assert store.segments() == before


def test_a_folder_of_segments_that_is_a_link(tmp_path: Path) -> None:
    secret = FileSegmentStore(tmp_path / "secret")
    [place] = secret.put([b"secret"])
    secret.close()
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "segments").symlink_to(secret.folder)
    store = FileSegmentStore(tmp_path / "book")
    uses: list[Callable[[], Any]] = [
        lambda: store.get(place),
        lambda: store.put([b"x"]),
        lambda: store.remove(place.segment),
        lambda: store.busy(place.segment),
        lambda: store.has(place.segment),
        store.segments,
    ]
    for use in uses:
        with pytest.raises(CorruptBookError, match="expected a folder"):
            use()
    assert secret.get(place) == b"secret"


# --- objects --------------------------------------------------------------------------------------------------------


def test_rows_of_one_part_cost_one_request(tmp_path: Path) -> None:
    writer = FsspecSegmentStore(f"memory://{tmp_path.name}")
    places = writer.put([b"a" * 100, b"b" * 100_000, b"c" * 100, b"d" * 100])
    requests: list[tuple[int, int]] = []
    store: Any = FsspecSegmentStore(f"memory://{tmp_path.name}")
    read = store._store._bytes
    store._store._bytes = lambda fs, place, start, stop: requests.append((start, stop)) or read(fs, place, start, stop)
    for _ in range(3):
        assert [bytes(store.get(place)[:1]) for place in reversed(places)] == [b"d", b"c", b"b", b"a"]
    # The header once, then each part once.
    assert len(requests) == 5 and (0, 64) in requests


def test_what_is_kept_is_bounded() -> None:
    recent: _LRUCache[int, bytes] = _LRUCache(100)
    for key in range(10):
        recent.add(key, bytes(30), 30)
        assert recent.get(0) is not None
    assert [key for key in range(10) if recent.get(key) is not None] == [0, 8, 9] and recent.weight == 90
    recent.add(9, bytes(10), 10)
    recent.add(10, bytes(101), 101)
    assert recent.weight == 70 and recent.get(10) is None


def test_objects_that_are_no_segments(tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    fs, root = MemoryFileSystem(), f"/{tmp_path.name}"
    store = FsspecSegmentStore(f"memory://{tmp_path.name}")
    store.put([b"x"])
    name = new_name()
    fs.pipe_file(f"{root}/{name}", b"anything that is longer than a header" * 10)
    fs.pipe_file(f"{root}/readme.txt", b"not ours")
    with pytest.raises(CorruptBookError, match="not that of a segment"):
        store.get(Place(name, 64, 10))
    assert len(store.segments()) == 2
    [place] = store.put([b"y"])
    with pytest.raises(FileExistsError):
        store._store.write(place.segment, [b"over it"])
    assert store.get(place) == b"y"


def test_files_of_objects_are_synced_and_whole(tmp_path: Path) -> None:
    disk = FailingDisk("rename", 2, errno.EIO)
    store = FsspecSegmentStore(tmp_path, prefix="/deep/down/", disk=disk)
    [place] = store.put([b"x"])
    assert disk.calls["sync"] == 1 and disk.calls["sync_folder"] == 3  # two folders were made
    with pytest.raises(OSError):
        store.put([b"y"])
    assert [path.name for path in (tmp_path / "deep" / "down").iterdir()] == [place.segment]
    assert store.get(store.put([b"z"])[0]) == b"z"


def test_objects_in_a_forked_child(tmp_path: Path) -> None:
    store = FsspecSegmentStore(f"memory://{tmp_path.name}")
    [place] = store.put([b"x"])
    assert in_child(lambda: [bytes(store.get(place)).decode(), len(store.put([b"y"]))]) == ["x", 1]


def test_a_server_with_folders(tmp_path: Path) -> None:
    """Where a store has folders and does not make them by itself, the first put does."""
    store = FsspecSegmentStore("dir://", {"path": str(tmp_path), "target_protocol": "file"}, prefix="deep/down")
    assert store.segments() == {}
    [place] = store.put([b"x" * 10])
    assert store.get(place) == b"x" * 10 and store.segments() == {place.segment: 128}
    assert (tmp_path / "deep" / "down" / place.segment).exists()


def test_a_forked_copy_of_memory() -> None:
    store = MemorySegmentStore()
    [place] = store.put([b"x"])
    with store._lock:  # as if another thread were in the middle of a put
        seen, segment = in_child(lambda: [bytes(store.get(place)).decode(), store.put([b"y"])[0].segment])
    assert seen == "x" and segment != place.segment and not store.has(segment)


def test_urls_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nosuch://x"):
        FsspecSegmentStore("nosuch://x")
    with pytest.raises(ValueError, match="prefix"):
        FsspecSegmentStore(tmp_path, prefix="a/../../b")


# --- the disk -------------------------------------------------------------------------------------------------------


def test_appending_many_pieces(tmp_path: Path) -> None:
    disk, pieces = Disk(), [b"%d," % i for i in range(3000)] + [b"", memoryview(b"end")]
    file = disk.create(str(tmp_path / "log"))
    assert disk.append(file, pieces) == len(b"".join(pieces))
    assert disk.append(file, []) == 0
    assert (tmp_path / "log").read_bytes() == b"".join(pieces)
    with pytest.raises(FileExistsError, match="log"):
        disk.create(str(tmp_path / "log"))
    file.close()
    file.close()


def test_short_writes_are_continued() -> None:
    """A pipe takes what fits and interrupts come in between: all of it arrives, in order."""
    from rollbook.book.disk import File

    reader, writer = os.pipe()
    pieces = [os.urandom(size) for size in (70_000, 1, 200_000, 3)]
    received = bytearray()

    def drain() -> None:
        while step := os.read(reader, 5000):
            received.extend(step)
            time.sleep(0.0002)

    thread = threading.Thread(target=drain)
    old = signal.signal(signal.SIGALRM, lambda *arguments: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        thread.start()
        file = File(writer, "pipe")
        assert Disk().append(file, pieces) == 270_004
        file.close()
        thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        os.close(reader)
    assert received == b"".join(pieces)


@pytest.mark.parametrize("operation", ["create", "append", "sync", "rename"])
def test_an_atomic_write_that_fails_changes_nothing(tmp_path: Path, operation: str) -> None:
    path = tmp_path / "name"
    Disk().write_atomic(str(path), b"old")
    with pytest.raises(OSError):
        FailingDisk(operation, 1, errno.ENOSPC, 2).write_atomic(str(path), b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["name"]
    Disk().write_atomic(str(path), b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("seed", range(20))
def test_an_atomic_write_and_a_power_loss(tmp_path: Path, seed: int) -> None:
    """Whatever of the unsynced survives, the file is the old or the new one, and the new one once it returned."""
    (tmp_path / "book").mkdir()
    path = tmp_path / "book" / "name"

    class Unsynced(ForgetfulDisk):
        def sync_folder(self, path: str) -> None: ...

    ForgetfulDisk(tmp_path / "attic").write_atomic(str(path), b"old")
    disk = Unsynced(tmp_path / "attic", seed)
    disk.write_atomic(str(path), b"new")
    disk.power_loss()
    assert path.read_bytes() in (b"old", b"new")
    disk = ForgetfulDisk(tmp_path / "attic", seed)
    disk.write_atomic(str(path), b"newer")
    disk.power_loss()
    assert path.read_bytes() == b"newer"


def test_a_removal_that_was_not_synced_comes_back(tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    path = tmp_path / "book" / "name"
    path.write_bytes(b"x")
    disk = ForgetfulDisk(tmp_path / "attic")
    disk.unlink(str(path))
    disk.power_loss()
    assert path.read_bytes() == b"x"
    disk = ForgetfulDisk(tmp_path / "attic")
    disk.remove(str(path))
    disk.power_loss()
    assert not path.exists()


def test_space_and_sizes(tmp_path: Path) -> None:
    disk = Disk()
    assert 0 < disk.free(str(tmp_path)) < 1 << 60
    with pytest.raises(FileNotFoundError, match="nowhere"):
        disk.free(str(tmp_path / "nowhere"))
    (tmp_path / "b").write_bytes(b"12")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").mkdir()
    assert list(disk.sizes(str(tmp_path)).items()) == [("a", 1), ("b", 2)]


TABLE = r"""21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /proc rw - proc proc rw
30 21 0:40 / /home rw shared:2 master:1 - nfs4 host:/home rw,vers=4.2,addr=10.0.0.1
31 30 8:2 / /home/scratch rw - xfs /dev/nvme0n1 rw
32 21 0:41 / /mnt/my\040data\134x rw - fuse.sshfs me@host:/data rw
33 21 0:42 / /mnt/bucket rw - fuse mountpoint-s3 rw
34 21 0:43 / /mnt/ntfs rw - fuseblk /dev/sdc1 rw
35 21 0:44 / /mnt/host rw - 9p host rw,trans=virtio,version=9p2000.L
36 21 0:45 / /mnt/plan rw - 9p 10.0.0.2 rw,trans=tcp
37 21 0:46 / /mnt/twice rw - cifs //host/share rw
38 37 8:3 / /mnt/twice rw - ext4 /dev/sdd1 rw
39 21 0:47 / /lustre rw - lustre 10.0.0.3@tcp:/fs rw
a line that makes no sense
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", None),
        ("/tmp/runs", None),
        ("/home/me/runs", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/me", None),
        ("/home/scratch/runs", None),
        ("/mnt/my data\\x/runs", "fuse.sshfs"),
        ("/mnt/my data/runs", None),
        ("/mnt/bucket/runs", "fuse"),
        ("/mnt/ntfs/runs", None),
        ("/mnt/host/runs", None),
        ("/mnt/plan/runs", "9p"),
        ("/mnt/twice/runs", None),
        ("/lustre/runs", "lustre"),
    ],
)
def test_network_file_systems_are_known(path: str, expected: str | None) -> None:
    assert network_mount(path, TABLE) == expected


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"1 0 0:1 / {os.path.realpath(tmp_path)} rw - nfs host:/ rw\n")
    monkeypatch.setattr("rollbook.book.disk.MOUNTS", table)
    (tmp_path / "link").symlink_to(tmp_path / "not" / "yet")
    assert Disk().network_file_system(str(tmp_path / "link" / "book")) == "nfs"
    monkeypatch.setattr("rollbook.book.disk.MOUNTS", tmp_path / "none")
    assert Disk().network_file_system(str(tmp_path)) is None
