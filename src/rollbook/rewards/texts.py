"""Ready functions about the text itself: JSON that is a value or keeps a schema, length, repetition.

Invariant: length and repetition are those of `rollbook.algorithms.shaping`; nothing is computed twice, in two ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from rollbook.core.checks import check_choice
from rollbook.rewards.functions import batched
from rollbook.rewards.pools import MissingExtra

_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)


def json_errors(text: str, schema: Any = None, *, most: int = 10) -> list[str]:
    """What is wrong with a text as JSON, or with its value by a schema; nothing, if it is as it should be.

    The text is JSON as a whole, or its last fenced block (three back ticks) is. `NaN`, duplicate keys and nesting that
    is too deep to read are errors. References in a schema to other documents are never fetched.

    >>> json_errors('{"age": 3}', {"type": "object", "required": ["name"]})
    ["$: 'name' is a required property"]
    >>> json_errors('{"age": ')
    ['not JSON: Expecting value: line 1 column 9 (char 8)']
    """
    try:
        value = _value(text)
    except (ValueError, RecursionError) as error:
        return [f"not JSON: {str(error)[:200]}"]
    if schema is None:
        return []
    try:
        found = sorted(_validator(json.dumps(schema)).iter_errors(value), key=lambda error: list(map(str, error.path)))
    except RecursionError:
        return ["$: nested too deep to be checked"]
    return [f"{error.json_path}: {error.message[:200]}" for error in found[:most]]


def _value(text: str) -> Any:
    """The value of a text that is JSON, or whose last fenced block is."""
    blocks = _FENCE.findall(text)
    return json.loads(blocks[-1] if blocks else text, parse_constant=_no_constant, object_pairs_hook=_once)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    try:
        import jsonschema
        from referencing import Registry
    except ImportError:
        raise MissingExtra("a JSON schema needs jsonschema: pip install 'rollbook[json]'") from None
    plain = json.loads(schema)
    kind = jsonschema.validators.validator_for(plain, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(plain)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema: got one that is none: {error.message[:200]}") from None
    if isinstance(plain, dict) and plain and not plain.keys() & kind.VALIDATORS.keys():
        names = ", ".join(map(repr, list(plain)[:8]))
        raise ValueError(f"schema: got the keys {names}, expected a JSON schema: none of them checks anything")
    return kind(plain, registry=Registry())


def json_match(response: str, reference: Any) -> float:
    """1 if the response is JSON of the same value as the reference, else 0.

    reference: a value, or its JSON text (a text that is no JSON stands for itself). Numbers are equal by their value
    (`1` is `1.0`, `true` is neither), objects whatever the order of their keys. `json_schema` asks for a form instead.

    >>> json_match('{"a": 1.0, "b": [true]}', {"b": [True], "a": 1}), json_match('{"z": 9}', '{"a": 1}')
    (1.0, 0.0)
    """
    if reference is None:
        raise ValueError("reference: got None, expected a value, or its JSON text ('null' for none)")
    try:
        right = json.loads(reference) if isinstance(reference, str) else json.loads(json.dumps(reference))
    except TypeError as error:
        raise ValueError(f"reference: got {type(reference).__name__}, expected what JSON can say ({error})") from None
    except ValueError:
        right = reference
    try:
        return float(_equal(_value(response), right))
    except (ValueError, RecursionError):
        return 0.0


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def json_schema(response: str, reference: Any = None, *, schema: Any = None) -> dict[str, float]:
    """1 if the response is JSON that keeps the schema, else 0; `json` (it is JSON at all) and `errors` are metrics.

    schema: given once for all samples (`as_reward("json_schema", schema=...)`), else each sample's reference, a
    mapping or its JSON text. `json_errors` says what is wrong in words.

    >>> shape = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    >>> json_schema('{"age": 3}', shape), json_schema('{"age": "three"}', shape)["reward"], json_schema("three", shape)
    ({'reward': 1.0, 'json': 1.0, 'errors': 0.0}, 0.0, {'reward': 0.0, 'json': 0.0, 'errors': 1.0})
    >>> json_schema('{"z": 9}', {"a": 1})
    Traceback (most recent call last):
        ...
    ValueError: schema: got the keys 'a', expected a JSON schema: none of them checks anything
    """
    asked = schema if schema is not None else reference
    if isinstance(asked, str):
        try:
            asked = json.loads(asked)
        except ValueError as error:
            raise ValueError(f"schema: got {asked[:80]!r}, expected JSON ({error})") from None
    if not isinstance(asked, (dict, bool)):
        raise ValueError(f"schema: got {type(asked).__name__}, expected a JSON schema, or one as the reference")
    wrong = json_errors(response, asked)
    parsed = not (wrong and wrong[0].startswith("not JSON"))
    return {"reward": float(not wrong), "json": float(parsed), "errors": float(len(wrong))}


Unit = Literal["tokens", "words", "characters"]


def _units(responses: Sequence[str], ids: Sequence[Sequence[int]], unit: Unit) -> list[list[int]]:
    """Each response as numbers that are equal where its units are."""
    check_choice("unit", unit, ("tokens", "words", "characters"))
    if unit == "tokens":
        for i, (text, row) in enumerate(zip(responses, ids, strict=True)):
            if text and not len(row):
                raise ValueError(f"response_ids: got none for sample {i}, expected them, or unit='words'")
        return [list(row) for row in ids]
    if unit == "characters":
        return [[ord(mark) for mark in text] for text in responses]
    seen: dict[str, int] = {}
    return [[seen.setdefault(word, len(seen)) for word in text.split()] for text in responses]


@batched
def length(
    responses: Sequence[str],
    response_ids: Sequence[Sequence[int]],
    *,
    target: int = 1024,
    per_unit: float = 0.001,
    max_penalty: float = 1.0,
    unit: Unit = "tokens",
) -> list[float]:
    """[B] What each response loses for its length over `target`: `penalties.length_penalty`.

    >>> length(["a b c", "a"], [[], []], target=1, per_unit=0.25, unit="words")
    [-0.5, 0.0]
    """
    from rollbook.algorithms.shaping import length_penalty

    sizes = [len(row) for row in _units(responses, response_ids, unit)]
    if not sizes:
        return []
    found: list[float] = length_penalty(sizes, target=target, per_token=per_unit, max_penalty=max_penalty).tolist()
    return found


@batched
def repetition(
    responses: Sequence[str],
    response_ids: Sequence[Sequence[int]],
    *,
    n: int = 4,
    max_penalty: float = 1.0,
    unit: Unit = "tokens",
) -> list[float]:
    """[B] What each response loses for repeating itself, by its n-grams: `penalties.repetition_penalty`.

    >>> repetition(["a b a b a", "a b c d"], [[], []], n=2, unit="words")
    [-0.5, 0.0]
    """
    from rollbook.algorithms.shaping import repetition_penalty

    rows = _units(responses, response_ids, unit)
    found: list[float] = repetition_penalty(rows, n=n, max_penalty=max_penalty).tolist() if rows else []
    return found
