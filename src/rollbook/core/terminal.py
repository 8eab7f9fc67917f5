"""What the commands print: tables, numbers, colours; plain where the output is not a terminal.

Invariant: nothing that a record holds reaches a terminal as a command to it: control, escape and bidirectional
characters are shown as what they are. Colours are only where a terminal shows them, and nothing is said by them alone.
"""

from __future__ import annotations

import json
import os
import re
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
_STYLE = re.compile("\x1b\\[[0-9;]*m")


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
    red, green, blue = (min(5, round(channel / 51)) for channel in colour)
    return 16 + 36 * red + 6 * green + blue


# --- text -----------------------------------------------------------------------------------------------------------


def printable(value: Any) -> str:
    """A value on one line, without anything that a terminal would obey: a record's texts are anybody's.

    >>> printable("red: \\x1b[31m"), printable(0.1234567), printable(None)
    ('red: \\\\x1b[31m', '0.123457', '')
    """
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(map(shown, text))


def shown(character: str) -> str:
    """A character, or its number where it is none that is seen."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def block(text: str) -> str:
    """Text of several lines: new lines stay, all else as `printable` says."""
    return "".join(
        character if character == "\n" else "    " if character == "\t" else shown(character) for character in text
    )


def width(text: str) -> int:
    """How many columns a text takes.

    >>> width("漢字"), width("e\\u0301")
    (4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def cut(text: str, columns: int) -> str:
    """The beginning of a text that fits, up to a space where there is one.

    >>> cut("a long one", 8), cut("uninterrupted", 6)
    ('a long…', 'unint…')
    """
    if width(text) <= columns:
        return text
    end, used = 0, 1
    for end, character in enumerate(text):  # noqa: B007
        used += width(character)
        if used > columns:
            break
    space = end if text[end] == " " else text.rfind(" ", 0, end)
    return text[: space if space > 0 else end].rstrip() + "…"


def tail(text: str, columns: int = 60) -> str:
    """The end of a text, on one line.

    >>> tail("one two three", 6), tail("one two three", 10)
    ('…three', '…two three')
    """
    return text if width(text) <= columns else "…" + cut(text[::-1], columns)[:-1][::-1]


def wrapped(text: str, indent: int = 0, *, limit: int | None = None) -> str:
    """A line as lines that fit the terminal, broken at spaces; those after the first are indented.

    >>> print(wrapped("tokens  14 of the prompt", 8, limit=18))
    tokens  14 of the
            prompt
    """
    limit = columns() if limit is None else limit
    lines = [""]
    for word in re.findall(r" *[^ ]+", text):
        if lines[-1].strip() and width(_STYLE.sub("", lines[-1] + word)) > limit:
            lines.append(" " * indent + word.lstrip(" "))
        else:
            lines[-1] += word
    return "\n".join(lines)


def broken(text: str) -> str:
    """A text with new lines for some of its spaces, so that no line is wider than the terminal where that can be.

    Each character stays in its place, for whoever counts them.
    """
    limit, lines, start = columns(), list(text), 0
    used, space = 0, -1
    for at, character in enumerate(text):
        if character == "\n":
            used, space = 0, -1
            continue
        if character == " ":
            space, start = at, used
        used += width(block(character))
        if used > limit and space >= 0:
            lines[space] = "\n"
            used -= start + 1
            space = -1
    return "".join(lines)


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
    finite = [number for number in values if number is not None and number == number and abs(number) != float("inf")]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    bars = []
    for number in values:
        if number is None or number != number or abs(number) == float("inf"):
            bars.append(" ")
        else:
            bars.append(_LEVELS[0] if high == low else _LEVELS[round((number - low) / (high - low) * 7)])
    return "".join(bars)


# --- output ---------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Strict JSON: what is not finite is null, and what JSON has no word for is its text."""
    print(json.dumps(_strict(value), indent=2, default=str, ensure_ascii=False, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    return value


_LONGEST_WORD = 16
"""A column of texts is as wide as its longest word, up to this."""


def print_table(names: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """A table of any values (see `table`); columns that do not fit are named below it.

    `right`: the columns that stand at the right.
    """
    lines = [[printable(cell) for cell in row] for row in rows]
    hidden = _hidden(names, lines, right, range(len(names) - 1, 0, -1))
    for line in table(names, lines, right=right, optional=range(len(names) - 1, 0, -1)):
        print(line)
    if hidden:
        print(styled(wrapped(f"not shown: {', '.join(names[i] for i in sorted(hidden))}; --json has them"), "dim"))


def table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    ends: Sequence[int] = (),
    optional: Sequence[int] = (),
) -> Iterator[str]:
    """The lines of a table of texts that are safe to print.

    Where the terminal is too narrow, the longest texts are cut, but never numbers (`right`) or the first column, which
    names the row; where that is not enough, columns are left out.

    Args:
        names: The columns' names.
        rows: Their cells.
        right: The columns that stand at the right.
        ends: The columns of texts whose end is shown rather than their beginning.
        optional: The columns that may be left out, the first first; before these, those of them that say nothing.
    """
    hidden = _hidden(names, rows, right, optional)
    shown = [i for i in range(len(names)) if i not in hidden]
    widths = {i: max(width(line[i]) for line in (names, *rows)) for i in shown}
    gap = 2 if sum(widths.values()) + 2 * (len(widths) - 1) <= columns() else 1
    over = sum(widths.values()) + gap * (len(widths) - 1) - columns()
    least = {i: _least(i, names, rows) for i in shown[1:] if i not in right}
    while over > 0 and (wide := [i for i in least if widths[i] > least[i]]):
        widest = max(wide, key=widths.__getitem__)
        widths[widest] -= 1
        over -= 1
    for number, line in enumerate((names, *rows)):
        cells = []
        for i in shown:
            cell = (tail if i in ends else cut)(line[i], widths[i])
            space = " " * (widths[i] - width(cell))
            cells.append(space + cell if i in right else cell + space)
        text = (" " * gap).join(cells).rstrip()
        yield styled(text, "bold") if number == 0 else text


def _least(i: int, names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """How wide a column of texts is at least."""
    longest = max((width(word) for row in rows for word in row[i].split(" ")), default=0)
    return max(width(names[i]), min(longest, _LONGEST_WORD))


def _hidden(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], optional: Sequence[int]
) -> set[int]:
    """The columns that are left out for the others to fit."""
    widths = [max(width(line[i]) for line in (names, *rows)) for i in range(len(names))]
    needed = [wide if i == 0 or i in right else min(wide, _least(i, names, rows)) for i, wide in enumerate(widths)]
    empty = [i for i in optional if all(row[i] in ("", "-") for row in rows)]
    hidden: set[int] = set()
    for i in (*empty, *optional):
        if sum(needed[j] + 1 for j in range(len(names)) if j not in hidden) - 1 <= columns():
            break
        hidden.add(i)
    return hidden
