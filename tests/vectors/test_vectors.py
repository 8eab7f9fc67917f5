"""The published vectors: Rollbook gives them, the reference makes them, peers differ where the file says so, and the
pages work them by hand."""

from __future__ import annotations

import importlib
import json
import math
import re
from typing import Any

import pytest
import torch

from rollbook.algorithms.advantages import ESTIMATORS
from rollbook.algorithms.kl import KL, kl, token_kl
from rollbook.algorithms.losses import LOSSES
from rollbook.batch.plan import Denominators
from rollbook.core.rows import Rows
from tests.conformance.algorithms import LIGHTRFT, TRINITY
from tests.vectors import make, peers

FILE = make.written()
VECTORS = {vector["id"]: vector for vector in FILE["vectors"]}
FUNCTIONS = sorted({vector["function"] for vector in FILE["vectors"]})
BESIDE = {
    "aggregate.aggregate",
    "corrections.diagnostics",
    "corrections.importance_weights",
    "filters.clip_filter_like_weight_func",
    "filters.high_entropy_mask",
    "groups.whiten",
    "shaping.overlong_penalty",
    "logprobs.entropy_from_logits",
    "logprobs.from_logits",
}
"""Functions that are in no registry and have vectors all the same."""
TOKENS = {
    *(
        "mask",
        "response",
        "token_rewards",
        "values",
        "logprobs",
        "new_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "entropy",
        "necs",
    ),
    *("teacher_logprobs", "returns", "old_values", "advantages", "weights"),
}
LAYOUTS = ("right", "left", "packed")


# --- running a vector -----------------------------------------------------------------------------------------------


class RaggedBatch:
    """Rows of tokens laid out one way, and results read back from it."""

    def __init__(self, layout: str, dtype: torch.dtype, lengths: list[int]) -> None:
        self.layout, self.dtype, self.lengths = layout, dtype, lengths

    def _spans(self) -> list[slice]:
        width = max(self.lengths, default=0) + 1  # wider than need be: padding is to change nothing
        starts = [width - n if self.layout == "left" else 0 for n in self.lengths]
        return [slice(start, start + n) for start, n in zip(starts, self.lengths, strict=True)]

    def lay(self, name: str, rows: list[list[Any]]) -> Any:
        """Tokens as a matrix with NaN for padding (masks: 0), or end to end; floating ones are leaves."""
        flags = name in ("mask", "response")
        dtype = torch.int64 if flags else self.dtype
        parts = [torch.tensor([math.nan if x is None else x for x in row], dtype=dtype) for row in rows]
        if self.layout == "packed":
            values = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
            return Rows(values if flags else values.requires_grad_(), self.lengths)
        matrix = torch.full((len(rows), max(self.lengths, default=0) + 1), 0 if flags else math.nan, dtype=dtype)
        for i, (part, span) in enumerate(zip(parts, self._spans(), strict=True)):
            matrix[i, span] = part
        return matrix if flags else matrix.requires_grad_()

    def read(self, result: Any) -> Any:
        """Rows of numbers; padding must be 0."""
        if isinstance(result, Rows):
            return [row.tolist() for row in result.values.detach().split(result.lengths)] if result.lengths else []
        if isinstance(result, torch.Tensor) and result.dim() == 2 and self.layout != "packed":
            rest = result.detach().clone()
            rows = [rest[i, span].clone() for i, span in enumerate(self._spans())]
            for i, span in enumerate(self._spans()):
                rest[i, span] = 0
            assert not rest.any(), "padding is not 0"
            return [row.tolist() for row in rows]
        return result.detach().tolist() if isinstance(result, torch.Tensor) else result

    def slope(self, leaf: Any) -> Any:
        tensor = leaf.values if isinstance(leaf, Rows) else leaf
        slope = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        return self.read(Rows(slope, self.lengths) if isinstance(leaf, Rows) else slope)


def computed(vector: dict[str, Any], layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """What Rollbook gives for a vector, in the form of its outputs."""
    section, name = vector["function"].split(".")
    inputs, options = dict(vector["inputs"]), dict(vector["options"])
    if section in ("logprobs", "shaping") or name == "clip_filter_like_weight_func":
        return _plain(section, name, inputs, options, dtype)
    nested = {key: value for key, value in inputs.items() if key in TOKENS and _nested(value)}
    lengths = [len(row) for row in next(iter(nested.values()))] if nested else []
    sheet = RaggedBatch(layout, dtype, lengths)
    if nested and layout != "packed" and "mask" not in inputs:
        inputs["mask"] = [[1] * n for n in lengths]
    arguments = {
        key: sheet.lay(key, value) if key in TOKENS and _nested(value) else value for key, value in inputs.items()
    }
    for key in ("rewards", "step_rewards", "baselines"):
        if key in arguments:
            arguments[key] = torch.tensor([math.nan if x is None else x for x in arguments[key]], dtype=dtype)
    for key, value in arguments.items():
        if isinstance(value, list) and not isinstance(value, Rows) and all(isinstance(x, float) for x in value):
            arguments[key] = torch.tensor(value, dtype=dtype, requires_grad=key.endswith("logprobs"))
    if _nested(options.get("weights")):
        options["weights"] = sheet.lay("weights", options["weights"])
    if isinstance(options.get("denominators"), dict):
        options["denominators"] = Denominators(**options["denominators"])
    if section == "advantages":
        outputs = ESTIMATORS[name].call(arguments, options)
        columns = {"advantages": outputs.advantages, "returns": outputs.returns, "mask": outputs.mask}
        return {key: sheet.read(columns[key]) for key in vector["outputs"]}
    if section == "kl":
        result = token_kl(**arguments, estimator=name, **options)
        (result.values if isinstance(result, Rows) else result).sum().backward()
        return {"values": sheet.read(result), "gradient": {"logprobs": sheet.slope(arguments["logprobs"])}}
    if section == "losses":
        loss = LOSSES.call(name, arguments, **options)
        if loss.value.requires_grad:
            loss.backward()
        slopes = {key: sheet.slope(arguments[key]) for key in vector["outputs"]["gradient"]}
        return {"value": loss.value.item(), "gradient": slopes}
    result = getattr(importlib.import_module(f"rollbook.algorithms.{section}"), name)(**arguments, **options)
    if name == "diagnostics":
        return dict(result)
    if name == "importance_weights":
        return {"weights": sheet.read(result.weights), "mask": sheet.read(result.mask)}
    return {next(iter(vector["outputs"])): sheet.read(result)}


def _nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, list) for row in value)


def _plain(section: str, name: str, inputs: Any, options: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Functions that know no layout."""
    package = "models" if section == "logprobs" else "algorithms"
    function = getattr(importlib.import_module(f"rollbook.{package}.{section}"), name)
    if name == "clip_filter_like_weight_func":
        return {"weights": function(torch.tensor(inputs.pop("rewards"), dtype=dtype), **inputs, **options).tolist()}
    if section == "shaping":
        return {"penalties": function(torch.tensor(inputs["lengths"], dtype=dtype), **options).tolist()}
    rows = [[-math.inf if x is None else x for x in row] for row in inputs["logits"]]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    if name == "entropy_from_logits":
        entropy = function(logits, **options)
        entropy.sum().backward()
        return {"entropy": entropy.tolist(), "gradient": {"logits": logits.grad.tolist()}}  # type: ignore[union-attr]
    outputs = function(logits, torch.tensor(inputs["labels"]), entropy=True, **options)
    outputs.logprobs.sum().backward()
    slopes = {"logits": logits.grad.tolist()}  # type: ignore[union-attr]
    return {"logprobs": outputs.logprobs.tolist(), "entropy": outputs.entropy.tolist(), "gradient": slopes}


def same(actual: Any, expected: Any, tolerance: float, path: str = "") -> None:
    """Whether two results are the same, number by number; `None` is NaN."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), path
        for key in expected:
            same(actual[key], expected[key], tolerance, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            same(a, b, tolerance, f"{path}[{i}]")
    elif expected is None:
        assert actual is None or math.isnan(actual), f"{path}: got {actual}, expected NaN"
    else:
        assert actual is not None, f"{path}: got NaN, expected {expected}"
        assert abs(actual - expected) <= tolerance * max(1, abs(expected)), f"{path}: got {actual}, expected {expected}"


# --- Rollbook, and the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VECTORS)
def test_rollbook_gives_the_vectors(name: str, layout: str) -> None:
    vector = VECTORS[name]
    same(computed(vector, layout, torch.float32), vector["outputs"], vector["tolerance"])
    # In float64 only the rounding of the file to ten digits is left.
    same(computed(vector, layout, torch.float64), vector["outputs"], 1e-9)


def test_divergences_are_elementwise_too() -> None:
    for vector in (vector for vector in FILE["vectors"] if vector["function"].startswith("kl.")):
        rows = vector["inputs"]
        keep = [bool(m) for row in rows.get("mask", [[1] * len(r) for r in rows["logprobs"]]) for m in row]
        flat = {key: [x for row in value for x in row] for key, value in rows.items() if key != "mask"}
        flat = {key: [x for x, m in zip(value, keep, strict=True) if m] for key, value in flat.items()}
        tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in flat.items()}
        divergences = kl(vector["function"].removeprefix("kl."), **tensors, **vector["options"])
        expected = [x for row in vector["outputs"]["values"] for x in row]
        same(divergences.tolist(), [x for x, m in zip(expected, keep, strict=True) if m], 2e-9)


def test_the_reference_makes_the_file_byte_for_byte() -> None:
    peers = {name: vector["peers"] for name, vector in VECTORS.items()}
    assert make.text(peers) == make.FILE.read_text(), "run: python -m tests.vectors.make"


def test_the_file_is_strict_json_with_one_schema() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    document = json.loads(make.FILE.read_text(), parse_constant=refuse)
    assert document["format"] == 1 and len(VECTORS) == len(document["vectors"])
    for vector in document["vectors"]:
        keys = ["id", "function", "cites", "inputs", "options", "outputs", "tolerance", "peers"]
        assert list(vector) == keys, vector["id"]


def test_every_function_has_vectors() -> None:
    """A new function without one fails here."""
    registered = {f"{section}.{name}" for section, registry in REGISTRIES.items() for name in registry.names()}
    assert set(FUNCTIONS) == registered | BESIDE


REGISTRIES = {"advantages": ESTIMATORS, "kl": KL, "losses": LOSSES}


def test_options_of_vectors_exist_and_most_functions_have_several() -> None:
    count = dict.fromkeys(FUNCTIONS, 0)
    for vector in FILE["vectors"]:
        section, name = vector["function"].split(".")
        count[vector["function"]] += 1
        if section in REGISTRIES:
            assert set(vector["options"]) <= set(REGISTRIES[section][name].options), vector["id"]
    with_one_vector = {function for function, n in count.items() if n < 2}
    assert with_one_vector <= {"kl.none", "kl.k1", "kl.k2", "kl.k3", "kl.abs"}, with_one_vector


def test_registries_cite_what_the_vectors_cite() -> None:
    for section, registry in (("advantages", ESTIMATORS), ("kl", KL), ("losses", LOSSES)):
        for name in registry.names():
            assert registry[name].source == make.CITES[f"{section}.{name}"]


def test_shared_cases_that_are_named_exist() -> None:
    for vector in FILE["vectors"]:
        for whose, name in re.findall(r"(Trinity-RFT|LightRFT)'s case (\S+)", vector["cites"]):
            assert name in (TRINITY if whose == "Trinity-RFT" else LIGHTRFT), (vector["id"], name)


# --- peers ----------------------------------------------------------------------------------------------------------


@pytest.mark.downloads
@pytest.mark.parametrize("function", sorted({function for calls in peers.CALLS.values() for function in calls}))
def test_peers_give_what_the_file_says(function: str) -> None:
    for vector in (vector for vector in FILE["vectors"] if vector["function"] == function):
        measured = peers.measured(vector)
        assert list(measured) == list(vector["peers"]), vector["id"]
        for peer, entry in measured.items():
            listed = vector["peers"][peer]
            assert set(entry) == set(listed), (vector["id"], peer)
            for key, value in entry.items():
                if key in ("call", "raises", "note"):
                    assert value == listed[key], (vector["id"], peer)
                else:
                    same(value, listed[key], vector["tolerance"], f"{vector['id']}: {peer}")


def test_a_peer_has_a_note_exactly_where_its_number_is_another() -> None:
    count = {True: 0, False: 0}
    for vector in FILE["vectors"]:
        for peer, entry in vector["peers"].items():
            assert ("note" in entry) != agrees(vector, entry), (vector["id"], peer)
            count["note" in entry] += 1
    assert count[True] > 40 and count[False] > 100  # the file is not empty of peers


def agrees(vector: dict[str, Any], entry: dict[str, Any]) -> bool:
    if "raises" in entry:
        return False
    outputs = {key: value for key, value in vector["outputs"].items() if key in entry}
    try:
        same({key: entry[key] for key in outputs}, outputs, vector["tolerance"])
    except AssertionError:
        return False
    return True


# --- the pages ------------------------------------------------------------------------------------------------------

DOCS = make.FILE.parent
WORDS = {name: getattr(math, name) for name in ("comb", "cos", "exp", "log", "pi", "sqrt")}
WORDS |= {"abs": abs, "max": max, "min": min, "sigmoid": lambda x: 1 / (1 + math.exp(-x))}


def shown(text: str, expected: Any, place: str) -> None:
    """Whether numbers as they are printed are those wanted, to the digits printed."""
    printed = re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?|NaN", text)
    numbers = list(leaves(expected))
    assert len(printed) == len(numbers), f"{place}: {text}"
    for word, number in zip(printed, numbers, strict=True):
        if word == "NaN":
            assert number is None or math.isnan(number), f"{place}: {text}"
            continue
        unit = 10.0 ** -len(word.partition(".")[2])
        assert number is not None and abs(float(word) - number) <= 0.51 * unit, f"{place}: {word} is {number}"


def leaves(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def sections() -> dict[str, str]:
    parts = re.split(r"^### (\S+)\n", (DOCS / "vectors.md").read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_function_is_worked_by_hand() -> None:
    assert sorted(sections()) == FUNCTIONS


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_worked_by_hand_is_right(function: str) -> None:
    body = sections()[function]
    vector = VECTORS[re.findall(r"^`([^`]+)`: ", body, flags=re.MULTILINE)[0]]
    assert vector["function"] == function
    steps, results = [], []
    lines = "\n".join(line for line in body.splitlines() if line.startswith("- "))
    for span in re.findall(r"`([^`]+)`", lines):
        left, right = span.split(" = ")
        path = left.split(".")
        if path[0] in vector["outputs"]:
            expected = vector["outputs"]
            for key in path:
                expected = expected[key]
            assert json.loads(right) is not None
            shown(right, expected, f"{function}: {left}")
            results += list(leaves(expected))
        else:
            value = float(eval(left, {"__builtins__": {}}, WORDS))
            shown(right, value, f"{function}: {left}")
            steps.append(value)
    assert steps and results
    if set(vector["outputs"]) != {"mask"} and "mask =" not in body:  # what is worked out is what the vector has
        assert any(abs(a - b) < 1e-5 for a in steps for b in results), function


def test_the_example_of_a_check_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "vectors.md").read_text(), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert len(scope["checked"]) > 3
    wrong = [
        [x + 1e-3 for x in row] if isinstance(row, list) else row
        for row in scope["checked"][0]["outputs"]["advantages"]
    ]
    assert not scope["close"]([x + 1e-3 for x in leaves(wrong)], list(leaves(wrong)), 2e-6)


def page() -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", (DOCS / "other_frameworks.md").read_text(), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_the_page_about_peers_has_a_section_for_each_difference() -> None:
    assert list(page()) == ["", *peers.PAGE]


@pytest.mark.downloads
def test_numbers_of_the_page_about_peers() -> None:
    """Each row: what the peer gives, and what Rollbook's expression beside it gives."""
    scope: dict[str, Any] = {}
    compared = 0
    for title, text in page().items():
        for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(code, scope)
        if title not in peers.PAGE:
            continue
        table = {row[0]: row for row in rows_of(text)}
        assert set(table) == set(peers.PAGE[title]), title
        column = next(i for i, name in enumerate(table_head(text)) if name not in ("framework", "eps"))
        for peer, row in table.items():
            shown(row[column], peers.PAGE[title][peer](), f"{title}: {peer}")
            for call in re.findall(r"`([^`]+)`", row[-1]):
                match = re.match(r"(\d+): ", row[-1])
                value = list(leaves(eval(call, scope)))
                if match:  # Rollbook's own number stands before its expression
                    assert set(value) == {float(match[1])}, (title, peer)
                else:
                    shown(row[column], value, f"{title}: {call}")
                compared += 1
    assert compared > 30
    same(list(leaves(eval("gae(**trailing, rewards=[1.0]).advantages[0][:2]", scope))), [0.431, 0.4], 1e-6)


def table_head(text: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith("| "))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_list_of_differences_is_the_files() -> None:
    text = (DOCS / "vectors.md").read_text().split("## Differences of released packages\n")[1].split("\n# ")[0]
    listed = {(row[0], row[1]): re.findall(r"`([^`]+)`", row[2]) for row in rows_of(text)}
    by_note: dict[tuple[str, str], list[str]] = {}
    entries = [(vector["id"], peer, entry) for vector in FILE["vectors"] for peer, entry in vector["peers"].items()]
    for name, peer, entry in entries:
        if "note" in entry:
            by_note.setdefault((peer, entry["note"]), []).append(name)
    assert listed == by_note
    differ = sum(map(len, by_note.values()))
    assert f"That is {differ} of {len(entries)} calls; the other {len(entries) - differ} agree" in text
