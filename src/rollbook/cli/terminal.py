"""What the commands print: tables, numbers, colours; plain where the output is not a terminal.

Invariant: nothing that a record holds reaches a terminal as a command to it: control, escape and bidirectional
characters are shown as what they are. Colours are only where a terminal shows them, and nothing is said by them alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

OK, FOUND, UNREADABLE = 0, 1, 2
"""How a command ends: well; something was found; it could not be done."""
WHEN = ("auto", "always", "never")
_NAMED = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_when = "auto"


def use_colour(when: str) -> None:
    """Say for this run of a command whether to colour: `auto`, `always` or `never`."""
    global _when
    _when = when


def coloured() -> bool:
    """Whether the output is coloured: a terminal, unless NO_COLOR is set or the user said otherwise."""
    if _when != "auto":
        return _when == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def deep() -> bool:
    """Whether the terminal shows any colour, not only 256 of them."""
    return os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit")


def styled(text: str, *names: str) -> str:
    """Text in a style, where colours are on.

    >>> styled("plain", "bold")
    'plain'
    """
    if not coloured() or not text:
        return text
    return f"\x1b[{';'.join(_NAMED[name] for name in names)}m{text}\x1b[0m"


def painted(text: str, back: tuple[int, int, int], front: tuple[int, int, int], *, underline: bool = False) -> str:
    """Text on a colour of its own, where colours are on."""
    if not coloured() or not text:
        return text
    if deep():
        code = f"48;2;{back[0]};{back[1]};{back[2]};38;2;{front[0]};{front[1]};{front[2]}"
    else:
        code = f"48;5;{_cube(back)};38;5;{_cube(front)}"
    return f"\x1b[{code}{';4' if underline else ''}m{text}\x1b[0m"


def _cube(colour: tuple[int, int, int]) -> int:
    """The nearest of the 216 colours that most terminals have."""
    red, green, blue = (min(5, round(each / 51)) for each in colour)
    return 16 + 36 * red + 6 * green + blue


# --- text -----------------------------------------------------------------------------------------------------------


def printable(value: Any) -> str:
    """A value on one line, without anything that a terminal would obey: a record's texts are anybody's.

    >>> printable("red: \\x1b[31m"), printable(0.1234567), printable(None)
    ('red: \\\\x1b[31m', '0.123457', '')
    """
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(map(shown, text))


def shown(each: str) -> str:
    """A character, or its number where it is none that is seen."""
    return each if each.isprintable() else each.encode("unicode_escape").decode()


def block(text: str) -> str:
    """Text of several lines: new lines stay, all else as `printable` says."""
    return "".join(each if each == "\n" else "    " if each == "\t" else shown(each) for each in text)


def width(text: str) -> int:
    """How many columns a text takes.

    >>> width("漢字"), width("e\\u0301")
    (4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def cut(text: str, columns: int) -> str:
    """The beginning of a text that fits.

    >>> cut("a long one", 6)
    'a lon…'
    """
    if width(text) <= columns:
        return text
    kept, used = [], 1
    for each in text:
        used += width(each)
        if used > columns:
            break
        kept.append(each)
    return "".join(kept) + "…"


def tail(text: str, columns: int = 60) -> str:
    """The end of a text, on one line.

    >>> tail("one two three", 6)
    '…three'
    """
    return text if width(text) <= columns else "…" + cut(text[::-1], columns)[:-1][::-1]


def columns() -> int:
    """How wide the output is: the terminal's width; without limit where there is none."""
    if not sys.stdout.isatty():
        return 1_000_000
    return max(40, shutil.get_terminal_size().columns)


def size(count: float) -> str:
    """Bytes, for people.

    >>> size(5_190_000)
    '5.19 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def when(seconds: Any) -> str | None:
    """A time of the ledger as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(seconds)))
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def figure(value: Any, digits: int = 3) -> str:
    """A number in few digits; a dash for none.

    >>> figure(0.123456), figure(None), figure(1234), figure(123456.7)
    ('0.123', '-', '1,234', '123,457')
    """
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """A share as percent.

    >>> percent(0.125), percent(None)
    ('12.5%', '-')
    """
    return "-" if share is None else f"{100 * share:.3g}%"


_LEVELS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float | None]) -> str:
    """A line of small bars, from the lowest value to the highest.

    >>> spark([0.0, 0.5, 1.0, None])
    '▁▅█ '
    """
    known = [value for value in values if value is not None and value == value and abs(value) != float("inf")]
    if not known:
        return " " * len(values)
    low, high = min(known), max(known)
    made = []
    for value in values:
        if value is None or value != value or abs(value) == float("inf"):
            made.append(" ")
        else:
            made.append(_LEVELS[0] if high == low else _LEVELS[round((value - low) / (high - low) * 7)])
    return "".join(made)


# --- output ---------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Strict JSON: what is not finite is null, and what JSON has no word for is its text."""
    print(json.dumps(_strict(value), indent=2, default=str, ensure_ascii=False, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return value


_NARROWEST = 8
"""A column of texts is not cut further."""


def print_table(names: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """A table of any values (see `table`). `right`: the columns that stand at the right."""
    lines = [[printable(value) for value in row] for row in rows]
    for line in table(names, lines, right=right):
        print(line)


def table(names: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """The lines of a table of texts that are safe to print; where the terminal is too narrow, the longest texts are
    cut, but never numbers (`right`) or the first column, which names the row."""
    widths = [max(width(line[i]) for line in (names, *rows)) for i in range(len(names))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= columns() else 1
    over = sum(widths) + gap * (len(widths) - 1) - columns()
    texts = [i for i in range(1, len(widths)) if i not in right]
    while over > 0 and (widest := max(texts, key=widths.__getitem__, default=0)) and widths[widest] > _NARROWEST:
        others = max((widths[i] for i in texts if i != widest), default=0)
        less = min(over, max(1, widths[widest] - max(others, _NARROWEST)))
        widths[widest] -= less
        over -= less
    for number, line in enumerate((names, *rows)):
        cells = []
        for i, (wide, cell) in enumerate(zip(widths, line, strict=True)):
            shown = cut(cell, wide)
            space = " " * (wide - width(shown))
            cells.append(space + shown if i in right else shown + space)
        text = (" " * gap).join(cells).rstrip()
        yield styled(text, "bold") if number == 0 else text
