"""Frames to attack: small, but with everything a frame can hold, and the tools that take one apart and lie in it.

Nothing here asks the code under attack what a frame looks like beyond its header's layout: Arrow's messages are found
and made by hand, so that a reader that overlooks something is not looked at through its own eyes.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import xxhash

from rollbook import EID, CustomField, Experience, Experiences
from rollbook.core import fields, wire
from rollbook.io.arrow import to_table

CONTINUATION = b"\xff\xff\xff\xff"
END = CONTINUATION + bytes(4)


# --- records --------------------------------------------------------------------------------------------------------


def eid(number: int, **parts: Any) -> EID:
    """An id without chance in it: the same corpus gives the same bytes in every process."""
    return EID(**{"batch": 7, "task": number, "run": number % 3, "step": 0, "suffix": f"s{number}", **parts})


def minimal() -> list[Experience]:
    """One record with nothing but tokens."""
    return [Experience(eid=eid(0), tokens=[1, 2, 3])]


def single_turn() -> list[Experience]:
    """Records as a sampler gives them, with every field of the response axis."""
    return [
        Experience(
            eid=eid(i),
            tokens=list(range(10, 15 + i)),
            prompt_length=2,
            logprobs=torch.linspace(-1, 0, 3 + i),
            token_level_reward=torch.full((3 + i,), 0.5),
            advantages=torch.arange(3 + i, dtype=torch.float32),
            returns=torch.ones(3 + i),
            teacher_logprobs=torch.zeros(3 + i),
            old_logprobs=torch.full((3 + i,), -0.25),
            ref_logprobs=torch.full((3 + i,), -0.5),
            entropy=torch.full((3 + i,), 0.75),
            values=torch.full((3 + i,), 0.125),
            loss_weights=torch.ones(3 + i),
            policy_versions=[4] * (3 + i),
            reward=[1.0, float("nan"), -0.0][i],
            response_text="four words of text",
            prompt_text="größer, 大きい, 🙂",
            finish_reason="stop",
            parent="7/0/0/0/s0",
            group_size=4,
            sampling={"temperature": 0.5, "seed": 2**63},
            metrics={"time": 0.25},
        )
        for i in range(3)
    ]


def multi_turn() -> list[Experience]:
    """Conversations: masks with holes, messages, tools, a truncated prompt, a response without a token."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    return [
        Experience(
            eid=eid(10, batch="a/b", task="50%"),
            tokens=[1, 2, 3, 4, 5],
            prompt_length=0,
            action_mask=[True, False, True, True, False],
            messages=messages,
            tools=[{"name": "search", "parameters": {}}],
        ),
        Experience(eid=eid(11), tokens=[5, 6], prompt_length=2, action_mask=torch.zeros(0, dtype=torch.bool)),
        Experience(
            eid=eid(12),
            tokens=[5, 6, 7],
            prompt_length=9,
            truncate_status="prompt_truncated",
            logprobs=[0.0],
            action_mask=[False],
        ),
    ]


def dpo() -> list[Experience]:
    """Preference pairs."""
    return [
        Experience(
            eid=eid(20 + i),
            tokens=[1, 2, 3],
            chosen=list(range(1 + i)),
            rejected=[9, 8],
            chosen_messages=[{"role": "assistant", "content": "yes"}],
            rejected_messages=[],
        )
        for i in range(2)
    ]


def mixed_types() -> list[Experience]:
    """Fields whose type changes from record to record, so that `__dtype` columns say which each has."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
    integer_types = (torch.int32, torch.int8, torch.uint16, torch.int64)
    return [
        Experience(
            eid=eid(30 + i),
            tokens=torch.tensor([1, 2, 3, 4], dtype=integer_types[i]),
            logprobs=torch.tensor([-0.5, 0.25, 1.0], dtype=kinds[i]),
            returns=torch.tensor([1, 0, 1], dtype=torch.bool if i % 2 else torch.uint8),
            advantages=torch.ones(3, dtype=torch.bfloat16),
            action_mask=torch.tensor([1, 0, 1], dtype=torch.int8),
        )
        for i in range(4)
    ]


def odd_shapes() -> list[Experience]:
    """What fits no column: `__other` (shapes, 8-bit floats, 64-bit types without a common one), `__one`, `__raw`."""
    rows = [
        Experience(
            eid=eid(40),
            tokens=torch.tensor([1, 2, 2**64 - 1], dtype=torch.uint64),
            policy_versions=3,
            response_text="lone \ud800 surrogate",
            routed_experts=torch.zeros(2, 2, 2, dtype=torch.int16),
        ),
        Experience(
            eid=eid(41),
            tokens=torch.tensor([1, -2, 3], dtype=torch.int8),
            policy_versions=torch.tensor([1, 2], dtype=torch.int32),
            response_text="text",
            routed_experts=torch.ones(2, 3, 1, dtype=torch.int16),
            logprobs=torch.zeros(2).to(torch.float8_e4m3fn),
        ),
        Experience(eid=eid(42), tokens=[4, 5, 6], logprobs=torch.zeros(2), info={"k": 1}),
    ]
    # What a foreign payload may hold: a response-axis value of a shape that it cannot have, kept and named.
    rows[2].__dict__.update(advantages=torch.zeros(2, 5), malformed_fields=frozenset(["advantages"]))
    return rows


def media() -> list[Experience]:
    """Images: none, one and three; a tensor of every type there is; routed experts."""
    with warnings.catch_warnings():
        # torch says of 32-bit complex numbers that they are experimental; they are kept all the same.
        warnings.simplefilter("ignore")
        every = {
            name: torch.zeros(2, 3, dtype=torch.float32).to(getattr(torch, name))
            for name in fields.DTYPES
            if isinstance(getattr(torch, name, None), torch.dtype)
        }
    image = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    return [
        Experience(eid=eid(50), tokens=[1, 2], multi_modal_inputs={}),
        Experience(
            eid=eid(51),
            tokens=[1, 2, 3],
            multi_modal_inputs={"pixel_values": image, "image_grid_thw": torch.tensor([[1, 2, 2]])},
            routed_experts=torch.arange(12, dtype=torch.int16).reshape(2, 3, 2),
        ),
        Experience(
            eid=eid(52),
            tokens=[1, 2, 3],
            multi_modal_inputs={
                "pixel_values": torch.cat([image] * 3).to(torch.bfloat16),
                "image_grid_thw": torch.tensor([[1, 2, 2]] * 3),
                "empty": torch.zeros(0, 7),
                "scalar": torch.tensor(1.5),
            },
        ),
        Experience(eid=eid(53), tokens=[1, 2, 3], multi_modal_inputs=every),
        Experience(eid=eid(54), tokens=[1, 2, 3]),
    ]


def nested() -> list[Experience]:
    """Free-form values with every tag, and fields that custom columns are made of."""
    everything = {
        "float": [float("nan"), float("inf"), float("-inf"), -0.0, 1e300],
        "int": [2**80, -(2**70), 2**64 - 1, -(2**63)],
        "text": "lone \udfff",
        "bytes": b"\x00\xff",
        "tuple": ((), (1, (2,))),
        "map": {1: "a", (2, "b"): None, b"c": True, None: 0.5},
        "escape": {"$int": "mine"},
        "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.ones(1, dtype=torch.complex64),
        "array": np.arange(4, dtype=">u4").reshape(2, 2),
        "words": np.array(["a", "bc"]),
        "times": np.array([1, 2], dtype="M8[ms]"),
        "scalar": np.float32(0.5),
        "deep": [[[[[[{"a": {"b": {"c": [None, True]}}}]]]]]],
    }
    custom = [CustomField("is_expert", "expert_mask", torch.bool), CustomField("k", "weight", torch.float32)]
    return [
        Experience(eid=eid(60), tokens=[1, 2], info=everything, custom_fields=custom),
        Experience(eid=eid(61), tokens=[1, 2], info={"plain": [1, "two", None]}, metrics={"nan": float("nan")}),
    ]


def unknown_batch(rows: list[Experience] | None = None) -> pa.RecordBatch:
    """Columns that the table does not know, of many Arrow types, beside those of ordinary records."""
    arrays = columns_of(rows or single_turn())
    count = len(next(iter(arrays.values())))
    arrays["made_up"] = pa.array([{"a": [i], "b": "text"} for i in range(count)])
    arrays["when"] = pa.array(range(count), pa.timestamp("us", tz="UTC"))
    arrays["price"] = pa.array([1] * count, pa.decimal128(10, 2))
    arrays["nothing"] = pa.nulls(count)
    arrays["flags"] = pa.array([True, None, False][:count])
    arrays["pairs"] = pa.array([[("k", i)] for i in range(count)], pa.map_(pa.string(), pa.int32()))
    arrays["fixed"] = pa.array([b"four"] * count, pa.binary(4))
    arrays["tokens__later"] = pa.array([None] * count, pa.list_(pa.float16()))
    return batch_of(arrays)


def declared_records() -> dict[str, list[Experience]]:
    """All sets of records by name."""
    makers: list[Callable[[], list[Experience]]] = [
        minimal, single_turn, multi_turn, dpo, mixed_types, odd_shapes, media, nested,
    ]  # fmt: skip
    return {maker.__name__: maker() for maker in makers}


# --- frames ---------------------------------------------------------------------------------------------------------


def frames() -> dict[str, bytes]:
    """Good frames by name: every kind of content, every compression, none and two in a row."""
    records = declared_records()
    by_name = {name: Experience.serialize_many(rows) for name, rows in records.items()}
    everything = [row for rows in records.values() for row in rows]
    by_name["everything"] = Experience.serialize_many(everything)
    by_name["unknown"] = frame_of(unknown_batch())
    by_name["empty"] = Experience.serialize_many([])
    by_name["two"] = by_name["minimal"] + by_name["dpo"]
    by_name["three"] = by_name["minimal"] + by_name["empty"] + by_name["mixed_types"]
    for compression in ("zstd", "lz4"):
        for name in ("minimal", "single_turn", "odd_shapes", "everything"):
            by_name[f"{name}.{compression}"] = bytes(
                wire.encode(records.get(name, everything), compression=compression)
            )
    return by_name


def columns_of(rows: list[Experience]) -> dict[str, pa.Array]:
    """The Arrow arrays that a frame of these records holds."""
    table = to_table(Experiences(rows))
    return {name: table.column(name).combine_chunks() for name in table.schema.names}


def batch_of(arrays: dict[str, pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def stream_of(*batches: pa.RecordBatch, schema: pa.Schema | None = None, **options: Any) -> bytes:
    """An Arrow IPC stream of these batches."""
    sink = pa.BufferOutputStream()
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, schema or batches[0].schema, options=written) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def frame_of(batch: pa.RecordBatch, **lies: Any) -> bytes:
    """A frame around any record batch, whether or not it is one of records."""
    return seal(stream_of(batch), batch.num_rows, **lies)


# --- taking a frame apart, and sealing it again ---------------------------------------------------------------------


@dataclass
class Parts:
    """A frame's header, field by field, and its body as stored."""

    magic: bytes
    version: int
    flags: int
    header_length: int
    length: int
    decoded: int
    count: int
    checksum: int
    reserved: int
    stored: bytes

    @property
    def compression(self) -> str | None:
        return {0: None, 1: "zstd", 2: "lz4"}[self.flags]

    @property
    def body(self) -> bytes:
        """The Arrow stream."""
        if self.compression is None:
            return self.stored
        return bytes(pa.Codec(self.compression).decompress(self.stored, decompressed_size=self.decoded))

    def join(self, **lies: Any) -> bytes:
        """The frame again, with some fields other than they should be, and the header's checksum right."""
        header = dataclasses.replace(self, **lies)
        numbers = [getattr(header, entry.name) for entry in dataclasses.fields(header)[:-1]]
        head = wire.HEADER.pack(*numbers)
        return b"".join(
            (head, struct.pack("<Q", xxhash.xxh3_64_intdigest(head)), header.stored, bytes(-len(header.stored) % 64))
        )


def take_apart(frame: bytes) -> Parts:
    """The first frame's parts; what follows it is left out."""
    numbers = wire.HEADER.unpack_from(frame)
    return Parts(*numbers, stored=bytes(frame[64 : 64 + numbers[4]]))


def compress(body: bytes, compression: str | None) -> bytes:
    return body if compression is None else bytes(pa.Codec(compression).compress(body))


def seal(body: bytes, count: int, compression: str | None = None, **lies: Any) -> bytes:
    """A frame of this body: lengths and checksums are right but for the `lies`."""
    stored = lies.pop("stored", None)
    if stored is None:
        stored = compress(body, compression)
    return Parts(
        wire.MAGIC,
        wire.VERSION,
        wire.COMPRESSION[compression],
        wire.HEADER_BYTES,
        len(stored),
        len(body),
        count,
        xxhash.xxh3_64_intdigest(stored),
        0,
        stored,
    ).join(**lies)


# --- Arrow's messages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """Where one message lies in a stream: its mark, its metadata, its body."""

    start: int
    metadata: int
    data: int
    stop: int


def messages(body: bytes) -> list[Message]:
    """The schema and the batches of a good stream."""
    parsed, start = [], 0
    while body[start : start + 8] != END:
        size = struct.unpack_from("<i", body, start + 4)[0]
        data = start + 8 + size
        root = start + 8 + struct.unpack_from("<I", body, start + 8)[0]
        at = slot(body, root, 3)
        stop = data + (struct.unpack_from("<q", body, at)[0] if at else 0)
        parsed.append(Message(start, start + 8, data, stop))
        start = stop
    return parsed


def slot(body: bytes, table: int, index: int) -> int:
    """Where field `index` of the flatbuffer table at `table` lies; 0 if it has none."""
    vtable = table - struct.unpack_from("<i", body, table)[0]
    if 4 + 2 * index >= struct.unpack_from("<H", body, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", body, vtable + 4 + 2 * index)[0]
    return table + offset if offset else 0


def follow(body: bytes, at: int) -> int:
    return at + struct.unpack_from("<I", body, at)[0]


@dataclass(frozen=True)
class BatchPlaces:
    """Where the numbers of a record batch's metadata lie in the stream."""

    length: int
    nodes: list[int]
    """Of each array: length, then null count, 8 bytes each."""
    buffers: list[int]
    """Of each buffer: offset, then length, 8 bytes each."""
    body_length: int
    data: int
    header: int
    message: Message


def batch_places(body: bytes) -> BatchPlaces:
    """The places of the first record batch."""
    message = messages(body)[1]
    root = message.metadata + struct.unpack_from("<I", body, message.metadata)[0]
    header = follow(body, slot(body, root, 2))
    lists = []
    for index in (1, 2):
        at = slot(body, header, index)
        vector = follow(body, at) if at else 0
        count = struct.unpack_from("<I", body, vector)[0] if at else 0
        lists.append([vector + 4 + 16 * i for i in range(count)])
    return BatchPlaces(slot(body, header, 0), *lists, slot(body, root, 3), message.data, header, message)


def buffer_roles(kind: pa.DataType, path: str) -> Iterator[tuple[str, str]]:
    """What each buffer of an array of this type holds, in Arrow's order: (path, validity | offsets | data)."""
    if pa.types.is_null(kind):
        return
    yield path, "validity"
    if not (pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind)):
        text = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_string(kind)
        yield path, "offsets" if text or kind.num_fields else "data"
        if text:
            yield path, "data"
    for i in range(kind.num_fields):
        yield from buffer_roles(kind.field(i).type, f"{path}.{kind.field(i).name}")


def buffer_spans(body: bytes) -> dict[tuple[str, str], tuple[int, int]]:
    """(column path, role) to where that buffer lies in the stream: (start, length)."""
    places = batch_places(body)
    schema = pa.ipc.read_schema(pa.py_buffer(body))
    roles = [role for column in schema for role in buffer_roles(column.type, column.name)]
    spans = [struct.unpack_from("<qq", body, at) for at in places.buffers]
    return {role: (places.data + start, size) for role, (start, size) in zip(roles, spans, strict=True)}


def patched(data: bytes, *edits: tuple[int, str, Any]) -> bytes:
    """`data` with numbers written over it: (position, struct format, value)."""
    memory = bytearray(data)
    for at, form, value in edits:
        struct.pack_into(form, memory, at, value)
    return bytes(memory)


# --- flatbuffers made by hand ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Flat:
    """A flatbuffer object. The same object in two places is written once and pointed at twice."""

    slots: Sequence[Any] = ()
    """Of a table: `None`, (struct format, number), or another `Flat`."""
    items: Sequence[Flat] | None = None
    """Of a vector of tables."""
    text: bytes | None = None
    pairs: Sequence[tuple[int, int]] | None = None
    """Of a vector of structs of two 64-bit numbers."""
    at: int = field(default=0, init=False)

    def children(self) -> list[Flat]:
        return [entry for entry in (*self.slots, *(self.items or ())) if isinstance(entry, Flat)]


def flatbuffer(root: Flat) -> bytes:
    """The bytes of `root` and all below it, padded to 8; offsets only ever point forward, as the format wants."""
    order: list[Flat] = []
    done: set[int] = set()
    todo = [(root, False)]
    while todo:
        entry, leaving = todo.pop()
        if leaving:
            order.append(entry)
        elif id(entry) not in done:
            done.add(id(entry))
            todo.append((entry, True))
            todo.extend((child, False) for child in entry.children() if id(child) not in done)
    order.reverse()
    out = bytearray(4)
    holes: list[tuple[int, Flat]] = [(0, root)]
    for entry in order:
        _place(entry, out, holes)
    for at, target in holes:
        struct.pack_into("<I", out, at, target.at - at)
    return bytes(out) + bytes(-len(out) % 8)


def _place(entry: Flat, out: bytearray, holes: list[tuple[int, Flat]]) -> None:
    if entry.text is not None:
        out.extend(bytes(-len(out) % 4))
        entry.at = len(out)
        out.extend(struct.pack("<I", len(entry.text)) + entry.text + b"\0")
    elif entry.items is not None:
        out.extend(bytes(-len(out) % 4))
        entry.at = len(out)
        out.extend(struct.pack("<I", len(entry.items)))
        holes.extend((len(out) + 4 * i, item) for i, item in enumerate(entry.items))
        out.extend(bytes(4 * len(entry.items)))
    elif entry.pairs is not None:
        out.extend(bytes((4 - len(out)) % 8))
        entry.at = len(out)
        out.extend(struct.pack("<I", len(entry.pairs)))
        for pair in entry.pairs:
            out.extend(struct.pack("<qq", *pair))
    else:
        # Every slot takes 8 bytes, so that none is misaligned, behind the table's offset and 4 bytes of padding.
        vtable = struct.pack("<HH", 4 + 2 * len(entry.slots), 8 + 8 * len(entry.slots))
        vtable += b"".join(struct.pack("<H", 8 + 8 * i if s is not None else 0) for i, s in enumerate(entry.slots))
        out.extend(bytes(-(len(out) + len(vtable)) % 8))
        out.extend(vtable)
        entry.at = len(out)
        out.extend(struct.pack("<ii", len(vtable), 0))
        for value in entry.slots:
            if isinstance(value, Flat):
                holes.append((len(out), value))
                out.extend(bytes(8))
            else:
                form, number = value or ("<q", 0)
                out.extend(struct.pack(form, number).ljust(8, b"\0"))


def text_of(text: str | bytes) -> Flat:
    return Flat(text=text.encode() if isinstance(text, str) else text)


def metadata_of(pairs: Sequence[tuple[Flat, Flat]]) -> Flat:
    """A vector of Arrow's KeyValue."""
    return Flat(items=[Flat([key, value]) for key, value in pairs])


TYPE_CODES = {"null": 1, "int": 2, "float": 3, "utf8": 5, "struct": 13, "large_utf8": 20, "large_list": 21}


def field_of(
    name: Flat,
    kind: str | int,
    parameters: Sequence[Any] = (),
    children: Flat | None = None,
    more: Flat | None = None,
    nullable: int = 1,
) -> Flat:
    """Arrow's Field: name, nullable, type (by name or number), children, metadata."""
    code = TYPE_CODES[kind] if isinstance(kind, str) else kind
    return Flat([name, ("<B", nullable), ("<B", code), Flat(parameters), None, children or Flat(items=[]), more])


def message_of(kind: int, header: Flat, body_length: int = 0, more: Flat | None = None) -> bytes:
    """An encapsulated Arrow message without its body: mark, length, metadata. Kinds: 1 schema, 3 record batch."""
    metadata = flatbuffer(Flat([("<h", 4), ("<B", kind), header, ("<q", body_length), more]))
    return CONTINUATION + struct.pack("<i", len(metadata)) + metadata


def schema_message(columns: Flat, more: Flat | None = None) -> bytes:
    return message_of(1, Flat([("<h", 0), columns, more]))


# --- Trinity's payloads ---------------------------------------------------------------------------------------------


def trxp(rows: list[Experience]) -> bytes:
    return steady(wire.to_trxp(rows))


def steady(pickled: bytes) -> bytes:
    """The same pickle in every process: torch names a storage by its address, in digits, which mean nothing."""
    return re.sub(rb"(?<=\0\0\0)[0-9]{12,16}", lambda match: b"0" * len(match[0]), pickled)


def trxp_of(meta: Any, tensors: bytes = struct.pack("<Q", 2) + b"{}", lies: dict[str, int] | None = None) -> bytes:
    """A TRXP payload of any pickled part (bytes are taken as they are) and any tensor part."""
    pickled = meta if isinstance(meta, bytes) else steady(pickle.dumps(meta, protocol=5))
    numbers = {"version": 1, "meta": len(pickled), "tensors": len(tensors), **(lies or {})}
    return struct.pack("<4sBQQ", b"TRXP", *numbers.values()) + pickled + tensors


def legacy_pickle(states: list[dict[str, Any]], protocol: int = 4, single: bool = False) -> bytes:
    """Records as Trinity pickled them before TRXP: instances of a module that is made for the moment and not kept."""
    name = "trinity.common.experience"
    module = types.ModuleType(name)
    rows = []
    for class_name in ("Experience", "EID", "CustomField"):
        setattr(module, class_name, type(class_name, (), {"__module__": name}))
    for state in states:
        row = module.Experience()
        row.__dict__.update(state)
        if isinstance(state.get("eid"), dict):
            row.eid = module.EID()
            row.eid.__dict__.update(state["eid"])
        rows.append(row)
    parents = {part: sys.modules.get(part) for part in ("trinity", "trinity.common", name)}
    sys.modules.update({"trinity": types.ModuleType("trinity"), "trinity.common": types.ModuleType("trinity.common")})
    sys.modules[name] = module
    try:
        return steady(pickle.dumps(rows[0] if single else rows, protocol=protocol))
    finally:
        for part, before in parents.items():
            if before is None:
                del sys.modules[part]
            else:
                sys.modules[part] = before


def legacy_states() -> list[dict[str, Any]]:
    return [
        {
            "eid": {"batch": 1, "task": 2, "run": 3, "step": 4, "suffix": "abc"},
            "tokens": torch.tensor([1, 2, 3, 4], dtype=torch.int32),
            "prompt_length": 2,
            "logprobs": torch.tensor([-0.5, -0.25]),
            "reward": 1.0,
            "info": {"k": [1, (2, 3)], "array": np.arange(3)},
            "action_mask": torch.tensor([True, True]),
            "response_text": "text",
        },
        {"tokens": torch.tensor([1, 2, 3]), "prompt_length": 1, "group_id": "g", "unique_id": "u", "info": {}},
    ]


def legacy_keys() -> list[str]:
    """Names under which a pickled record may hold something."""
    first, second = legacy_states()
    more = [
        "chosen", "rejected", "truncate_status", "metrics", "messages", "tools", "multi_modal_inputs", "custom_fields",
        "policy_versions", "group_size", "sampling", "experience_type", "routed_experts", "advantages", "made_up", "",
    ]  # fmt: skip
    return list(dict.fromkeys([*first, *second, *more]))


def trxp_item() -> tuple[dict[str, Any], bytes]:
    """One item of a TRXP payload as it is pickled, and the tensors that belong to it."""
    payload = trxp(minimal())
    size = struct.unpack_from("<Q", payload, 5)[0]
    return pickle.loads(payload[21 : 21 + size])["items"][0], payload[21 + size :]


def odd_values() -> dict[str, Any]:
    """Values of every type that a pickle can hold, to stand where something else should."""
    return {
        "none": None,
        "int": 5,
        "negative": -1,
        "huge": 10**5000,
        "float": 0.5,
        "nan": float("nan"),
        "inf": float("inf"),
        "complex": 1j,
        "text": "text",
        "lone": "\ud800",
        "bytes": b"bytes",
        "list": [1, 2],
        "list of lists": [[1], [2, 3]],
        "list of all": [None, "a", 1.5, [], {}],
        "empty": [],
        "tuple": (1, 2, 3),
        "set": {1, 2},
        "dict": {"a": 1},
        "dict of numbers": {1: 2},
        "bool": True,
        "0-d tensor": torch.tensor(1),
        "0-d inf": torch.tensor(float("inf")),
        "tensor": torch.arange(4),
        "floats": torch.tensor([0.5, float("nan"), float("inf")]),
        "bool tensor": torch.tensor([True, False]),
        "matrix": torch.zeros(2, 2),
        "no elements": torch.zeros(0),
        "complex tensor": torch.zeros(2, dtype=torch.complex64),
        "wide": torch.tensor([1, 2], dtype=torch.uint64),
        "array": np.arange(4),
        "0-d array": np.array(3),
        "0-d nan": np.array(float("nan")),
        "words": np.array(["a", "b"]),
        "times": np.array([1, 2], "M8[s]"),
        "long doubles": np.zeros(2, np.longdouble),  # ones would have six undefined bytes each
        "no array": np.zeros((0, 3)),
        "np int": np.int64(5),
        "np float": np.float64("nan"),
        "np text": np.str_("text"),
        "np bool": np.bool_(True),
        "np time": np.datetime64(1, "s"),
    }


def payloads() -> dict[str, bytes]:
    """Good payloads of Trinity's formats."""
    return {
        "trxp": trxp([*single_turn(), *multi_turn(), *dpo()]),
        "trxp.nested": trxp(nested()),
        "trxp.minimal": trxp(minimal()),
        "pickle": legacy_pickle(legacy_states()),
        "pickle.0": legacy_pickle(legacy_states()[1:], protocol=0),
        "pickle.2": legacy_pickle(legacy_states()[:1], protocol=2),
        "pickle.5": legacy_pickle(legacy_states()[:1], protocol=5, single=True),
    }
