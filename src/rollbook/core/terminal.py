"""Output of the commands: tables, numbers and colors on a terminal, and HTML tables for notebooks.

Invariant: text from a record never controls the terminal: control, escape and bidirectional characters are escaped.
Colors are used only where they are supported, and never carry information alone. HTML is escaped.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollbook.core.freeform import Json

Color = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

OK, FOUND, UNREADABLE = 0, 1, 2
"""Exit codes: success, problems found, the command failed."""
COLOR_MODES = ("auto", "always", "never")
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_STYLE_CODE = re.compile("\x1b\\[[0-9;]*m")
_color_mode = "auto"


def set_color_mode(mode: str) -> None:
    """Set when output is colored: one of `COLOR_MODES`."""
    global _color_mode
    _color_mode = mode


def has_color() -> bool:
    """Return whether output is colored. With mode `auto`: on a terminal, unless `NO_COLOR` is set."""
    if _color_mode != "auto":
        return _color_mode == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, *names: str) -> str:
    """Add styles to a text if output is colored.

    Args:
        text: The text.
        names: Keys of `_STYLES`.

    Returns:
        The text with escape sequences, or unchanged.

    >>> styled("plain", "bold")
    'plain'
    """
    if not has_color() or not text:
        return text
    return f"\x1b[{';'.join(_STYLES[name] for name in names)}m{text}\x1b[0m"


def paint(text: str, back: Color, front: Color, *, underline: bool = False) -> str:
    """Color a text if output is colored.

    Args:
        text: The text.
        back: Color of the background.
        front: Color of the characters.
        underline: Whether to underline the text.

    Returns:
        The text with escape sequences, or unchanged.
    """
    if not has_color() or not text:
        return text
    if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        code = f"48;2;{back[0]};{back[1]};{back[2]};38;2;{front[0]};{front[1]};{front[2]}"
    else:
        code = f"48;5;{_palette_index(back)};38;5;{_palette_index(front)}"
    return f"\x1b[{code}{';4' if underline else ''}m{text}\x1b[0m"


def _palette_index(color: Color) -> int:
    """Return the nearest color of the 6 x 6 x 6 cube of the 256-color palette."""
    red, green, blue = (min(5, round(channel / 51)) for channel in color)
    return 16 + 36 * red + 6 * green + blue


# --- text -----------------------------------------------------------------------------------------------------------


def printable(value: Json) -> str:
    """Return a value as one line of text with control characters escaped.

    Args:
        value: A text, number or other value of a record; `None` gives the empty text.

    >>> printable("red: \\x1b[31m"), printable(0.1234567), printable(None)
    ('red: \\\\x1b[31m', '0.123457', '')
    """
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def block(text: str) -> str:
    """Return a text of several lines with control characters other than newlines escaped."""
    return "".join(
        character if character == "\n" else "    " if character == "\t" else _escape(character) for character in text
    )


def width(text: str) -> int:
    """Return the number of terminal columns of a text.

    >>> width("漢字"), width("e\\u0301")
    (4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def shorten(text: str, columns: int) -> str:
    """Truncate a text to a width, at a space if there is one.

    >>> shorten("a long one", 8), shorten("uninterrupted", 6)
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
    """Truncate a text to a width, keeping its end.

    >>> tail("one two three", 6), tail("one two three", 10)
    ('…three', '…two three')
    """
    return text if width(text) <= columns else "…" + shorten(text[::-1], columns)[:-1][::-1]


def wrapped(text: str, indent: int = 0, *, limit: int | None = None) -> str:
    """Wrap a text at spaces.

    Args:
        text: The text, which may have styles.
        indent: Spaces before each line but the first.
        limit: Width of the lines; `None`: that of the terminal.

    Returns:
        The lines, joined.

    >>> print(wrapped("tokens  14 of the prompt", 8, limit=18))
    tokens  14 of the
            prompt
    """
    limit = columns() if limit is None else limit
    lines = [""]
    for word in re.findall(r" *[^ ]+", text):
        if lines[-1].strip() and width(_STYLE_CODE.sub("", lines[-1] + word)) > limit:
            lines.append(" " * indent + word.lstrip(" "))
        else:
            lines[-1] += word
    return "\n".join(lines)


def break_lines(text: str) -> str:
    """Replace spaces by newlines so that lines fit the terminal. Every other character keeps its index."""
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
    """Return the width of the terminal, or 1,000,000 if the output is not a terminal."""
    if not sys.stdout.isatty():
        return 1_000_000
    return max(40, shutil.get_terminal_size().columns)


def size(count: float) -> str:
    """Format a number of bytes.

    >>> size(5_190_000)
    '5.19 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def when(timestamp: float | None) -> str | None:
    """Format a Unix time as local date and time, or return `None` if it is not valid."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(timestamp)))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def format_duration(seconds: float) -> str:
    """Format seconds with units.

    Args:
        seconds: The duration.

    >>> format_duration(41.2), format_duration(312), format_duration(3 * 3600 + 250), format_duration(200_000)
    ('41 s', '5 min 12 s', '3 h 4 min', '2 d 7 h')
    """
    total = round(seconds)
    for unit, name, divisor, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= unit:
            return f"{total // unit} {name} {total % unit // divisor} {small}"
    return f"{total} s"


def figure(value: float | None, digits: int = 3) -> str:
    """Format a number; a dash for `None` and NaN.

    Args:
        value: The number.
        digits: Significant digits of numbers below 1000.

    >>> figure(0.123456), figure(None), figure(1234), figure(123456.7)
    ('0.123', '-', '1,234', '123,457')
    """
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """Format a share as percent; a dash for `None`.

    >>> percent(0.125), percent(None)
    ('12.5%', '-')
    """
    return "-" if share is None else f"{100 * share:.3g}%"


_LEVELS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float | None]) -> str:
    """Draw numbers as a line of bars scaled to their range; a space for missing ones.

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


# --- full screen ----------------------------------------------------------------------------------------------------

ENTER_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Switch to the alternate screen, hide the cursor, and clip long lines instead of wrapping them."""
LEAVE_SCREEN = "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""Undo `ENTER_SCREEN`; the terminal has its former contents again."""
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def screen(lines: Iterable[str]) -> str:
    """Return the text that replaces the contents of the screen without flicker.

    Args:
        lines: At most as many lines as the screen has.

    >>> screen(["one", "two"])
    '\\x1b[H\\x1b[Kone\\r\\n\\x1b[Jtwo'
    """
    *first, last = lines
    # Cleared before the text: after a line as wide as the screen, the cursor is on its last character.
    return _HOME + "".join(f"{_CLEAR_LINE}{line}\r\n" for line in first) + _CLEAR_BELOW + last


# --- output ---------------------------------------------------------------------------------------------------------


def print_json(value: Json) -> None:
    """Print strict JSON: numbers that are not finite become null, and values of other types text."""
    print(json.dumps(_replace_nonfinite(value), indent=2, default=str, ensure_ascii=False, allow_nan=False))


def _replace_nonfinite(value: Json) -> Json:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(entry) for entry in value]
    return value


_MAX_MIN_WIDTH = 16
"""A column of texts is at least as wide as its longest word, up to this."""


def print_table(names: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """Print a table (see `table`). Columns that do not fit are listed below it.

    Args:
        names: Headers of the columns.
        rows: Cells of any type.
        right: Indices of right-aligned columns.
    """
    lines = [[printable(cell) for cell in row] for row in rows]
    hidden = _hidden_columns(names, lines, right, range(len(names) - 1, 0, -1))
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
    """Lay out a table of texts that are safe to print.

    If the terminal is too narrow, the longest texts are truncated, but not right-aligned columns or the first one. If
    that is not enough, columns are left out.

    Args:
        names: Headers of the columns.
        rows: Their cells.
        right: Indices of right-aligned columns.
        ends: Indices of columns whose texts are truncated on the left.
        optional: Indices of columns that may be left out, empty ones first, then in this order.

    Yields:
        The lines.
    """
    hidden = _hidden_columns(names, rows, right, optional)
    visible = [i for i in range(len(names)) if i not in hidden]
    widths = {i: max(width(line[i]) for line in (names, *rows)) for i in visible}
    gap = 2 if sum(widths.values()) + 2 * (len(widths) - 1) <= columns() else 1
    over = sum(widths.values()) + gap * (len(widths) - 1) - columns()
    min_widths = {i: _min_width(i, names, rows) for i in visible[1:] if i not in right}
    while over > 0 and (wide := [i for i, least in min_widths.items() if widths[i] > least]):
        widest = max(wide, key=widths.__getitem__)
        widths[widest] -= 1
        over -= 1
    for number, line in enumerate((names, *rows)):
        cells = []
        for i in visible:
            cell = (tail if i in ends else shorten)(line[i], widths[i])
            space = " " * (widths[i] - width(cell))
            cells.append(space + cell if i in right else cell + space)
        text = (" " * gap).join(cells).rstrip()
        yield styled(text, "bold") if number == 0 else text


def _min_width(i: int, names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the smallest width of a column of texts."""
    longest = max((width(word) for row in rows for word in row[i].split(" ")), default=0)
    return max(width(names[i]), min(longest, _MAX_MIN_WIDTH))


def _hidden_columns(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], optional: Sequence[int]
) -> set[int]:
    """Return the columns that are left out so that the others fit."""
    widths = [max(width(line[i]) for line in (names, *rows)) for i in range(len(names))]
    needed = [wide if i == 0 or i in right else min(wide, _min_width(i, names, rows)) for i, wide in enumerate(widths)]
    empty = [i for i in optional if all(row[i] in ("", "-") for row in rows)]
    hidden: set[int] = set()
    for i in (*empty, *optional):
        if sum(needed[j] + 1 for j in range(len(names)) if j not in hidden) - 1 <= columns():
            break
        hidden.add(i)
    return hidden


_HTML_CELL = 120
"""Largest number of characters of a cell."""


def html_table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Json]]) -> str:
    """Return an HTML table for a notebook.

    Args:
        caption: Caption of the table.
        headers: Headers of the columns.
        rows: Cells of any type; long ones are truncated.

    Returns:
        The HTML, escaped.

    >>> html_table("1 record", ["text"], [["<b>"]])
    '<table><caption>1 record</caption><thead><tr><th>text</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """  # noqa: E501
    head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{_html_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _html_cell(cell: Json) -> str:
    text = "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return html.escape(text if len(text) <= _HTML_CELL else f"{text[: _HTML_CELL - 1]}…")
