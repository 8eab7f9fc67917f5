"""Trinity's formats as an attacker writes them: pickles that name what they should not, TRXP that lies."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook import Experience
from tests.attacks import corpus
from tests.attacks.outcome import SPARE, Meter, judged, read_as_any, used

PAYLOADS = corpus.payloads()


def refused(data: bytes) -> str:
    """The message with which a payload is refused; fails if it is read."""
    from rollbook import WireError

    with pytest.raises(WireError) as caught:
        Experience.deserialize_many(data)
    assert caught.type is WireError
    assert str(caught.value).strip()
    return str(caught.value)


@pytest.mark.parametrize("name", PAYLOADS)
def test_the_payloads_that_are_attacked_are_good_ones(name: str) -> None:
    assert read_as_any(PAYLOADS[name])


@pytest.mark.parametrize("name", ["trxp.minimal", "pickle", "pickle.2", "pickle.5"])
def test_a_payload_cut_at_any_byte_is_refused(name: str) -> None:
    data = PAYLOADS[name]
    for size in range(len(data)):
        assert not read_as_any(data[:size]), size


@pytest.mark.parametrize("name", ["trxp.minimal", "pickle.5"])
def test_a_payload_with_any_byte_changed_does_no_harm(name: str) -> None:
    # There is no checksum in these formats: a flip may give another good payload.
    data, refusals = bytearray(PAYLOADS[name]), 0
    for at in range(len(data)):
        for change in (0x01, 0x20, 0xFF):
            data[at] ^= change
            refusals += not read_as_any(data)
            data[at] ^= change
    assert refusals > len(data)


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"{}", b"[]", b"PK\x03\x04", b"\x93NUMPY", b"ARROW1", b"TRX", b"PAR1", b"\x8d"]
)
def test_what_is_no_payload_is_refused(data: bytes) -> None:
    refused(data)
    refused(data + bytes(1000))


# --- hostile pickles ------------------------------------------------------------------------------------------------


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def by_name(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls `module.name` by its name alone, whether or not there is such a thing."""
    encoded = b"".join(b"X" + struct.pack("<I", len(a.encode())) + a.encode() for a in arguments)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + encoded + b"tR."


def nested_in(value: Any) -> dict[str, bytes]:
    """The value alone, and inside all that surrounds a good record."""
    state = {**corpus.legacy_states()[0], "info": {"inside": value}}
    item, _ = corpus.trxp_item()
    return {
        "alone": pickle.dumps(value),
        "in a list": pickle.dumps([value], protocol=2),
        "in a record": corpus.legacy_pickle([state]),
        "in TRXP": corpus.trxp_of({"version": 1, "num_items": 1, "items": [{**item, "info": {"inside": value}}]}),
        "as TRXP": corpus.trxp_of(value),
    }


def hostile(path: str) -> dict[str, Any]:
    leave = f"touch {path}"
    code = f"open({path!r}, 'w')"
    return {
        "system": Call(os.system, leave),
        "popen": Call(os.popen, leave),
        "Popen": Call(subprocess.Popen, ["touch", path]),
        "exec": Call(builtins.exec, code),
        "eval": Call(builtins.eval, code),
        "compile": Call(builtins.compile, code, "f", "exec"),
        "open": Call(builtins.open, path, "w"),
        "import": Call(builtins.__import__, "antigravity"),
        "getattr": Call(builtins.getattr, "os", "system"),
        "remove": Call(os.remove, path),
        "mkdir": Call(os.mkdir, path),
        "pickle": Call(pickle.loads, b"cos\nsystem\n(V" + leave.encode() + b"\ntR."),
        "torch.load": Call(torch.load, path),
        "numpy.load": Call(np.load, path, None, True),
        "memmap": Call(np.memmap, path, "u1", "w+", 0, (8,)),
        "fromfile": Call(np.fromfile, path),
        "frombuffer": Call(np.frombuffer, b"12345678"),
        "hub": Call(torch.hub.load, "a/b", "c"),
        "UntypedStorage": Call(torch.UntypedStorage, 1 << 40),
        "bytearray": Call(bytearray, 1 << 40),
        "bytes": Call(bytes, 1 << 40),
        "empty": Call(torch.empty, 1 << 40),
        "zeros": Call(np.zeros, 1 << 40),
        "path": Path(path),
        "function": read_as_any,
        "class": Experience,
    }


@pytest.mark.parametrize("name", hostile(""))
def test_a_pickle_that_calls_is_refused_and_calls_nothing(name: str, tmp_path: Path) -> None:
    left = tmp_path / "left"
    meter = Meter()
    before = set(sys.modules)
    for place, data in nested_in(hostile(str(left))[name]).items():
        assert refused(data), place
        assert not left.exists(), place
    assert meter.peak() < SPARE
    assert "antigravity" not in set(sys.modules) - before


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("this", "s"),
        ("antigravity", "x"),
        ("rollbook_attack_canary", "run"),
        ("os", "system"),
        ("posix", "system"),
        ("nt", "system"),
        ("builtins", "exec"),
        ("__builtin__", "eval"),
        ("rollbook.core.wire", "decode"),
        ("rollbook", "Experience"),
        ("trinity.common.experience", "__class__.__init__"),
        ("trinity.common.experience", "Experience.deserialize"),
        ("trinity.common.experience", "os.system"),
        ("trinity.common.experience.Experience", "x"),
        ("numpy", "load"),
        ("numpy._core.multiarray", "_reconstruct.__globals__"),
        ("torch", "load"),
        ("torch._utils", "os.system"),
        ("torch.storage", "_load_from_bytes.__globals__"),
        ("", ""),
        (".", "."),
        ("os\0", "system"),
    ],
)
def test_a_name_is_never_imported(module: str, name: str) -> None:
    before = set(sys.modules)
    for data in (by_name(module, name, "true"), by_name(module, name), corpus.trxp_of(by_name(module, name, "x"))):
        assert "refers to" in refused(data) or "not supported" in refused(data)
    assert set(sys.modules) == before


def test_a_module_that_would_tell_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "told"
    (tmp_path / "rollbook_attack_canary.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for protocol in (b"", b"\x80\x02", b"\x80\x04", b"\x80\x05"):
        refused(protocol + b"crollbook_attack_canary\nrun\n(tR.")
    refused(b"\x80\x04\x8c\x16rollbook_attack_canary\x8c\x03run\x93)R.")
    assert not marker.exists()
    assert "rollbook_attack_canary" not in sys.modules


PICKLE_BOMBS: dict[str, bytes] = {
    "nested lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nested tuples": b"\x80\x02N" + b"\x85" * 100_000 + b".",
    "marks": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "doubling": b"\x80\x02]q\0" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)) + b".",
    "itself": b"\x80\x02]q\0h\0a.",
    "a long length": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
    "long bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
    "a long long": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "a long int": b"I" + b"9" * 1_000_000 + b"\n.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "a far memo": b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "out of band": b"\x80\x05\x97.",
    "persistent": b"\x80\x02Pid\n.",
    "extension": b"\x80\x02\x82\x01.",
    "no stop": b"\x80\x04N",
    "nothing": b"\x80\x04.",
    "two values": b"\x80\x04NN.",
    "bytes behind": b"\x80\x04N.N.",
    "none": b"\x80\x04N.",
    "a number": b"\x80\x04K\x05.",
    "no records": b"\x80\x04](K\x01K\x02e.",
}


@pytest.mark.parametrize("name", PICKLE_BOMBS)
def test_pickle_bombs_are_refused(name: str) -> None:
    data = PICKLE_BOMBS[name]
    start = time.monotonic()
    refused(data)
    refused(corpus.trxp_of(data))
    assert time.monotonic() - start < 10


# --- records in pickles ---------------------------------------------------------------------------------------------

ODD_VALUES = corpus.odd_values()
LEGACY_KEYS = corpus.legacy_keys()


@pytest.mark.parametrize("name", ODD_VALUES)
def test_a_pickled_record_with_any_value_in_any_field_does_no_harm(name: str) -> None:
    taken = 0
    for key in dict.fromkeys(LEGACY_KEYS):
        for base in corpus.legacy_states():
            taken += read_as_any(corpus.legacy_pickle([{**base, key: ODD_VALUES[name]}]))
            # Deep inside, where only the free-form fields let a value in, any type may come.
            taken += read_as_any(corpus.legacy_pickle([{**base, key: {"a": [ODD_VALUES[name]]}}]))
    assert taken, "no field took the value: the attack did not come past the first check"


ITEM, TENSORS = corpus.trxp_item()
STATE = corpus.legacy_states()[0]


def one_item(**changes: Any) -> bytes:
    return corpus.trxp_of({"version": 1, "num_items": 1, "items": [{**ITEM, **changes}]}, TENSORS)


def test_the_item_that_lies_are_told_in_is_good() -> None:
    assert read_as_any(one_item())


def test_an_id_that_is_read_can_be_written() -> None:
    for value in (*ODD_VALUES.values(), 2**63, 10**400):
        for part in ("batch", "task", "run", "step", "suffix"):
            for data in (
                one_item(eid={**ITEM["eid"], part: value}),
                corpus.legacy_pickle([{**STATE, "eid": {**STATE["eid"], part: value}}]),
            ):
                for row in judged(lambda data=data: Experience.deserialize_many(data)) or ():
                    assert Experience.deserialize(row.serialize()).eid == row.eid


@pytest.mark.parametrize("name", ODD_VALUES)
def test_a_trxp_item_with_any_value_under_any_key_does_no_harm(name: str) -> None:
    value = ODD_VALUES[name]
    taken = 0
    for key in (*ITEM, "made_up", "rollbook", "experience_type"):
        taken += read_as_any(one_item(**{key: value}))
    for key in (*LEGACY_KEYS, "action_mask", "tokens", "parent", "finish_reason"):
        for more in ({}, {"truncate_status": "prompt_truncated"}):
            taken += read_as_any(one_item(**more, rollbook={**ITEM["rollbook"], key: value}))
    assert taken, "no key took the value: the attack did not come past the first check"


@pytest.mark.parametrize("name", ODD_VALUES)
def test_a_trxp_meta_with_any_value_under_any_key_does_no_harm(name: str) -> None:
    value = ODD_VALUES[name]
    good = {"version": 1, "num_items": 1, "items": [ITEM]}
    for key in good:
        read_as_any(corpus.trxp_of({**good, key: value}, TENSORS))
    refused(corpus.trxp_of(value, TENSORS))
    if not isinstance(value, dict):
        refused(corpus.trxp_of({**good, "items": [value]}, TENSORS))
    if type(value) not in (bool, np.bool_) and name != "0-d tensor":
        refused(corpus.trxp_of({**good, "num_items": value}, TENSORS))


@pytest.mark.parametrize("keys", [["a"], [1], [[1]], [None], "a", {"a": 1}, [("a",)], ["a", "a"], 5])
def test_media_keys_that_are_not_those_of_the_tensors_are_refused(keys: Any) -> None:
    refused(one_item(multi_modal_input_keys=keys))
    # The same keys with a tensor that has each one's text for a name.
    names = [str(key) for key in keys] if isinstance(keys, (list, dict, str)) else [str(keys)]
    entries = {f"0:multi_modal_inputs:{name}": ("U8", [1], b"\1") for name in names}
    data = corpus.trxp_of(
        {"version": 1, "num_items": 1, "items": [{**ITEM, "multi_modal_input_keys": keys}]},
        tensors_of({"0:tokens": ("I32", [3], bytes(12)), **entries}),
    )
    read_as_any(data)


# --- lies in TRXP ---------------------------------------------------------------------------------------------------


def tensors_of(entries: dict[str, tuple[str, list[int], bytes]], **lies: Any) -> bytes:
    """A safetensors blob; `lies` replace parts of the first entry's description."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, part) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        if not data:
            header[name].update(lies)
        data += part
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_the_tensors_that_lies_are_told_in_are_good() -> None:
    data = corpus.trxp_of({"version": 1, "num_items": 1, "items": [ITEM]}, tensors_of(GOOD))
    rows = Experience.deserialize_many(data)
    assert rows[0].tokens.tolist() == [0, 0, 0]
    used(rows)


GOOD: dict[str, tuple[str, list[int], bytes]] = {
    "0:tokens": ("I32", [3], bytes(12)),
    "0:logprobs": ("F32", [2], bytes(8)),
}
LIES: list[dict[str, Any]] = [
    *({"data_offsets": span} for span in (
        [0, 11], [0, 13], [1, 12], [4, 12], [12, 0], [-1, 12], [0, 2**63], [0], [0, 6, 12], None, "ab", {}, [0.0, 12.0],
        [0, 20], [8, 20], [True, 12], [2**64, 2**64 + 12],
    )),
    *({"shape": shape} for shape in (
        [2], [4], [3, 0], [-3], [3.0], ["3"], None, 3, {}, [2**62], [2**32, 2**32], [2**63, 2], [1] * 65, [True, 3],
        [10**30],
    )),
    *({"dtype": name} for name in ("I31", "int32", "", None, 4, [], {}, "F64", "U8", "F32", "BOOL", "C64", "F4")),
    {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_a_header_in_another_encoding_is_refused(encoding: str) -> None:
    """Python's json guesses the encoding, and loads the codec that it guessed."""
    good = tensors_of(GOOD)
    size = struct.unpack_from("<Q", good)[0]
    text = good[8 : 8 + size].decode().encode(encoding)
    data = struct.pack("<Q", len(text)) + text + good[8 + size :]
    refused(corpus.trxp_of({"version": 1, "num_items": 1, "items": [ITEM]}, data))


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_tensor_whose_description_lies_is_refused(lie: dict[str, Any]) -> None:
    data = corpus.trxp_of({"version": 1, "num_items": 1, "items": [ITEM]}, tensors_of(GOOD, **lie))
    refused(data)


def blob(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, shape: str = "[1]", dtype: str = "U8") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{stop}]}}'


BLOBS: dict[str, bytes] = {
    "nothing": b"",
    "half a length": bytes(7),
    "no header": blob(b""),
    "a huge header": blob(b"{}", length=2**63),
    "a header past the end": blob(b"{}", length=3),
    "no json": blob(b"{"),
    "no utf-8": blob(b'{"\xff":1}'),
    "a list": blob(b"[]"),
    "a number": blob(b"5"),
    "deep": blob(b"[" * 100_000),
    "deep objects": blob(b'{"a":' * 100_000),
    "a long number": blob(b'{"0:tokens":' + b"9" * 100_000 + b"}"),
    "bytes behind": blob(b"{}", b"x"),
    "an entry that is none": blob(b'{"0:tokens":5}'),
    "an empty entry": blob(b'{"0:tokens":{}}'),
    "a hole": blob(f'{{"0:tokens":{entry(0, 1)},"0:chosen":{entry(2, 3)}}}'.encode(), bytes(3)),
    "an overlap": blob(f'{{"0:tokens":{entry(0, 2, "[2]")},"0:chosen":{entry(1, 3, "[2]")}}}'.encode(), bytes(3)),
    "the same bytes twice": blob(
        f'{{"0:tokens":{entry(0, 2, "[2]")},"0:chosen":{entry(0, 2, "[2]")}}}'.encode(), bytes(2)
    ),
    "a key twice": blob(f'{{"0:tokens":{entry(0, 2, "[2]")},"0:tokens":{entry(2, 4, "[2]")}}}'.encode(), bytes(4)),
    "bools of 2": blob(f'{{"0:action_mask":{entry(0, 2, "[2]", "BOOL")}}}'.encode(), b"\1\2"),
    "no item": blob(f'{{"1:tokens":{entry(0, 1)}}}'.encode(), bytes(1)),
    "a negative item": blob(f'{{"-1:tokens":{entry(0, 1)}}}'.encode(), bytes(1)),
    "a huge item": blob(f'{{"{"9" * 5000}:tokens":{entry(0, 1)}}}'.encode(), bytes(1)),
    "an item of superscripts": blob(f'{{"²:tokens":{entry(0, 1)}}}'.encode(), bytes(1)),
    "no name": blob(f'{{"0:":{entry(0, 1)}}}'.encode(), bytes(1)),
    "no colon": blob(f'{{"tokens":{entry(0, 1)}}}'.encode(), bytes(1)),
    "no elements, huge sizes": blob(f'{{"0:tokens":{entry(0, 0, f"[{2**61},{2**61},0]", "I32")}}}'.encode()),
    "no elements, huge strides": blob(f'{{"0:tokens":{entry(0, 0, f"[0,{2**61},{2**61}]", "I32")}}}'.encode()),
}


@pytest.mark.parametrize("name", BLOBS)
def test_a_tensor_part_that_lies_is_refused(name: str) -> None:
    refused(corpus.trxp_of({"version": 1, "num_items": 1, "items": [ITEM]}, BLOBS[name]))


@pytest.mark.parametrize("lie", [
    {"version": 0}, {"version": 2}, {"version": 255}, {"meta": 0}, {"meta": 1}, {"meta": 2**63}, {"meta": 2**64 - 1},
    {"tensors": 0}, {"tensors": 7}, {"tensors": 2**63}, {"tensors": 2**64 - 1},
    {"meta": 2**64 - 1, "tensors": 2**64 - 1},
])  # fmt: skip
def test_a_trxp_header_that_lies_is_refused(lie: dict[str, int]) -> None:
    meter = Meter()
    refused(corpus.trxp_of({"version": 1, "num_items": 0, "items": []}, lies=lie))
    assert meter.peak() < 8 << 20


@pytest.mark.parametrize("number", [0, 2, -1, 2**70, 1.5, "1", None, [1]])
def test_a_num_items_that_lies_is_refused(number: Any) -> None:
    refused(corpus.trxp_of({"version": 1, "num_items": number, "items": [ITEM]}, TENSORS))


def test_tensors_of_every_type_in_every_field_do_no_harm() -> None:
    from rollbook.core import fields, trxp

    taken = 0
    for name, dtype in trxp._SAFETENSORS.items():
        for field in fields.tensor_fields():
            for shape in ([2], [], [0], [2, 1], [2, 1, 1]):
                size = fields.DTYPES[dtype].itemsize * int(np.prod(shape))
                entries = {"0:tokens": ("I32", [3], bytes(12)), f"0:{field.name}": (name, shape, bytes(size))}
                for more in ({}, {"truncate_status": "prompt_truncated"}):
                    meta = {"version": 1, "num_items": 1, "items": [{**ITEM, **more}]}
                    taken += read_as_any(corpus.trxp_of(meta, tensors_of(entries)))
    assert taken > 500
