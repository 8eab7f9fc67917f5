"""The pickle reader gives back what was pickled, calls nothing, and has one error for all malformed input."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import dataclasses
import io
import math
import os
import pickle
import re
import struct
import subprocess
import sys
import time
import tracemalloc
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.core import trxp
from rollbook.core.trxp import Record, UnpickleError, load

PROTOCOLS = range(6)


class Call:
    """Pickles as a call of ``function`` with ``args``, whatever they are."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


# Opcodes by hand: a text, a name, a value that is also put in the memo.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def ref(name: str) -> bytes:
    owner, _, last = name.rpartition(".")
    return f"c{owner}\n{last}\n".encode()


def put(value: bytes) -> bytes:
    return value + b"\x94"


def same(a: Any, b: Any) -> bool:
    """Equality that also tells types, signed zeros and NaN apart, and looks into arrays and tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return False
        return bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def module(name: str, **members: Any) -> Iterator[None]:
    """Let the given classes be members of a module that exists only meanwhile."""
    parts = name.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    for package in names:
        sys.modules[package] = types.ModuleType(package)
    for key, value in members.items():
        value.__module__, value.__qualname__ = name, key
        setattr(sys.modules[name], key, value)
    try:
        yield
    finally:
        for package in names:
            del sys.modules[package]


AUDITED = {"import", "compile", "exec", "open", "pickle.find_class", "marshal.loads", "ctypes.dlopen"}
events: list[str] | None = None  # what the audit hook saw, while a payload is being loaded


def audit(event: str, args: tuple[Any, ...]) -> None:
    if events is not None and (event in AUDITED or event.startswith(("os.", "subprocess.", "socket.", "shutil."))):
        events.append(event)


sys.addaudithook(audit)


def attempt(payload: bytes, **options: Any) -> Any:
    """The value or the error that loading gives, in good time and without importing or running anything."""
    global events
    began, events = time.perf_counter(), []
    try:
        result = load(payload, **options)
    except UnpickleError as exc:
        result = exc
    finally:
        seen, events = events, None
    assert seen == []
    assert time.perf_counter() - began < 10
    return result


def refused(payload: bytes, match: str = "", **options: Any) -> UnpickleError:
    error = attempt(payload, **options)
    assert type(error) is UnpickleError, f"gave {error!r:.200}"
    assert re.search(match, str(error)), str(error)
    assert 0 <= error.offset <= len(payload)
    return error


# --- Round trips of plain values.

PLAIN = [
    None,
    True,
    False,
    *(sign * (1 << n) + d for n in (0, 7, 8, 15, 16, 31, 32, 63, 64, 2000) for sign in (1, -1) for d in (-1, 0, 1)),
    *(0.0, -0.0, 1.5, -1e300, 5e-324, math.inf, -math.inf, math.nan),
    *(1j, complex(-0.0, math.nan), complex(math.inf, 2.5)),
    *(
        "",
        "a",
        "é" * 100,
        "日本語 🎲",
        "\ud800 alone \udfff",
        "line\nbreak\r\\u0041\x00\x1a",
        "x" * 300,
        "y" * 70_000,
    ),
    *(b"", b"a", bytes(range(256)), b"z" * 70_000),
    *(bytearray(), bytearray(b"\x00\xff"), bytearray(b"q" * 70_000)),
    *([], [1], [[], [[]], ()], list(range(3000))),
    *((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((), ()))),
    *({}, {"a": 1}, {1: "a", None: [], (1, "x", (2.5, b"y")): {}, 1.5: 2, b"k": 3, 2j: 4, False: 5}),
    {str(i): i for i in range(3000)},
    *(
        set(),
        {1, 2, 3},
        {"a", None, (1, (2, "b"))},
        frozenset(),
        frozenset({1, "a"}),
        [frozenset({(1, 2), "a"})] * 3,
    ),
    [frozenset({("a", i % 2), 1 << 70}) for i in range(500)],
    {"nested": [{"deep": [(1, {"er": [None, {"x"}]})]}]},
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values(protocol: int) -> None:
    for value in PLAIN:
        assert same(load(pickle.dumps(value, protocol)), value), repr(value)[:80]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_pure_python_pickler_too(protocol: int) -> None:
    for value in PLAIN:
        out = io.BytesIO()
        pickle._Pickler(out, protocol).dump(value)  # type: ignore[attr-defined]
        assert same(load(out.getvalue()), value), repr(value)[:80]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
KEYS = st.recursive(SCALARS.filter(lambda x: x == x), lambda kids: st.tuples(kids, kids), max_leaves=4)
VALUES = st.recursive(
    SCALARS | st.complex_numbers() | st.text(st.characters(), max_size=5) | st.sets(KEYS, max_size=4),
    lambda kids: (
        st.lists(kids, max_size=5)
        | st.tuples(kids, kids)
        | st.dictionaries(KEYS, kids, max_size=5)
        | st.frozensets(KEYS, max_size=5)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_any_plain_value(value: Any, protocol: int) -> None:
    assert same(load(pickle.dumps(value, protocol)), value)


def test_all_kinds_of_buffer() -> None:
    payload = pickle.dumps({"a": [1, "x"]})
    for data in (payload, bytearray(payload), memoryview(payload), memoryview(b"--" + payload)[2:]):
        assert load(data) == {"a": [1, "x"]}
    with pytest.raises(TypeError):
        load("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_values_stay_shared(protocol: int) -> None:
    inner: list[Any] = [1]
    array, tensor = np.arange(3), torch.arange(3)
    a, b, c, d, e, f = load(pickle.dumps([inner, inner, array, array, tensor, tensor], protocol))
    assert a is b and c is d and e is f and a == inner and same(c, array) and same(e, tensor)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ordered_dicts_become_dicts(protocol: int) -> None:
    ordered = collections.OrderedDict([("b", 1), ("a", [2])])
    assert same(load(pickle.dumps(ordered, protocol)), {"b": 1, "a": [2]})
    called = Call(collections.OrderedDict, [["b", 1], ("a", 2)])
    assert same(load(pickle.dumps(called, protocol)), {"b": 1, "a": 2})
    refused(pickle.dumps(Call(collections.OrderedDict, [[1, 2, 3]]), protocol), "pairs")


def test_builtins_by_name() -> None:
    for owner in ("builtins", "__builtin__"):
        assert load(ref(f"{owner}.set") + b"(]K\x01atR.") == {1}
        assert load(ref(f"{owner}.frozenset") + b"(]K\x01atR.") == frozenset({1})
        assert load(ref(f"{owner}.bytes") + b"C\x01a\x85R.") == b"a"
        assert same(load(ref(f"{owner}.bytearray") + text("ÿ") + text("latin-1") + b"\x86R."), bytearray(b"\xff"))
    number = b"J\xff\xff\xff\x7f\x85R."
    refused(ref("builtins.bytes") + number, "a int where only a bytes")
    refused(ref("builtins.bytearray") + number, "a int where only a bytes")
    refused(ref("builtins.complex") + text("1j") + b"\x85R.", "a str where only a float")
    refused(ref("builtins.set") + b"}\x85R.", "a dict where only a list")
    refused(ref("_codecs.encode") + text("a") + text("utf-8") + b"\x86R.", "latin1")
    refused(ref("_codecs.encode") + text("€") + text("latin1") + b"\x86R.", "UnicodeEncodeError")
    refused(ref("_codecs.encode") + text("a") + b"\x85R.", "TypeError")


# --- Records.


def test_records() -> None:
    @dataclasses.dataclass
    class EID:
        batch: int = 0
        task: str = "t"

    @dataclasses.dataclass
    class Experience:
        eid: EID
        tokens: torch.Tensor
        info: dict[str, Any]

    records = [("made.up.module", "Experience"), ("made.up.module", "EID")]
    record = Experience(EID(3), torch.arange(4), {"x": np.float32(2)})
    for protocol in PROTOCOLS:
        with module("made.up.module", Experience=Experience, EID=EID):
            payload = pickle.dumps([record, record], protocol)
        first, second = load(payload, records=records)
        assert first is second and type(first) is Record
        assert (first.module, first.name) == records[0]
        assert first.state["eid"] == Record("made.up.module", "EID", {"batch": 3, "task": "t"})
        assert same(first.state["tokens"], record.tokens) and same(first.state["info"], record.info)
        refused(payload, r"refers to made\.up\.module\.Experience")
        refused(payload, r"refers to made\.up\.module\.EID", records=records[:1])
    assert "made.up.module" not in sys.modules


def test_records_of_other_forms() -> None:
    class Slots:
        __slots__ = ("a", "b")

    class Both(Slots):
        pass

    class NewArgs:
        def __getnewargs__(self) -> tuple[int]:
            return (1,)

    slots, both = Slots(), Both()
    slots.a, both.a, both.c = 1, 2, 3  # type: ignore[attr-defined]
    names = [("made", name) for name in ("Slots", "Both", "NewArgs")]
    for protocol in range(2, 6):
        with module("made", Slots=Slots, Both=Both, NewArgs=NewArgs):
            payloads = [pickle.dumps(x, protocol) for x in (slots, both, NewArgs(), Slots)]
        assert load(payloads[0], records=names) == Record("made", "Slots", {"a": 1})
        assert load(payloads[1], records=names) == Record("made", "Both", {"a": 2, "c": 3})
        refused(payloads[2], "made.NewArgs made with arguments", records=names)
        refused(payloads[3], "a reference to made.Slots in the result", records=names)
    record = Record("made", "Slots", {"a": 5})
    for code in (
        b"(imade\nSlots\n",  # INST
        b"(cmade\nSlots\no",  # OBJ
        b"cmade\nSlots\n)R",  # REDUCE
        b"cmade\nSlots\n)\x81",  # NEWOBJ
        b"cmade\nSlots\n)}\x92",  # NEWOBJ_EX
        b"ccopyreg\n__newobj__\ncmade\nSlots\n\x85R",
        b"ccopyreg\n_reconstructor\ncmade\nSlots\ncbuiltins\nobject\nN\x87R",
    ):
        state = b"}X\x01\x00\x00\x00aK\x05sb."
        assert load(code + state, records=names) == record
        refused(code + state, "refers to made.Slots")
    for code in (
        b"(K\x01imade\nSlots\n",
        b"(cmade\nSlots\nK\x01o",
        b"cmade\nSlots\nK\x01\x85R",
        b"cmade\nSlots\nK\x01\x85\x81",
        b"cmade\nSlots\n)}X\x01\x00\x00\x00aNs\x92",
        b"ccopyreg\n__newobj__\ncmade\nSlots\nN\x86R",
    ):
        refused(code + b".", "made with arguments", records=names)
    refused(b"ccopyreg\n_reconstructor\ncmade\nSlots\ncmade\nBoth\nN\x87R.", "object", records=names)
    refused(b"cmade\nSlots\n)\x81]b.", "a list where only a dict", records=names)
    refused(b"cmade\nSlots\n)\x81}K\x01Nsb.", "name is not text", records=names)
    refused(b"ccopyreg\n__newobj__\ncbuiltins\nobject\n\x85R.", "an instance of builtins.object")
    refused(b"]}b.", "a list where only a numpy array")


# --- numpy.

NUMPY_NUMBERS = "b1 i1 u1 <i2 >i2 <u4 >u4 <i8 >u8 <f2 <f4 >f4 <f8 >f8 g <c8 >c16 G"
NUMPY_TYPES = f"{NUMPY_NUMBERS} S3 <U4 >U2 <M8[s] >M8[25us] <m8[D] <m8 <M8".split()


def numpy_array(code: str) -> np.ndarray[Any, Any]:
    if np.dtype(code).kind in "SU":
        return np.array(["a", "bc", "", "def"] * 6).astype(code)
    return np.arange(24).astype(code)


@pytest.mark.parametrize("code", NUMPY_TYPES)
def test_numpy_arrays(code: str) -> None:
    base = numpy_array(code)
    cube = base.reshape(2, 3, 4)
    for array in (
        *(base, base[:0], base[:1], base[3:4].reshape(()), base[::5], base[::-1]),
        *(cube, np.asfortranarray(cube), cube[:, :0], cube[:, 1:, ::2]),
        *(cube.transpose(1, 0, 2), cube.transpose(2, 0, 1)[:, :, 1:]),
    ):
        for protocol in PROTOCOLS:
            payload = pickle.dumps({"x": [array]}, protocol)
            again, expected = load(payload)["x"][0], pickle.loads(payload)["x"][0]
            assert same(again, array) and again.flags.writeable
            assert again.dtype.byteorder == array.dtype.byteorder
            assert again.strides == expected.strides or not array.size


@pytest.mark.parametrize("code", NUMPY_TYPES)
def test_numpy_scalars(code: str) -> None:
    for scalar in numpy_array(code)[:4]:
        for protocol in PROTOCOLS:
            assert same(load(pickle.dumps([scalar], protocol)), [scalar])
            if code != "<m8":  # which has no hash
                assert same(load(pickle.dumps({scalar: 1}, protocol)), {scalar: 1})


def test_numpy_corners() -> None:
    for value in (np.str_(""), np.bytes_(b""), np.float64("nan"), np.datetime64("NaT"), np.zeros((3, 0, 2))):
        for protocol in PROTOCOLS:
            assert same(load(pickle.dumps(value, protocol)), value)
    for value in (np.arange(9).reshape(3, 3), np.float32(1.5)):  # numpy before 2.0 names its module otherwise
        old = pickle.dumps(value, 2).replace(b"numpy._core", b"numpy.core")
        assert b"numpy.core" in old and same(load(old), value)
    old = pickle.dumps(np.arange(3), 5).replace(b"\x13numpy._core.numeric", b"\x12numpy.core.numeric")
    assert same(load(old[:2] + old[11:]), np.arange(3))  # without its frame, whose length is now wrong
    big = np.arange(100_000)
    assert same(load(pickle.dumps([big, big.astype("f4")], 5)), [big, big.astype("f4")])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_refusals(protocol: int) -> None:
    for value, match in (
        (np.array([None, 1]), "numpy dtype other than"),
        (np.zeros(2, [("a", "i4")]), "numpy dtype other than"),
        (np.void(b"abc"), "numpy dtype other than"),
        (np.dtype("f4"), "a numpy dtype in the result"),
        (np.ndarray, "a reference to numpy.ndarray in the result"),
        (np.float32, "refers to numpy.float32"),
        (np.ma.array([1]), r"refers to numpy\.ma"),
    ):
        refused(pickle.dumps(value, protocol), match)


def test_numpy_lies() -> None:
    def scalar(code: str, raw: bytes) -> bytes:
        dtype = ref("numpy.dtype") + text(code) + b"\x89\x88\x87R"
        return ref("numpy._core.multiarray.scalar") + dtype + b"C" + bytes([len(raw)]) + raw + b"\x86R."

    assert load(scalar("i4", b"\x01\x00\x00\x00")) == 1
    refused(scalar("i4", b"\x01\x00\x00"), "not for 3 bytes")
    refused(scalar("b1", b"\x02"), "bool not 0 or 1")
    refused(scalar("U1", b"\xff" * 4), "not of Unicode")
    refused(scalar("O8", b"A" * 8), "numpy dtype other than")
    refused(scalar("S999999999", b""), "not for 0 bytes")

    new = ref("numpy._core.multiarray._reconstruct") + ref("numpy.ndarray") + b"K\x00\x85C\x01b\x87R"
    dtype = ref("numpy.dtype") + text("i4") + b"\x85R"

    def state(shape: bytes, raw: bytes = b"C\x00") -> bytes:
        return b"(K\x01(" + shape + b"t" + dtype + b"\x89" + raw + b"t"

    array_state = state(b"K\x01", b"C\x04\x01\x00\x00\x00")
    huge = b"\x8a\x08" + b"\xff" * 7 + b"\x7f"
    assert load(new + array_state + b"b.").tolist() == [1]
    refused(new + state(b"J\xff\xff\xff\xff") + b"b.", "below 0")
    refused(new + state(huge) + b"b.", "not for 0 bytes")
    refused(new + state(b"K\x00" + huge) + b"b.", "more work")
    refused(new + state(b"K\x01" * 70) + b"b.", "too many dimensions")
    refused(new + state(b"K\x01", b"]") + b"b.", "a list where only a bytes")
    refused(new + array_state + b"b" + array_state + b"b.", "a ndarray where only a numpy array")
    refused(new + b".", "a numpy array in the result")
    refused(put(new) + put(b"]h\x00a") + b"0" + array_state + b"b0h\x01.", "a numpy array in the result")
    refused(put(new) + b"h\x00" + array_state + b"b0" + array_state + b"b.", "built twice")
    fields = b"(K\x03" + text("|") + b"N" + text("a") + b"\x85}K\x04K\x01K\x00tb."
    refused(dtype + fields, "structured")

    time = ref("numpy.dtype") + text("M8") + b"\x85R"
    head = b"(K\x04" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
    for unit in (text("D") + huge, text("D") + b"K\x00", text("fortnight") + b"K\x01", b"]K\x01"):
        refused(time + head + b"N(" + unit + b"K\x01K\x01t\x86tb.", "unknown unit|only a str")
    refused(time + head + b"tb.", "TypeError")
    large_tuple = put(b"(" + b"N" * 1_000_000 + b"t")
    refused(large_tuple + dtype + b"h\x00b" * 100_000 + b".", "ValueError")


# --- torch.

TORCH_TYPES = sorted(trxp._WIDTHS)


def torch_tensor(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", TORCH_TYPES)
def test_torch_tensors(name: str) -> None:
    base = torch_tensor(name)
    cube = base.view(2, 3, 4)
    for tensor in (
        base,
        base[:0],
        base[5],
        base[3:17:4],
        base[7:],
        cube,
        cube.permute(2, 0, 1),
        cube[:, 1:, ::2],
        cube[2:, 1:],
        cube[:, :, :1].expand(2, 3, 7),
        torch.empty(0, dtype=base.dtype),
        torch.empty(3, 0, 2, dtype=base.dtype),
    ):
        for protocol in PROTOCOLS:
            again = load(pickle.dumps({"x": tensor}, protocol))["x"]
            assert same(again, tensor) and again.device.type == "cpu" and type(again) is torch.Tensor
            assert load(pickle.dumps(tensor.dtype, protocol)) is tensor.dtype


def test_torch_widths_are_those_of_torch() -> None:
    for name, width in trxp._WIDTHS.items():
        assert getattr(torch, name).itemsize == width
    for (_, name), dtype in trxp._STORAGES.items():
        if name != "UntypedStorage":
            assert getattr(torch, name)._dtype == getattr(torch, dtype)


def test_torch_tensors_own_their_memory() -> None:
    payload = pickle.dumps(torch.arange(10.0).requires_grad_())
    before = bytes(payload)
    first, second = load(payload), load(payload)
    assert not first.requires_grad
    first += 1
    first.resize_(1000)
    assert payload == before and same(second, torch.arange(10.0))
    parameter = load(pickle.dumps(torch.nn.Parameter(torch.ones(2))))
    assert type(parameter) is torch.Tensor and same(parameter, torch.ones(2))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_torch_conjugate_and_negative(protocol: int) -> None:
    base = torch.tensor([1 + 2j, -3j])
    for tensor in (base.conj(), base.conj().imag, base.conj().real):
        again = load(pickle.dumps(tensor, protocol))
        assert torch.equal(again, tensor) and not again.is_conj() and not again.is_neg()


def rebuild(storage: Any, *args: Any, function: Any = torch._utils._rebuild_tensor_v2) -> Call:
    return Call(function, storage, *args, False, collections.OrderedDict())


def test_torch_aliases() -> None:
    storage = torch.arange(6.0)._typed_storage()
    payload = pickle.dumps([rebuild(storage, 0, (6,), (1,)), rebuild(storage, 2, (2, 2), (2, 1))])
    tensor, part = load(payload)
    assert part.tolist() == [[2, 3], [4, 5]]
    tensor[2] = 99
    assert part[0, 0] == 99
    assert load(pickle.dumps(Call(torch._utils._rebuild_tensor, storage, 1, (2,), (3,)))).tolist() == [1, 4]


def test_torch_out_of_bounds() -> None:
    storage = torch.arange(6.0)._typed_storage()
    for offset, size, stride in (
        (0, (7,), (1,)),
        (1, (6,), (1,)),
        (6, (1,), (1,)),
        (6, (), ()),
        (0, (2, 3), (4, 1)),
        (1 << 62, (1,), (1,)),
        (0, (2,), (1 << 62,)),
        (0, (1 << 62, 4), (1, 1)),
    ):
        refused(pickle.dumps(rebuild(storage, offset, size, stride)), "reaches past the 6 values")
    for offset, size, stride, match in (
        (-1, (1,), (1,), "below 0"),
        (0, (-1,), (1,), "below 0"),
        (5, (6,), (-1,), "below 0"),
        (0, (2,), (1, 1), "differ in length"),
        (0, (1 << 63,), (0,), "huge"),
        (0, (1 << 40,), (0,), "more memory"),
        (0, (1 << 40, 0), (0, 0), "more memory"),
        (0, (1.0,), (1,), "a float where only a int"),
        (True, (1,), (1,), "a bool where only a int"),
        (0, 3, (1,), "a int where only a tuple"),
        (0, (1,) * 65, (1,) * 65, "too many dimensions"),
    ):
        refused(pickle.dumps(rebuild(storage, offset, size, stride)), match)
    refused(pickle.dumps(rebuild("text", 0, (1,), (1,))), "only a torch storage")
    refused(pickle.dumps(storage), "a torch storage in the result")
    assert load(pickle.dumps(torch.zeros(1).expand(1000, 1000))).shape == (1000, 1000)


def legacy(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def from_bytes(data: bytes, *args: Any) -> bytes:
    return pickle.dumps(rebuild(Call(torch.storage._load_from_bytes, data), *(args or (0, (3,), (1,)))))


def test_torch_storage_lies() -> None:
    good = legacy(torch.arange(3)._typed_storage())
    data = good[-24:]
    assert load(from_bytes(good)).tolist() == [0, 1, 2]
    head = good[:-32]
    for count in (0, 2, 4, 1 << 40, (1 << 64) - 1):
        refused(from_bytes(head + struct.pack("<Q", count) + data), "cannot be 3 int64")
    refused(from_bytes(good + b"x"), "25 bytes cannot be 3 int64")
    refused(from_bytes(good[:-1]), "23 bytes cannot be 3 int64")
    refused(from_bytes(head + b"\x03"), "cannot be 3 int64")
    for count in (b"K\x02", b"K\x04"):
        refused(from_bytes(good.replace(b"K\x03N", count + b"N")), "cannot be")
    refused(from_bytes(good.replace(b"K\x03N", b"J\xff\xff\xff\xffN")), "below 0")
    refused(from_bytes(good.replace(b"LongStorage", b"IntStorage")), "24 bytes cannot be 3 int32")
    refused(from_bytes(good.replace(b"LongStorage", b"QInt8Storage")), r"refers to torch\.QInt8Storage")
    refused(from_bytes(good.replace(b"torch\nLongStorage", b"posix\ngetpid")), r"refers to posix\.getpid")
    refused(from_bytes(good.replace(b"\x6c\xfc\x9c", b"\x6c\xfc\x9d")), "magic number")
    refused(from_bytes(legacy([1, 2])), "a list where only a torch storage")
    refused(from_bytes(legacy(torch.arange(3))), r"refers to torch\._utils\._rebuild_tensor_v2")
    refused(from_bytes(b""), "in a torch storage: the data ends early")
    zipped = io.BytesIO()
    torch.save(torch.arange(3)._typed_storage(), zipped)
    refused(from_bytes(zipped.getvalue()), "zip")
    untyped = legacy(torch.arange(3).untyped_storage())
    assert load(from_bytes(untyped, 0, (24,), (1,))).dtype == torch.uint8
    assert load(from_bytes(untyped.replace(b"torch.storage\n", b"torch\n"), 8, (1,), (1,))).tolist() == [1]
    flag = legacy(torch.tensor([True])._typed_storage())
    assert load(from_bytes(flag, 0, (1,), (1,))).tolist() == [True]
    refused(from_bytes(flag[:-1] + b"\x02", 0, (1,), (1,)), "bool not 0 or 1")


def test_torch_storages_of_another_device() -> None:
    good = legacy(torch.arange(3)._typed_storage()).replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3")
    assert load(from_bytes(good)).device.type == "cpu"


def test_torch_refusals() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        payloads = {
            "torch.Size": pickle.dumps(torch.Size([1])),
            "torch.device": pickle.dumps(torch.device("cpu")),
            "torch._utils._rebuild_sparse_tensor": pickle.dumps(torch.eye(2).to_sparse()),
            "torch._utils._rebuild_meta_tensor_no_storage": pickle.dumps(torch.empty(2, device="meta")),
            "torch.serialization._get_layout": b"ctorch.serialization\n_get_layout\n.",
            "torch.load": b"ctorch\nload\n.",
            "torch.FloatStorage": b"ctorch\nFloatStorage\n.",
            "torch.no_such_dtype": b"ctorch\nno_such_dtype\n.",
        }
    for name, payload in payloads.items():
        refused(payload, f"refers to {name}".replace(".", r"\."))


# --- Hostile payloads.


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions a payload may name, known to the reader or not, all of which tell that they were called."""
    called: list[str] = []
    for owner, names in (
        (sys.modules["posix"], ("getpid", "system")),
        (os, ("getpid", "system")),
        (torch, ("load",)),
        (torch.storage, ("_load_from_bytes",)),
        (torch._utils, ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
        (copyreg, ("_reconstructor", "__newobj__")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, lambda *args, name=name, **kwargs: called.append(name))
    yield
    assert called == []


HOSTILE = {
    "posix.getpid": b"cposix\ngetpid\n)R.",
    "os.system": b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
    "builtins.eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "__builtin__.eval": b"c__builtin__\neval\n(S'1'\ntR.",
    "builtins.getattr": b"cbuiltins\ngetattr\n.",
    "builtins.print": b"cbuiltins\nprint\n)R.",
    "torch.load": b"ctorch\nload\n.",
    "torch.hub.load": b"ctorch.hub\nload\n.",
    "rollbook_no_such.thing": b"crollbook_no_such\nthing\n.",
    "os.path.join": b"\x8c\x02os\x8c\x09path.join\x93.",
    "numpy.core.multiarray.scalar.__call__": b"\x8c\x15numpy.core.multiarray\x8c\x0fscalar.__call__\x93.",
    "torch.float32.__reduce__": b"\x8c\x05torch\x8c\x12float32.__reduce__\x93.",
    "collections.OrderedDict.fromkeys": b"\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.",
    "subprocess.Popen": b"(X\x04\x00\x00\x00trueisubprocess\nPopen\n.",
    "shutil.rmtree": b"(cshutil\nrmtree\nX\x01\x00\x00\x00xo.",
    "numpy.load": b"cnumpy\nload\n.",
    "functools.partial": b"cfunctools\npartial\n.",
    "copyreg.__newobj_ex__": b"ccopyreg\n__newobj_ex__\n.",
    "pickle.loads": b"cpickle\nloads\n.",
    "builtins.object.__subclasses__": b"\x8c\x08builtins\x8c\x15object.__subclasses__\x93.",
    r"a\n.b\ud800": b"\x8c\x02a\n\x8c\x04b\xed\xa0\x80\x93.",
}


def test_the_canaries_sing(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(sys.modules["posix"], "getpid", lambda: called.append(1))
    pickle.loads(HOSTILE["posix.getpid"])
    assert called == [1]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(name: str, canaries: None) -> None:
    error = refused(HOSTILE[name])
    assert f"refers to {name}, which is not supported" in str(error)
    refused(b"\x80\x04](" + HOSTILE[name][:-1] + b"e.", "which is not supported")


def test_a_name_is_refused_where_it_is_referenced(canaries: None) -> None:
    error = refused(b"\x80\x02](K\x01cposix\ngetpid\n0\xff\xff\xff")
    assert error.offset == 6 and "at byte 6" in str(error)


def test_known_names_are_not_called_through_others(canaries: None) -> None:
    refused(b"cbuiltins\nobject\n)R.", "a call of builtins.object")
    refused(b"cnumpy\nndarray\n(K\x05tR.", "a call of numpy.ndarray")
    refused(b"cbuiltins\nset\n)\x81.", "an instance of builtins.set")
    refused(b"K\x01)R.", "a int where only a name")
    refused(b"cbuiltins\nset\nK\x01R.", "a int where only a tuple")
    refused(b"X\x02\x00\x00\x00osK\x01\x93.", "a int where only a str")


def test_refused_opcodes(canaries: None) -> None:
    copyreg.add_extension("posix", "getpid", 0x7A)
    try:
        for code in (b"\x82\x7a", b"\x83\x7a\x00", b"\x84\x7a\x00\x00\x00"):
            refused(code + b")R.", "extension registry")
    finally:
        copyreg.remove_extension("posix", "getpid", 0x7A)
    refused(b"Pabc\n.", "persistent id")
    refused(b"K\x01Q.", "persistent id")
    refused(b"(X\x07\x00\x00\x00storageNNNNNtQ.", "persistent id")
    buffers: list[Any] = []
    payload = pickle.dumps(pickle.PickleBuffer(bytearray(5)), 5, buffer_callback=buffers.append)
    refused(payload, "a buffer that is not in the payload")
    refused(b"C\x01a\x98.", "a buffer that is not in the payload")
    for code in (b"S'a'\n", b"T\x01\x00\x00\x00a", b"U\x01a"):
        refused(code + b".", "Python 2 string")
    refused(b"\x80\x06N.", "protocol above 5")
    for number in range(256):
        if trxp._OPS[number] is trxp._OPS[0]:
            refused(bytes([number]), "unknown opcode" if number != 0x2E else "not exactly one")


def test_structure_errors() -> None:
    assert refused(pickle.dumps(1) + b"x", "1 bytes follow").offset == len(pickle.dumps(1))
    refused(b"", "ends early")
    refused(b".", "not exactly one")
    refused(b"NN.", "not exactly one")
    refused(b"(N.", "not exactly one")
    refused(b"t.", "no MARK")
    refused(b"(0t.", "no MARK")
    refused(b"K\x01(a.", "not enough values")
    refused(b"Ns.", "not enough values")
    refused(b"}(Nu.", "key without a value")
    refused(b"]NNs.", "a list where only a dict")
    refused(b"}Na.", "a dict where only a list")
    refused(b"](N\x90.", "a list where only a set")
    refused(b"h\x05.", "never stored")
    refused(b"q\x05.", "not enough values")
    refused(b"g-1\n.", "never stored")
    refused(b"gx\n.", "not a decimal integer")
    refused(b"I1_0\n.", "not a decimal integer")
    refused(b"I 1\n.", "not a decimal integer")
    refused(b"Fx\n.", "ValueError")
    refused(b"Vab", "inside a line")
    refused(b"V\\uZZZZ\n.", "UnicodeDecodeError")
    refused(b"X\x01\x00\x00\x00\xff.", "UnicodeDecodeError")
    refused(b"\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N.", "frame runs past the end")
    refused(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x95\x02\x00\x00\x00\x00\x00\x00\x00N.", "frame inside")
    assert load(b"N2\x86.") == (None, None) and load(b"N\x94h\x00\x86.") == (None, None)
    assert load(b"(K\x01K\x021K\x03.") == 3 and load(b"((K\x01t0K\x0200K\x03.") == 3


def test_prefixes() -> None:
    data = pickle.dumps([1, 2]) + pickle.dumps("x") + b"tail"
    value, end = trxp._load_prefix(data, 0, (), 64, None)
    assert value == [1, 2]
    value, end = trxp._load_prefix(data, end, (), 64, None)
    assert value == "x" and data[end:] == b"tail"
    framed = b"\x80\x04\x95\x04\x00\x00\x00\x00\x00\x00\x00N.N."
    with pytest.raises(UnpickleError, match="frame runs past STOP"):
        trxp._load_prefix(framed, 0, (), 64, None)


def test_lengths_and_indices_allocate_nothing() -> None:
    tracemalloc.start()
    try:
        assert load(b"Nr\xff\xff\xff\x7f.") is None
        assert load(b"Np99999999999999999999\n.") is None
        for size in (1 << 30, (1 << 63) - 1, (1 << 64) - 1):
            for code in (b"\x8d", b"\x8e", b"\x96", b"\x80\x05\x95"):
                refused(code + struct.pack("<Q", size) + b"abc.", "past the end")
        for size in (0x7FFFFFFF, 0xFFFFFFFF):
            for code in (b"X", b"B", b"\x8b"):
                refused(code + struct.pack("<I", size) + b"abc.", "past the end")
        for code in (b"\x8c\xff", b"C\xff", b"\x8a\xff", b"J\x00", b"G\x00", b"\x8d\x00", b"M", b"K"):
            refused(code, "past the end")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_long_decimal_text() -> None:
    assert load(b"I" + b"9" * 4300 + b"\n.") == 10**4300 - 1
    for code in (b"I", b"L"):
        refused(code + b"9" * 4301 + b"\n.", "too many digits")
        refused(code + b"9" * 10_000_000 + b"\n.", "too many digits")
    assert load(b"L-12L\n.") == -12
    huge = 1 << 1_000_000
    assert load(pickle.dumps(huge)) == huge


def test_deep_nesting() -> None:
    for depth in (64, 65, 100_000):
        for payload in (
            b"]" * depth + b"a" * (depth - 1) + b".",
            b")" + b"\x85" * (depth - 1) + b".",
            b"}" + b"K\x01}" * (depth - 1) + b"s" * (depth - 1) + b".",
            b"(" * depth + b"l" * depth + b".",
        ):
            if depth == 64:
                load(payload)
            else:
                refused(payload, "nested deeper than 64")
    assert load(b"N.", max_depth=0) is None
    refused(b"].", "nested deeper than 0", max_depth=0)
    assert load(b"]]a.", max_depth=2) == [[]]
    refused(b"]]a.", "nested deeper than 1", max_depth=1)
    refused(b"}" + b")" + b"\x85" * 100_000 + b"Ns.", "nested too deep", max_depth=10**9)
    shared = b"]" + b"]" * 40 + b"a" * 39 + b"\x94" + b"a" + b"]" * 30 + b"h\x00" + b"a" * 31 + b"."
    refused(shared, "nested deeper")  # 40 below 30, seen first where it is not too deep


def test_cycles() -> None:
    loop: list[Any] = []
    loop.append(loop)
    table: dict[str, Any] = {}
    table["self"] = [table]
    pair: tuple[Any, ...] = ([],)
    pair[0].append(pair)
    for value in (loop, table, pair, [[], [loop]]):
        for protocol in PROTOCOLS:
            refused(pickle.dumps(value, protocol), "contains itself")
    record = b"cm\nC\n)\x81\x94}X\x01\x00\x00\x00ah\x00sb."
    refused(record, "contains itself", records=[("m", "C")])


def test_dag_bombs() -> None:
    tuples = b")" + b"2\x86" * 50  # each a pair of the one before
    refused(tuples + b".", "counted each time")
    lists = b"]\x94" + b"".join(b"(h%bh%bl\x94" % (bytes([i]), bytes([i])) for i in range(50))
    refused(b"(" + lists + b"l.", "counted each time")
    refused(b"]" + tuples + b"a.", "counted each time")
    refused(b"}" + tuples + b"Ns.", "more work")  # hashed as a key
    refused(b"\x8f(" + tuples + b"\x90.", "more work")
    refused(b"(" + tuples + b"\x91.", "more work")
    wide = b"N"
    for _ in range(4):  # 1.5 million leaves in 150 bytes
        wide = b"(" + wide + b"2" * 34 + b"t"
    refused(b"}" + wide + b"Ns.", "more work")
    for large in (torch.zeros(1).expand(1 << 20), np.zeros(1 << 20), bytearray(1 << 20)):
        assert len(load(pickle.dumps([large] * 2))) == 2
        refused(pickle.dumps([large] * 2000), "counted each time")  # whoever copies the list copies each of them
    refused(b"cm\nC\n)\x81}X\x01\x00\x00\x00a" + tuples + b"sb.", "counted each time", records=[("m", "C")])
    ten = b"(" + b"]" * 9 + b"l."
    assert len(load(ten, max_items=10)) == 9
    refused(ten, "over 9 values", max_items=9)
    assert load(b"(" + b"N" * 300_000 + b"l.")[-1] is None  # large, but no larger than the payload says
    shared = pickle.dumps([["x"] * 100] * 500)
    assert len(load(shared)) == 500


def test_repeated_work_is_bounded() -> None:
    """What a few bytes ask for again and again, on a megabyte in the memo, does not go on for long."""
    large = text("a" * (1 << 20))
    blob = b"B" + large[1:]
    integer = b"\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20)
    members = b"(" + b"".join(b"J" + struct.pack("<i", i) for i in range(50_000)) + b"l"
    fields = b"(" + b"".join(text(f"{i:05}") + b"N" for i in range(50_000)) + b"d"
    stream = legacy(torch.zeros(1 << 18)._typed_storage())
    stream = b"B" + struct.pack("<I", len(stream)) + stream
    for name, *args in (
        ("_codecs.encode", large, text("latin1")),
        ("builtins.bytes", blob),
        ("builtins.bytearray", blob),
        ("builtins.set", members),
        ("builtins.frozenset", members),
        ("numpy._core.multiarray.scalar", ref("numpy.dtype") + text("S1048576") + b"\x85R", blob),
        ("torch.storage._load_from_bytes", stream),
    ):
        setup = put(ref(name)) + b"".join(put(arg) for arg in args)
        again = b"h\x00" + (b"h\x01\x85" if len(args) == 1 else b"h\x01h\x02\x86") + b"R0"
        refused(setup + again * 100_000 + b".", "more work")
    refused(put(fields) + ref("m.C") + b")\x81" + b"h\x00b" * 10_000 + b".", "more work", records=[("m", "C")])
    for key in (integer, large, blob):  # hashed, or compared with one that is equal, again and again
        setup = put(key) + put(key) + b"}"
        refused(setup + b"h\x00Nsh\x01Ns" * 100_000 + b".", "more work|of one hash")
    refused(b"\x8f" * 4_000_000 + b".", "more memory")  # an empty set is 200 times as large as its opcode


def test_chosen_hashes() -> None:
    prime = (1 << 61) - 1
    for keys in (
        [k * prime for k in range(1, 20_000)],
        [complex(1_000_003 * k, -k) for k in range(2, 20_000)],
        [(k * prime,) for k in range(1, 20_000)],
    ):
        assert len({hash(key) for key in keys}) == 1
        refused(pickle.dumps(Call(collections.OrderedDict, [(key, None) for key in keys])), "of one hash")
        refused(pickle.dumps(Call(set, keys)), "of one hash")
    numbers = list(range(70_000))
    refused(pickle.dumps(dict.fromkeys(numbers)), "keys that are not text")
    assert len(load(pickle.dumps({str(k): k for k in numbers}))) == len(numbers)
    assert len(load(pickle.dumps(dict.fromkeys(numbers[:60_000])))) == 60_000


def test_unhashable_keys() -> None:
    for key in (b"]", b"}", b"\x8f", b"(\x91", b"(]t", b"\x96" + bytes(8), b"cnumpy\nndarray\n"):
        refused(b"}" + key + b"Ns.", "a dict key or set member that is a")
        refused(b"(" + key + b"\x91.", "a dict key or set member that is a")


# --- Damage.


def samples() -> dict[str, bytes]:
    @dataclasses.dataclass
    class Thing:
        a: Any

    plain = {
        "a": [1, 2.5, None, True, -70_000, 1 << 70],
        "b": ("é", b"\xff", {1, 2}),
        (1, "k"): frozenset({3}),
    }
    payloads: dict[str, bytes] = {}
    with module("made", Thing=Thing):
        for protocol in PROTOCOLS:
            payloads[f"plain {protocol}"] = pickle.dumps(plain, protocol)
        arrays = [np.arange(3, dtype=">i2"), np.datetime64("2020-01-01")]
        for protocol in (0, 2, 5):
            payloads[f"array {protocol}"] = pickle.dumps(arrays, protocol)
        payloads["record 0"] = pickle.dumps(Thing([1, bytearray(b"x")]), 0)
        payloads["record 4"] = pickle.dumps(Thing({"x": 2j}), 4)
    payloads["tensor 2"] = pickle.dumps(torch.arange(4.0).view(2, 2).t(), 2)
    payloads["tensor 4"] = pickle.dumps([torch.ones(2, dtype=torch.bfloat16), torch.tensor(True)], 4)
    payloads["tensor 5"] = pickle.dumps(torch.zeros(2, 0, dtype=torch.uint16), 5)
    payloads["hostile"] = b"\x80\x04](N\x8c\x05posix\x8c\x06getpid\x93)Re."
    return payloads


SAMPLES = samples()
THING = [("made", "Thing")]


@pytest.mark.parametrize("name", SAMPLES)
def test_truncation_at_every_byte(name: str, canaries: None) -> None:
    payload = SAMPLES[name]
    if name != "hostile":
        assert not isinstance(attempt(payload, records=THING), UnpickleError)
    for end in range(len(payload)):
        refused(payload[:end], records=THING)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_bit_flipped(name: str, canaries: None) -> None:
    payload = bytearray(SAMPLES[name])
    for place in range(len(payload)):
        for bit in range(8):
            payload[place] ^= 1 << bit
            attempt(bytes(payload), records=THING)
            payload[place] ^= 1 << bit


FRAGMENTS = [
    *(bytes([code]) for code in range(256)),
    *(b"K\x01", b"X\x01\x00\x00\x00a", b"h\x00", b"q\x00", b"(K\x01K\x02t", b"I01\n", b"C\x04abcd"),
    *(HOSTILE[name][:-1] for name in ("posix.getpid", "os.system")),
    *(ref(".".join(pair)) for pair in trxp._CALLS),
    *(ref("torch.float32"), ref("made.Thing"), b")R", b"\x85R", b"\x86R", b"\x87R", b")\x81", b"}b"),
]


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40))
def test_opcode_soup(parts: list[bytes]) -> None:
    attempt(b"".join(parts) + b".", records=THING)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_spliced_payloads(name: str, data: st.DataObject) -> None:
    payload = SAMPLES[name]
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(payload))] * 2)))
    middle = data.draw(st.sampled_from(FRAGMENTS) | st.binary(max_size=9))
    attempt(payload[:start] + middle + payload[end:], records=THING)


# --- The module itself.


def run_python(code: str, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", code, trxp.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


LOAD_ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("alone", sys.argv[1])
alone = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(alone)
"""


def test_torch_is_imported_for_tensors_only() -> None:
    tensor = pickle.dumps(torch.arange(2))
    code = (
        LOAD_ALONE
        + f"""
assert alone.load({pickle.dumps([1, "x", np.arange(2)])!r})[:2] == [1, "x"]
before = "torch" in sys.modules
print(before, alone.load({tensor!r}).tolist(), "torch" in sys.modules)
"""
    )
    assert run_python(code) == "False [0, 1] True"


def test_a_missing_torch_is_an_unpickle_error() -> None:
    code = (
        LOAD_ALONE
        + f"""
sys.modules["torch"] = None
for payload in ({pickle.dumps(torch.arange(2))!r}, {pickle.dumps(torch.int8)!r}):
    try:
        alone.load(payload)
    except alone.UnpickleError as exc:
        print(exc)
"""
    )
    assert run_python(code).count("torch is not installed") == 2


def test_optimized_python_refuses_the_same() -> None:
    code = (
        LOAD_ALONE
        + f"""
for payload in {[HOSTILE["posix.getpid"], b"]]]aa.x", b")" + b"2" + bytes([0x86]) * 2, b"N" * 3 + b"."]!r}:
    try:
        print("loaded", alone.load(payload))
    except alone.UnpickleError as exc:
        print(exc)
"""
    )
    plain, optimized = run_python(code), run_python(code, "-O")
    assert plain == optimized and "loaded" not in plain and plain.count("\n") == 3


def test_errors_travel() -> None:
    error = pickle.loads(pickle.dumps(refused(b"NN.")))
    assert type(error) is UnpickleError and error.offset == 2 and isinstance(error, ValueError)


def test_speed() -> None:
    rows = [{"id": i, "text": f"row {i}", "values": [i, i + 0.5, None]} for i in range(25_000)]
    payload = pickle.dumps(rows, 4)
    began = time.perf_counter()
    assert load(payload) == rows
    assert time.perf_counter() - began < 5  # about 0.3 s on an idle core
