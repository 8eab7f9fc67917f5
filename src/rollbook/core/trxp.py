"""Formats of Trinity-RFT: TRXP 1, read and written, and pickles of earlier releases, read without executing them.

Invariant: reading executes nothing. The pickled part is read by `load`, which re-implements a few names; any other name
is a `WireError`. Writing keeps every field: those that Trinity does not have are under keys that it skips (unknown
columns of a newer Rollbook are not written).

Layout: `TRXP`, u8 version, u64 length of the pickled part, u64 length of the tensors, the pickle, a safetensors blob.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from rollbook.core import fields
from rollbook.core.errors import RollbookError, WireError
from rollbook.core.fields import FIELDS
from rollbook.core.ragged import tensor_bytes, tensor_from_bytes

if TYPE_CHECKING:
    from rollbook.core.experience import Experience
    from rollbook.core.wire import Limits


_MAX_INT_DIGITS = 4300  # digits: int() of decimal text takes quadratic time
_MAX_KEY_DEPTH = 64  # hash() of nested tuples recurses in C without a check
_SHORT_KEY = 256  # characters up to which hashing and comparing a str key is not worth accounting
_MAX_OTHER_KEYS = 1 << 16  # keys that are not text in one dict or set: the writer can choose their hashes, and
_MAX_EQUAL_HASHES = 64  # filling a table with chosen hashes takes quadratic time, the more so if they are equal
_SMALL_INT = (1 << 61) - 1  # ints below this are their own hash
_MAX_OPEN_CONTAINERS = 200_000
_CONTAINER_COST = 96
_VALUE_BYTES = 128  # of an array, that count as one value
_ITEM_COST, _OBJECT_COST, _TENSOR_COST = 32, 256, 1024  # bytes, or about as much work
_TORCH_STREAM = (0x1950A86A20F9469CFC6C, 1001)  # magic number and version of torch's legacy format
# fmt: off
_WIDTHS = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8,
    "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8,
    "complex128": 16, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
_STORAGES = {("torch.storage", "UntypedStorage"): "uint8"} | {("torch", f"{k}Storage"): v for k, v in {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "Untyped": "uint8",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}.items()}
# fmt: on
_NUMPY_TYPE = re.compile(r"b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SU][0-9]{1,9}|[Mm]8")
_TIME_UNITS = {"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"}
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})


class UnpickleError(RollbookError, ValueError):
    """Raised when bytes are not a supported pickle.

    Args:
        message: What is wrong.
        offset: Byte offset of the error.
    """

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(frozen=True)
class Record:
    """An instance in a pickle of a class that the caller listed. The class itself is never imported.

    Attributes:
        module: Module of the class.
        name: Name of the class.
        state: Attributes of the instance.

    >>> data = b"\\x80\\x04cthings\\nThing\\n)\\x81}X\\x01\\x00\\x00\\x00aK\\x01sb."
    >>> load(data, records=[("things", "Thing")])
    Record(module='things', name='Thing', state={'a': 1})
    """

    module: str
    name: str
    state: dict[str, Any]


@dataclass
class _Budget:
    """Memory in bytes, and work, that a payload may still use."""

    memory: int
    work: int

    @classmethod
    def for_size(cls, size: int) -> _Budget:
        # A container takes 50 times the memory of the byte that creates it, so memory has a large base. A payload of a
        # kilobyte needs no more work than about 16,000 visits of an item.
        return cls(memory=(1 << 26) + 16 * size, work=(1 << 19) + 32 * size)


Pickled: TypeAlias = Any
"""A value of a pickle, of any type until the machine has checked it."""


@dataclass(eq=False)
class _Internal:
    """A value that exists only inside the machine, and is an error in the result."""

    kind: str
    value: Pickled = None  # name: the pair; dtype: so far; array: None before BUILD; storage: the torch object
    dtype: str = ""  # of a storage, and its bytes:
    raw: bytes = b""


class _Machine:
    """A pickle machine that supports only the opcodes and names below."""

    def __init__(self, data: bytes, pos: int, records: frozenset[tuple[str, str]], budget: _Budget) -> None:
        self.data, self.pos, self.records = data, pos, records
        self.at = self.frame_end = pos  # at: where the opcode that is being executed begins
        self.budget = budget  # shared with the machines that read nested torch storages
        self.nested = False  # in a nested storage only storage classes may be named
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # one suspended stack for each open MARK
        self.memo: dict[int, Any] = {}  # a dict, so that a large index costs nothing
        # By id, each dict or set (kept alive, so that its id is not reused) and the count of each key hash.
        self.hashes: dict[int, tuple[Any, dict[int, int]]] = {}

    def run(self) -> Any:
        """Execute up to and including STOP, and return the value that is left."""
        data, ops = self.data, _OPS
        try:
            while True:
                at = self.at = self.pos
                op = data[at]
                self.pos = at + 1
                if op == 0x2E:  # STOP
                    break
                pushed = ops[op](self)
                if pushed is not None:  # an opcode that may push None does so itself
                    self.stack.append(pushed)
            self.need(self.frame_end <= self.pos, "a frame runs past STOP")
            self.need(not self.below and len(self.stack) == 1, "not exactly one value is left at STOP")
            return self.stack.pop()
        except UnpickleError:
            raise
        except IndexError:
            self.fail("not enough values on the stack" if self.pos < len(data) else "the data ends early")
        except ImportError:
            self.fail("the payload has a torch value, and torch is not installed")
        except Exception as exc:  # Python, numpy and torch raise many types for invalid arguments
            self.fail(f"malformed pickle: {type(exc).__name__}: {_escape(str(exc))}")

    def fail(self, message: str) -> NoReturn:
        raise UnpickleError(f"{message} (at byte {self.at})", self.at) from None

    def need(self, holds: bool, message: str) -> None:
        if not holds:
            self.fail(message)

    def exact(self, value: Pickled, *kinds: type) -> Any:
        if type(value) not in kinds:
            self.fail(f"a {_describe(value)} where only a {kinds[0].__name__} can be")
        return value

    def internal(self, value: Pickled, kind: str) -> Any:
        if type(value) is not _Internal or value.kind != kind:
            self.fail(f"a {_describe(value)} where only a {kind} can be")
        return value

    def charge_work(self, cost: int) -> None:
        """Deduct work that repeats parts of the payload from the budget, and the memory of its result."""
        self.budget.work -= cost
        self.need(self.budget.work >= 0, "the payload needs far more work than its size justifies")
        self.charge_memory(cost)

    def charge_memory(self, cost: int) -> None:
        """Deduct bytes from the memory budget."""
        self.budget.memory -= cost
        self.need(self.budget.memory >= 0, "the payload needs far more memory than its size justifies")

    # Bytes, stack and memo.

    def take(self, size: int) -> bytes:
        start, self.pos = self.pos, self.pos + size
        self.need(self.pos <= len(self.data), "a value or its length runs past the end of the data")
        return self.data[start : self.pos]

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.pos)
        self.need(end >= 0, "the data ends inside a line")
        return self.take(end + 1 - self.pos)[:-1]

    def digits(self) -> int:
        text = self.line().removesuffix(b"L")
        if text in (b"00", b"01"):  # how protocols 0 and 1 write bools
            return text == b"01"
        self.need(len(text) <= _MAX_INT_DIGITS, "an integer of too many digits")
        self.need(re.fullmatch(rb"-?[0-9]+", text) is not None, "text that is not a decimal integer")
        return int(text)

    def count(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little") if size else self.digits()

    def frame(self) -> None:
        self.need(self.at >= self.frame_end, "a frame inside a frame")
        size = self.count(8)
        self.frame_end = self.pos + size
        self.need(self.frame_end <= len(self.data), "a frame runs past the end of the data")

    def mark(self) -> None:
        # One per open container: more than the nesting of a value would only take memory.
        self.need(len(self.below) < _MAX_OPEN_CONTAINERS, "more containers are open than can be nested")
        self.below.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        self.need(bool(self.below), "no MARK on the stack")
        items, self.stack = self.stack, self.below.pop()
        return items

    def pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        self.need(len(items) == count, "not enough values on the stack")
        del self.stack[-count:]
        return items

    def new_container(self, container: Pickled) -> Any:
        """Charge a new container, which takes far more memory than the byte that created it, and return it."""
        self.charge_memory(_CONTAINER_COST)
        return container

    def put(self, index: int) -> None:
        self.charge_memory(_CONTAINER_COST)
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.need(index in self.memo, "a memo entry that was never stored")
        entry = self.memo[index]
        finished = type(entry) is _Internal and entry.kind == "numpy array" and entry.value is not None
        self.stack.append(entry.value if finished else entry)

    # Lists, dicts and sets: the container is new, or on top of the stack.

    def append(self, items: list[Any]) -> None:
        self.exact(self.stack[-1], list).extend(items)

    def fill(self, items: list[Any], *new: Pickled) -> Any:
        holder = self.exact(*(new or self.pop(1)), dict)
        self.need(len(items) % 2 == 0, "a dict key without a value")
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str or len(key) > _SHORT_KEY:
                self.check_key(holder, key)
            holder[key] = items[i + 1]
        return holder

    def gather(self, members: list[Any], *new: Pickled) -> Any:
        self.charge_memory(_OBJECT_COST * len(new))  # a set takes that, and one byte of payload makes one
        holder = self.exact(*(new or self.pop(1)), set)
        for member in members:
            if type(member) is not str or len(member) > _SHORT_KEY:
                self.check_key(holder, member)
            holder.add(member)
        return holder

    def check_key(self, holder: dict[Any, Any] | set[Any], key: Pickled) -> None:
        """Reject a key or member that is not a scalar or a tuple of scalars, or is costly to hash."""
        todo = [(key, 0)]
        while todo:
            key_part, depth = todo.pop()
            kind = type(key_part)
            if kind is tuple:
                self.need(depth < _MAX_KEY_DEPTH, "a dict key or set member is nested too deep")
                self.charge_work(_ITEM_COST * (1 + len(key_part)))
                todo.extend((entry, depth + 1) for entry in key_part)
            elif kind is int:
                self.charge_work(key_part.bit_length() >> 3)
            elif isinstance(key_part, (str, bytes, np.generic)):
                self.charge_work(key_part.nbytes if isinstance(key_part, np.generic) else len(key_part))
            elif kind not in _SCALARS:
                self.fail(f"a dict key or set member that is a {_describe(key_part)}")
        if isinstance(key, (str, bytes)):
            return
        self.need(len(holder) < _MAX_OTHER_KEYS, f"over {_MAX_OTHER_KEYS} keys that are not text in one dict or set")
        if type(key) is not float and not (type(key) is int and abs(key) < _SMALL_INT):
            _, seen = self.hashes.setdefault(id(holder), (holder, {}))
            count = seen[hash(key)] = seen.get(hash(key), 0) + 1
            self.need(count <= _MAX_EQUAL_HASHES, "too many keys of one hash in one dict or set")

    # Names, calls and instances.

    def name(self, module: Pickled, name: Pickled) -> Any:
        pair = (self.exact(module, str), self.exact(name, str))
        if pair in _STORAGES if self.nested else (pair in self.records or pair in _CALLS):
            return _Internal("name", pair)
        if module == "torch" and name in _WIDTHS and not self.nested:
            return self.torch_dtype(name)
        return self.fail(f"the payload refers to {_escape(module)}.{_escape(name)}, which is not supported")

    def call(self, function: Pickled, *args: Pickled) -> Any:
        pair = self.internal(function, "name").value
        self.charge_work(_ITEM_COST * len(args))
        if pair in self.records:
            if len(args) == 1 and type(args[0]) is str:
                return Record(pair[0], pair[1], {"value": args[0]})  # a member of an enum, as pickle writes it
            return self.instance(function, *args)
        action = _CALLS.get(pair)
        return action(self, *args) if action else self.fail(f"a call of {'.'.join(pair)}")

    def reduce(self, function: Pickled, args: Pickled) -> Any:
        return self.call(function, *self.exact(args, tuple))

    def new(self, cls: Pickled, args: Pickled, options: Pickled = ()) -> Record:
        return self.instance(cls, *self.exact(args, tuple), *self.exact(options, dict, tuple))

    def instance(self, cls: Pickled, *args: Pickled) -> Record:
        pair = self.internal(cls, "name").value
        self.need(pair in self.records, f"an instance of {'.'.join(pair)}")
        self.need(not args, f"an instance of {'.'.join(pair)} made with arguments: only its state is read")
        return Record(pair[0], pair[1], {})

    def build(self, instance: Pickled, state: Pickled) -> Any:
        if type(instance) is Record:
            for state_part in state if type(state) is tuple and len(state) == 2 else (state,):
                state_part = self.exact(state_part, dict, type(None)) or {}
                self.charge_work(_ITEM_COST * len(state_part))
                self.need(all(type(key) is str for key in state_part), "a field whose name is not text")
                instance.state.update(state_part)
            return instance
        if type(instance) is _Internal and instance.kind == "numpy dtype":
            return self.build_dtype(instance, self.exact(state, tuple))
        self.need(self.internal(instance, "numpy array").value is None, "a numpy array that is built twice")
        version, shape, dtype, fortran, raw = state
        self.need(self.exact(version, int) == 1, "a numpy array of an unknown version")
        instance.value = self.array(raw, dtype, shape, "F" if self.exact(fortran, bool, int) else "C")
        return instance.value

    def reconstructor(self, cls: Pickled, base: Pickled, state: Pickled) -> Record:
        plain = self.internal(base, "name").value[1] == "object" and state is None
        self.need(plain, "copyreg._reconstructor for a class that derives from more than object")
        return self.instance(cls)

    # Builtins, as protocols 0 to 2 write them.

    def encode(self, text: Pickled, encoding: Pickled) -> bytes:
        self.need(self.exact(encoding, str) in ("latin1", "latin-1"), "_codecs.encode to other than latin1")
        self.charge_work(_ITEM_COST + len(self.exact(text, str)))
        return str(text).encode("latin-1")

    def read_bytes(self, source: Pickled = b"", *encoding: Pickled) -> bytes | bytearray:
        # Never a number, which would be a size to allocate.
        raw: bytes = self.exact(self.encode(source, *encoding) if encoding else source, bytes, bytearray)
        self.charge_work(_ITEM_COST + len(raw))
        return raw

    def items(self, values: Pickled = ()) -> list[Any]:
        self.charge_work(_ITEM_COST * len(self.exact(values, list, tuple)))
        return list(values)

    def pairs(self, values: Pickled = ()) -> list[Any]:
        pairs = [self.exact(pair, tuple, list) for pair in self.items(values)]
        self.need(all(len(pair) == 2 for pair in pairs), "a dict not made of pairs")
        return list(chain.from_iterable(pairs))

    # numpy.

    def dtype(self, code: Pickled, *_: Pickled) -> _Internal:
        plain = _NUMPY_TYPE.fullmatch(self.exact(code, str))
        self.need(bool(plain), "a numpy dtype other than plain numbers, bool, text, bytes and times")
        return _Internal("numpy dtype", np.dtype(code))

    def build_dtype(self, dtype: Pickled, state: tuple[Any, ...]) -> Any:
        _, order, subtype, names, fields, _, _, _, more = state if len(state) == 9 else (*state[:9], None)
        self.need(subtype is None and names is None and fields is None, "a structured numpy dtype")
        if dtype.value.kind in "Mm":
            _, (unit, number, divisor, _) = more
            unit = unit.decode("ascii") if type(unit) is bytes else self.exact(unit, str)
            is_unit = unit in _TIME_UNITS and 0 < self.exact(number, int) < 1 << 31
            self.need(is_unit and self.exact(divisor, int) == 1, "a numpy time of unknown unit")
            dtype.value = np.dtype(dtype.value.kind + ("8" if unit == "generic" else f"8[{number}{unit}]"))
        self.need(self.exact(order, str) in ("<", ">", "|", "="), "a numpy dtype of unknown byte order")
        dtype.value = np.dtype(dtype.value.newbyteorder(order).str)  # by way of str, "<" is "=" where it can be
        return dtype

    def sizes(self, values: Pickled) -> tuple[int, ...]:
        self.need(len(self.exact(values, tuple, list)) <= 64, "a shape of too many dimensions")
        self.need(all(0 <= self.exact(size, int) < 1 << 63 for size in values), "a size below 0 or huge")
        return tuple(values)

    def array(self, raw: Pickled, dtype: Pickled, shape: Pickled, order: Pickled = "C", axes: Pickled = None) -> Any:
        plain, shape = self.internal(dtype, "numpy dtype").value, self.sizes(shape)
        have = len(self.exact(raw, bytes, bytearray))
        self.need(prod(shape) * plain.itemsize == have, f"a numpy array whose shape is not for {have} bytes")
        # Dimensions beside a zero take no bytes, but iterating over them takes time.
        self.charge_work(_OBJECT_COST + have + prod(size or 1 for size in shape))
        self.need(plain.kind != "b" or not raw.translate(None, b"\0\1"), "a numpy bool not 0 or 1")
        if plain.kind == "U" and raw:
            self.need(np.frombuffer(raw, plain.str[0] + "u4").max() <= 0x10FFFF, "numpy text not of Unicode")
        if axes is not None:  # order is "K": the array is a transposition of one in C order
            return np.ndarray(shape, plain, raw).copy().transpose(self.sizes(axes))
        self.need(self.exact(order, str) in ("C", "F"), "a numpy array of unknown order")
        return np.ndarray(shape, plain, raw, order=order).copy(order)

    def reconstruct(self, cls: Pickled, _shape: Pickled, _code: Pickled) -> _Internal:
        self.need(self.internal(cls, "name").value == ("numpy", "ndarray"), "an array not of numpy.ndarray")
        return _Internal("numpy array")

    # torch.

    def torch_dtype(self, name: str) -> Any:
        import torch

        self.need(hasattr(torch, name), f"this torch has no torch.{name}")
        return getattr(torch, name)

    def persistent(self, pid: Pickled) -> _Internal:
        self.need(self.nested, "a persistent id, which is not supported")
        kind, cls, key, _location, count, view = self.exact(pid, tuple)
        self.need(self.exact(kind, str) == "storage" and view is None, "a persistent id of no plain storage")
        dtype = _STORAGES[self.internal(cls, "name").value]
        return _Internal("torch storage", (self.exact(key, str), *self.sizes((count,))), dtype)

    def storage(self, stream: Pickled) -> Any:
        """Read torch's legacy stream; a pickled tensor has exactly one storage in it."""
        zipped = self.exact(stream, bytes, bytearray)[:2] == b"PK"
        self.need(not zipped, "a torch storage in zip format, which is not supported")
        self.charge_work(_TENSOR_COST + 2 * len(stream))
        stream, pos, parts = bytes(stream), 0, []
        for _ in range(5):
            inner = _Machine(stream, pos, frozenset(), self.budget)
            inner.nested = True
            try:
                parts.append(inner.run())
            except UnpickleError as exc:
                self.fail(f"in a torch storage: {exc}")
            self.charge_work(8 * (inner.pos - pos))
            pos = inner.pos
        magic, version, _, storage, keys = parts
        good = (self.exact(magic, int), self.exact(version, int)) == _TORCH_STREAM
        self.need(good, "a torch storage of the wrong magic number or version")
        key, count = self.internal(storage, "torch storage").value
        good = len(self.exact(keys, list)) == 1 and self.exact(keys[0], str) == key
        self.need(good, "torch data that is not exactly one storage")
        storage.value, storage.raw = None, stream[pos + 8 :]
        good = int.from_bytes(stream[pos : pos + 8], "little") == count
        good = good and count * _WIDTHS[storage.dtype] == len(storage.raw)
        self.need(good, f"a torch storage of {len(storage.raw)} bytes cannot be {count} {storage.dtype}")
        return storage

    def tensor(
        self, storage: Pickled, offset: Pickled, size: Pickled, stride: Pickled, dtype: Pickled, meta: Pickled = None
    ) -> Any:
        import torch

        name, raw = self.internal(storage, "torch storage").dtype, storage.raw
        name = name if dtype is None else str(self.exact(dtype, torch.dtype)).removeprefix("torch.")
        size, stride, (offset,) = self.sizes(size), self.sizes(stride), self.sizes((offset,))
        self.need(len(size) == len(stride), "a torch tensor whose shape and stride differ in length")
        width, empty, span = _WIDTHS[name], 0 in size, prod(n or 1 for n in size)
        have = len(raw) // width
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        self.need(empty or last < have, f"a torch tensor that reaches past the {have} values it has")
        # Strides of 0, and dimensions beside a 0, take no bytes, but copying the tensor does.
        self.charge_memory(max(0, span - have) * width)
        self.charge_work(_TENSOR_COST + (len(raw) if name == "bool" else 0))
        self.need(name != "bool" or not raw.translate(None, b"\0\1"), "a torch bool not 0 or 1")
        if storage.value is None:  # made once, so that aliased tensors stay aliased
            make: Pickled = torch.UntypedStorage
            storage.value = make.from_buffer(raw, dtype=torch.uint8) if raw else make(0, device="cpu")
        tensor = torch.empty(0, dtype=self.torch_dtype(name), device="cpu")
        tensor.set_(storage.value, 0 if empty else offset, size, stride)
        if meta:  # the storage has the conjugate, or the negative, of the values
            self.need(self.exact(meta, dict).keys() <= {"conj", "neg"}, "unknown torch tensor metadata")
            self.charge_memory(2 * span * width)
            tensor = tensor.conj().resolve_conj() if meta.get("conj") else tensor
            tensor = tensor.neg() if meta.get("neg") else tensor
        return tensor

    def parameter(self, tensor: Pickled, _grad: Pickled, _hooks: Pickled) -> Any:
        import torch

        return self.exact(tensor, torch.Tensor)

    def children(self, node: Pickled) -> Any:
        kind = type(node)
        if kind is _Internal:
            self.fail(f"a {_describe(node)} in the result, which is not a plain value")
        if kind is dict or kind is Record:
            node = node.state if kind is Record else node
            return chain(node, node.values())
        return node if kind in (list, tuple, set, frozenset) else None

    def check(self, root: Pickled, max_depth: int, max_items: int) -> None:
        """Reject a result with a cycle, too much nesting, too many values, or values that are not plain.

        Shared values, and the bytes of tensors, arrays and bytearrays, count each time, as in a copy of the tree.
        """
        seen: dict[int, Any] = {}  # by id: nodes and height of a value; None from entering to leaving it
        todo = [(root, False)]
        while todo:
            node, leaving = todo.pop()
            if not leaving and id(node) in seen:
                self.need(seen[id(node)] is not None, "a value that contains itself")
                continue
            children, height = self.children(node), 0
            nodes = 1 + (len(node) if type(node) is bytearray else getattr(node, "nbytes", 0)) // _VALUE_BYTES
            if children is not None and not leaving:
                seen[id(node)] = None
                todo.append((node, True))
                todo.extend((child, False) for child in children if type(child) not in _SCALARS)
                continue
            for child in children or ():
                below = (1, 0) if type(child) in _SCALARS else seen[id(child)]
                nodes, height = nodes + below[0], max(height, below[1])
            height += children is not None
            seen[id(node)] = (nodes, height)
            self.need(height <= max_depth, f"values nested deeper than {max_depth}")
            self.need(nodes <= max_items, f"over {max_items} values, with shared ones counted each time")


def _escape(text: str) -> str:
    return ascii(text[:200])[1:-1]


def _describe(thing: Pickled) -> str:
    if type(thing) is not _Internal:
        return type(thing).__name__
    return f"reference to {'.'.join(thing.value)}" if thing.kind == "name" else thing.kind


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


_MULTIARRAY = "numpy.core.multiarray numpy._core.multiarray"  # the old spelling and the new
_CALLS: dict[tuple[str, str], Callable[..., Any] | None] = {
    (module, name): action
    for modules, name, action in (
        ("builtins __builtin__", "object", None),  # None: may be named, not called
        ("builtins __builtin__", "bytes", lambda m, *args: bytes(m.read_bytes(*args))),
        ("builtins __builtin__", "bytearray", lambda m, *args: bytearray(m.read_bytes(*args))),
        ("builtins __builtin__", "complex", lambda m, *args: complex(*(m.exact(x, float) for x in args))),
        ("builtins __builtin__", "set", lambda m, *args: m.gather(m.items(*args), set())),
        ("builtins __builtin__", "frozenset", lambda m, *args: frozenset(m.gather(m.items(*args), set()))),
        ("collections", "OrderedDict", lambda m, *args: m.fill(m.pairs(*args), {})),
        ("copyreg copy_reg", "_reconstructor", _Machine.reconstructor),
        ("copyreg copy_reg", "__newobj__", _Machine.instance),
        ("_codecs", "encode", _Machine.encode),
        ("numpy", "ndarray", None),
        ("numpy", "dtype", _Machine.dtype),
        (_MULTIARRAY, "_reconstruct", _Machine.reconstruct),
        (_MULTIARRAY, "scalar", lambda m, kind, raw: m.array(raw, kind, ())[()]),
        ("numpy.core.numeric numpy._core.numeric", "_frombuffer", _Machine.array),
        ("torch.storage", "_load_from_bytes", _Machine.storage),
        ("torch._utils", "_rebuild_tensor", lambda m, *args: m.tensor(*args, None)),
        ("torch._utils", "_rebuild_tensor_v2", lambda m, *args: m.tensor(*args[:4], None, *args[6:])),
        ("torch._utils", "_rebuild_tensor_v3", lambda m, *args: m.tensor(*args[:4], *args[6:])),
        ("torch._utils", "_rebuild_parameter", _Machine.parameter),
    )
    for module in modules.split()
}
_REJECTED_OPCODES = {
    b"P": "a persistent id",
    b"STU": "a Python 2 string",
    b"\x82\x83\x84": "a name by its number in copyreg's extension registry",
    b"\x97\x98": "a buffer that is not in the payload",
}
# An opcode gives the value it pushes, or None.
# fmt: off
_BY_CODE: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.need(m.count(1) <= 5, "a pickle protocol above 5"),
    b"\x95": _Machine.frame,
    b"(": _Machine.mark,
    b"0": lambda m: (m.pop(1) if m.stack else m.to_mark()).clear(),
    b"1": lambda m: m.to_mark().clear(),
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: True, b"\x89": lambda m: False,
    b"I": _Machine.digits, b"L": _Machine.digits, b"F": lambda m: float(m.line()),
    b"K": lambda m: m.count(1), b"M": lambda m: m.count(2), b"J": lambda m: _signed(m.take(4)),
    b"\x8a": lambda m: _signed(m.take(m.count(1))), b"\x8b": lambda m: _signed(m.take(m.count(4))),
    b"G": lambda m: struct.unpack(">d", m.take(8))[0], b"V": lambda m: m.line().decode("raw-unicode-escape"),
    b"\x8c": lambda m: _text(m.take(m.count(1))), b"X": lambda m: _text(m.take(m.count(4))),
    b"\x8d": lambda m: _text(m.take(m.count(8))),
    b"C": lambda m: m.take(m.count(1)), b"B": lambda m: m.take(m.count(4)),
    b"\x8e": lambda m: m.take(m.count(8)), b"\x96": lambda m: bytearray(m.take(m.count(8))),
    b"]": lambda m: m.new_container([]), b"}": lambda m: m.new_container({}), b")": lambda m: (),
    b"\x8f": lambda m: m.gather([], set()),
    b"l": lambda m: m.new_container(m.to_mark()), b"d": lambda m: m.new_container(m.fill(m.to_mark(), {})),
    b"t": lambda m: m.new_container(tuple(m.to_mark())), b"\x85": lambda m: m.new_container(tuple(m.pop(1))),
    b"\x86": lambda m: m.new_container(tuple(m.pop(2))), b"\x87": lambda m: m.new_container(tuple(m.pop(3))),
    b"\x91": lambda m: frozenset(m.gather(m.to_mark(), set())), b"\x90": lambda m: m.gather(m.to_mark()),
    b"a": lambda m: m.append(m.pop(1)), b"e": lambda m: m.append(m.to_mark()),
    b"s": lambda m: m.fill(m.pop(2)), b"u": lambda m: m.fill(m.to_mark()),
    b"p": lambda m: m.put(m.count(0)), b"q": lambda m: m.put(m.count(1)), b"r": lambda m: m.put(m.count(4)),
    b"g": lambda m: m.get(m.count(0)), b"h": lambda m: m.get(m.count(1)), b"j": lambda m: m.get(m.count(4)),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"c": lambda m: m.name(_text(m.line()), _text(m.line())), b"\x93": lambda m: m.name(*m.pop(2)),
    b"R": lambda m: m.reduce(*m.pop(2)), b"o": lambda m: m.call(*m.to_mark()),
    b"i": lambda m: m.call(m.name(_text(m.line()), _text(m.line())), *m.to_mark()),
    b"\x81": lambda m: m.new(*m.pop(2)), b"\x92": lambda m: m.new(*m.pop(3)),
    b"b": lambda m: m.build(*m.pop(2)), b"Q": lambda m: m.persistent(*m.pop(1)),
}
# fmt: on
_OPS: list[Callable[[_Machine], Any]] = [lambda m: m.fail(f"unknown opcode 0x{m.data[m.at]:02x}")] * 256
for _code, _action in _BY_CODE.items():
    _OPS[_code[0]] = _action
for _codes, _words in _REJECTED_OPCODES.items():
    for _number in _codes:
        _OPS[_number] = partial(_Machine.fail, message=f"{_words}, which is not supported")


def _load_prefix(
    data: bytes, offset: int, records: Collection[tuple[str, str]], max_depth: int, max_items: int | None
) -> tuple[Any, int]:
    """Read the pickle at `offset`; return its value and its end."""
    size = len(data) - offset
    machine = _Machine(data, offset, frozenset(records), _Budget.for_size(size))
    loaded = machine.run()
    machine.check(loaded, max_depth, max(100_000, size) if max_items is None else max_items)
    return loaded, machine.pos


def load(
    data: bytes | bytearray | memoryview,
    *,
    records: Collection[tuple[str, str]] = (),
    max_depth: int = 64,
    max_items: int | None = None,
) -> Any:
    """Read one pickle without executing it.

    Args:
        data: Bytes of the pickle, and nothing else.
        records: Classes whose instances are read, as pairs of module and qualified name.
        max_depth: Largest nesting of values.
        max_items: Largest number of values, shared ones counted each time; by default the size of the payload.

    Returns:
        None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, numpy scalars and
        arrays, torch tensors (on the CPU) and dtypes, and a `Record` for each instance of a class in `records`.

    Raises:
        UnpickleError: The pickle is corrupt, refers to anything else, or exceeds the limits.

    >>> load(pickle.dumps({"a": [1, 2]}))
    {'a': [1, 2]}
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"pickle data is bytes, not {type(data).__name__}")
    data = bytes(data)
    loaded, end = _load_prefix(data, 0, records, max_depth, max_items)
    if end != len(data):
        raise UnpickleError(f"{len(data) - end} bytes follow the end of the pickle (at byte {end})", end)
    return loaded


MAGIC = b"TRXP"
_HEADER = struct.Struct("<4sBQQ")
HEADER_BYTES = _HEADER.size
_MODULE = "trinity.common.experience"
_RECORDS = [(_MODULE, name) for name in ("Experience", "EID", "CustomField", "ExperienceType")]
EXTRA = "rollbook"
"""Key of an item for fields that Trinity does not have; its reader skips unknown keys."""

_META = [
    "reward",
    "truncate_status",
    "info",
    "metrics",
    "prompt_length",
    "response_text",
    "prompt_text",
    "messages",
    "tools",
    "chosen_messages",
    "rejected_messages",
]
_SAFETENSORS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
_SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS.items()}


# --- reading ------------------------------------------------------------------------------------------------------


def read(view: memoryview, limits: Limits) -> list[Experience]:
    """Read the records of a TRXP payload or of a legacy pickle."""
    try:
        if bytes(view[:4]) != MAGIC:
            return _read_pickle(view, limits)
        return [_from_item(item, tensors, i) for i, (item, tensors) in enumerate(split_payload(view, limits))]
    except WireError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A pickle can have values of any type anywhere.
        raise WireError(f"the payload is not a valid record: {type(error).__name__}: {error}") from None


def read_any(data: bytes | bytearray | memoryview, limits: Limits | None = None) -> list[Experience]:
    """Read the records of frames, of a TRXP payload or of a legacy pickle. They share no memory with `data`."""
    from rollbook.core import wire

    limits = wire.DEFAULT_LIMITS if limits is None else limits
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise ValueError(f"data: got {type(data).__name__}, expected bytes") from None
    if bytes(view[:4]) == wire.MAGIC[:4]:
        return wire.decode(view, limits=limits).rows()
    return read(view, limits)


def _read_pickle(view: memoryview, limits: Limits) -> list[Experience]:
    if not len(view):
        raise WireError("there are no bytes", 0)
    if len(view) > limits.max_bytes:
        raise WireError(f"{len(view)} bytes are over the limit of {limits.max_bytes}", 0)
    if bytes(view[:1]) not in (b"\x80", b"(", b"]", b"c"):
        magic = bytes(view[:8])
        raise WireError(f"bad magic {magic!r}: not a Rollbook frame (a frame begins with b'\\x8dROLLBK\\n')", 0)
    loaded = _unpickled(view, 0, limits)
    items = loaded if isinstance(loaded, list) else [loaded]
    return [_from_pickled(entry, i) for i, entry in enumerate(items)]


def _unpickled(view: memoryview, start: int, limits: Limits) -> Any:
    try:
        return load(view, records=_RECORDS, max_depth=limits.max_depth)
    except UnpickleError as error:
        # Convert the offset in the pickle to one in the payload.
        raise WireError(f"the pickled part: {error}", start + (error.offset or 0)) from None


def payload_size(head: bytes) -> int:
    """Return the size in bytes of the payload that begins with this header."""
    if head[:4] != MAGIC or len(head) < HEADER_BYTES:
        raise WireError(f"{head[:4]!r} is not a TRXP header", 0)
    _, _, meta_length, tensor_length = _HEADER.unpack_from(head)
    return int(HEADER_BYTES + meta_length + tensor_length)


class StoredTensor(NamedTuple):
    """A tensor in a payload: its element type (`None` if unknown), its shape and its bytes, which may not match."""

    dtype: str | None
    shape: Any
    data: memoryview


def split_payload(view: memoryview, limits: Limits) -> list[tuple[dict[str, Any], dict[str, StoredTensor]]]:
    """Return the items of a TRXP payload, each with its tensors by name.

    Raises:
        WireError: The payload is damaged or exceeds the limits.
    """
    if len(view) < HEADER_BYTES:
        raise WireError(f"the TRXP header is cut short: {len(view)} of {HEADER_BYTES} bytes", len(view))
    _, version, meta_length, tensor_length = _HEADER.unpack_from(view)
    if version != 1:
        raise WireError(f"TRXP version {version}; this reader supports 1", 4)
    total = HEADER_BYTES + meta_length + tensor_length
    if total > limits.max_bytes:
        raise WireError(f"{total} bytes are over the limit of {limits.max_bytes}", 5)
    if total != len(view):
        excess = "are missing" if total > len(view) else "follow the payload"
        raise WireError(f"{abs(total - len(view))} bytes {excess}", min(total, len(view)))
    split = HEADER_BYTES + meta_length
    meta = _unpickled(view[HEADER_BYTES:split], HEADER_BYTES, limits)
    if not isinstance(meta, dict) or not isinstance(meta.get("items"), list):
        raise WireError("the pickled part has no list of items", HEADER_BYTES)
    items = meta["items"]
    count = meta.get("num_items")
    if type(count) is not int or count != len(items) or count > limits.max_items:
        raise WireError(f"num_items is {count!r}, but there are {len(items)} items", HEADER_BYTES)
    for i, entry in enumerate(items):
        if not isinstance(entry, dict):
            raise WireError(f"item {i}: got {type(entry).__name__}, expected a dict")
    pairs: list[tuple[dict[str, Any], dict[str, StoredTensor]]] = [(entry, {}) for entry in items]
    for key, tensor in _read_safetensors(view[split:], split).items():
        index, _, name = key.partition(":")
        if not index.isdecimal() or len(index) > 9 or int(index) >= len(items) or not name:
            raise WireError(f"tensor {key!r} belongs to none of the {len(items)} items", split)
        pairs[int(index)][1][name] = tensor
    return pairs


def _read_safetensors(view: memoryview, at: int) -> dict[str, StoredTensor]:
    if len(view) < 8:
        raise WireError("the tensor part is cut short", at)
    size = struct.unpack_from("<Q", view)[0]
    if size > len(view) - 8:
        raise WireError(f"the tensor part states a header of {size} bytes, {len(view) - 8} are there", at)
    try:
        # Decoded first, since json would guess the encoding of bytes.
        header = json.loads(bytes(view[8 : 8 + size]).decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header of the tensor part is not JSON: {error}", at + 8) from None
    if not isinstance(header, dict):
        raise WireError("the header of the tensor part is not an object", at + 8)
    body = view[8 + size :]
    header.pop("__metadata__", None)
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise WireError(f"tensor {name!r} is not described by dtype, shape and data_offsets", at + 8)
        span = entry["data_offsets"]
        if not (isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)) or not (
            0 <= span[0] <= span[1] <= len(body)
        ):
            raise WireError(f"tensor {name!r} has data_offsets {span!r}, of {len(body)} bytes", at + 8)
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise WireError("the tensors leave a gap, or overlap", at + 8 + size + end)
        end = stop
    if end != len(body):
        raise WireError(f"{len(body) - end} bytes follow the tensors", at + 8 + size + end)
    tensors = {}
    for name, entry in header.items():
        dtype = _SAFETENSORS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        start, stop = entry["data_offsets"]
        tensors[name] = StoredTensor(dtype, entry["shape"], body[start:stop])
    return tensors


def _from_item(item: Mapping[str, Any], stored: Mapping[str, StoredTensor], index: int) -> Experience:
    prefix = f"item {index}"
    tensors = {name: tensor_from_bytes(*tensor, f"tensor '{index}:{name}'") for name, tensor in stored.items()}
    values: dict[str, Any] = {name: item.get(name) for name in ("eid", "custom_fields", *_META)}
    media: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        group, colon, key = name.partition(":")
        if colon and group in FIELDS and FIELDS[group].kind == "media":
            media.setdefault(group, {})[key] = tensor
        elif name in FIELDS and FIELDS[name].kind == "tensor":
            values[name] = tensor
    extra = item.get(EXTRA) or {}
    if not isinstance(extra, dict) or not set(extra) <= set(FIELDS):
        raise WireError(f"{prefix}: {EXTRA!r} has an unknown field")
    values.update(extra)
    keys = item.get("multi_modal_input_keys") or []
    if keys or "multi_modal_inputs" in media:
        values["multi_modal_inputs"] = keys
    for name, field in FIELDS.items():
        if field.kind == "media" and values.get(name) is not None:
            keys, keyed = values[name], media.get(name, {})
            if not isinstance(keys, (list, tuple)) or sorted(map(str, keys)) != sorted(keyed):
                raise WireError(f"{prefix}: the keys {keys!r} of {name} do not match the tensors {sorted(keyed)}")
            values[name] = {key: keyed[key] for key in keys}
    return _build_record(values, prefix)


def _build_record(values: dict[str, Any], prefix: str) -> Experience:
    from rollbook.core.experience import restore

    for name, field in FIELDS.items():
        if field.kind == "json" and name in values:
            values[name] = _copy_freeform(values[name])
    if values.get("experience_type") is None:
        values["experience_type"] = _infer_kind(values)
    return restore(values, prefix)


def _copy_freeform(value: Pickled) -> Any:
    """Copy a free-form value, since a pickle can have one object in many places, but records must not share it.

    What frames cannot keep is converted: sets to sorted lists, bytearrays to bytes, complex numbers to those of numpy.
    """
    kind = type(value)
    if kind is dict:
        return {_copy_freeform(key): _copy_freeform(entry) for key, entry in value.items()}
    if kind in (list, tuple):
        return kind(map(_copy_freeform, value))
    if kind in (set, frozenset):
        members = list(map(_copy_freeform, value))
        try:
            return sorted(members)
        except TypeError:  # of types without a common order
            return sorted(members, key=repr)
    if kind is complex:
        return np.complex128(value)
    if kind is bytearray:
        return bytes(value)
    return value.clone() if hasattr(value, "untyped_storage") else value.copy() if kind is np.ndarray else value


def _infer_kind(values: Mapping[str, Any]) -> str | None:
    """Infer the kind of a record. Trinity writes every mask, which would make every record `multi_turn`.

    A record with the default mask of a single turn is `single_turn`. `None`: the constructor decides.
    """
    mask, tokens, prompt = values.get("action_mask"), values.get("tokens"), values.get("prompt_length")
    if mask is None or tokens is None or str(mask.dtype) != "torch.bool" or type(prompt) is not int or prompt < 1:
        return None
    if values.get("truncate_status") == "prompt_truncated":
        return "single_turn" if not bool(mask.any()) else None
    covers = mask.dim() == 1 and tokens.dim() == 1 and 0 < len(mask) == len(tokens) - prompt
    return "single_turn" if covers and bool(mask.all()) else None


def _from_pickled(item: Pickled, index: int) -> Experience:
    prefix = f"item {index}"
    if not isinstance(item, Record) or item.name != "Experience":
        raise WireError(f"{prefix}: got {type(item).__name__}, expected a pickled Experience")
    state = {str(name): _unwrap_record(entry, prefix) for name, entry in item.state.items()}
    values = {name: state.pop(name) for name in list(state) if name in FIELDS}
    if "eid" not in values:
        _convert_old_ids(values, state)
    info = dict(values.get("info") or {})
    for name, entry in state.items():
        if entry not in (None, ""):
            info.setdefault(name, entry)
    values["info"] = info
    return _build_record(values, prefix)


def _unwrap_record(value: Pickled, prefix: str) -> Any:
    """Convert the records inside a pickled one to what the constructor takes."""
    if isinstance(value, list):
        return [_unwrap_record(entry, prefix) for entry in value]
    if not isinstance(value, Record):
        return value
    if value.name == "ExperienceType":
        return value.state.get("value")
    if value.name == "CustomField":
        return {name: str(inner) for name, inner in value.state.items()}
    if value.name == "EID":
        return value.state
    raise WireError(f"{prefix}: unexpected {value.name}")


def _convert_old_ids(values: dict[str, Any], state: dict[str, Any]) -> None:
    """Convert fields of releases up to 0.2.0, which had two texts as ids, and log-probs and masks of all tokens."""
    from rollbook.core.ids import EID

    group, unique = state.pop("group_id", ""), state.pop("unique_id", "")
    eid = EID(task=str(group or ""))
    values["eid"] = eid.replace(suffix=str(unique)) if unique else eid
    tokens, prompt = values.get("tokens"), values.get("prompt_length")
    for field in fields.tensor_fields("response"):
        tensor = values.get(field.name)
        if tensor is not None and tokens is not None and type(prompt) is int and len(tensor) == len(tokens):
            values[field.name] = tensor[prompt:]


# --- writing ------------------------------------------------------------------------------------------------------


def write(experiences: Iterable[Experience]) -> bytes:
    """Write records as TRXP 1.

    The mask of a single turn is left out: Trinity creates it again, and with it the right kind.
    """
    from rollbook.core.experience import convert_assigned, implied_mask, validate

    items, tensors = [], {}
    for i, row in enumerate(convert_assigned(list(experiences))):
        validate(row, f"record {i}: ")
        items.append(_to_item(row))
        for name, field in FIELDS.items():
            entry = getattr(row, name)
            if field.kind == "tensor" and hasattr(entry, "dtype"):
                if not (name == "action_mask" and implied_mask(row)):
                    tensors[f"{i}:{name}"] = entry
            elif field.kind == "media":
                tensors.update({f"{i}:{name}:{key}": tensor for key, tensor in (entry or {}).items()})
    try:
        meta = pickle.dumps({"version": 1, "num_items": len(items), "items": items}, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"a free-form value cannot be kept in TRXP: {error}") from None
    blob = _write_safetensors(tensors)
    return _HEADER.pack(MAGIC, 1, len(meta), len(blob)) + meta + blob


def _to_item(row: Experience) -> dict[str, Any]:
    item: dict[str, Any] = {"eid": row.eid.to_dict()}
    item.update({name: _compact(getattr(row, name)) for name in _META})
    item["custom_fields"] = [custom.to_dict() for custom in row.custom_fields or ()]
    item["multi_modal_input_keys"] = list(row.multi_modal_inputs or {})
    standard = {"eid", "custom_fields", *_META}
    item[EXTRA] = {}
    for name, field in FIELDS.items():
        entry = getattr(row, name)
        if name in standard or entry is None or hasattr(entry, "dtype"):
            continue
        if field.kind == "eid":
            entry = entry.to_dict()
        elif field.kind == "custom_fields":
            entry = [custom.to_dict() for custom in entry]
        elif field.kind == "media":
            entry = list(entry)
        if name != "multi_modal_inputs" or not entry:
            item[EXTRA][name] = _compact(entry)
    return item


def _compact(value: Pickled) -> Any:
    """Copy the tensors in a value: pickle would write the whole storage behind a view."""
    if isinstance(value, dict):
        return {key: _compact(entry) for key, entry in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_compact(entry) for entry in value)
    return value.detach().cpu().clone() if hasattr(value, "untyped_storage") else value


def _write_safetensors(tensors: Mapping[str, Any]) -> bytes:
    header: dict[str, Any] = {}
    parts, at = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _SAFETENSORS_NAMES:
            raise ValueError(f"{name}: a tensor of {dtype} cannot be kept in TRXP")
        raw = tensor_bytes(tensor).tobytes()
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(raw)],
        }
        parts.append(raw)
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


__all__ = [
    "Record",
    "UnpickleError",
    "load",
]
