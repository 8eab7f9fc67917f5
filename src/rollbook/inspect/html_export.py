"""Export of samples, a group or a query as one self-contained HTML file.

Invariant: the data is base64, so no text of a record can end the page's script. The content security policy, first in
the head, allows only the page's script and style, by hash, and no fetches. The file contains what was requested and
what its pages need: no path, host or setting of this machine. Nothing that matches a `redact` pattern is in it.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from rollbook.core.checks import check_choice
from rollbook.core.errors import RollbookError
from rollbook.core.files import check_regular
from rollbook.inspect.images import image_type
from rollbook.inspect.measures import extract_closing, extract_opening
from rollbook.inspect.serialization import as_json, encode
from rollbook.inspect.trajectory import KINDS, LENSES, ROLES, STATUSES, Json, Trajectory
from rollbook.inspect.workers import Workers

if TYPE_CHECKING:
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.sources import Source

__all__ = ["ExportResult", "as_iframe", "export_html", "write_html"]


TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "png": "image/png",
    "woff2": "font/woff2",
}


@dataclass(frozen=True)
class Asset:
    """A static file; `sha256` in hexadecimal digits."""

    content: bytes
    type: str
    sha256: str


@cache
def load_assets() -> dict[str, Asset]:
    """Return all files under static/ by relative name.

    >>> load_assets()["index.html"].type
    'text/html; charset=utf-8'
    >>> "../assets.py" in load_assets()
    False
    """
    return dict(sorted(_read_assets(resources.files("rollbook.inspect") / "static", "")))


def _read_assets(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    files = []
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            if entry.name != "__pycache__":
                files += _read_assets(entry, name + "/")
            continue
        if entry.name.startswith("."):
            continue
        kind = TYPES.get(entry.name.rpartition(".")[2])
        if kind is None:
            raise ValueError(f"{name}: unknown file type, expected {', '.join(TYPES)}")
        content = entry.read_bytes()
        files.append((name, Asset(content, kind, hashlib.sha256(content).hexdigest())))
    return files


# --- bundle ---------------------------------------------------------------------------------------------------------

RUN_PAGES = ("overview", "step", "prompt", "compare", "search", "sql")
_IMPORT = re.compile(r"""(?m)^import \{[^{}]*\} from (["'])(?P<file>[^"']+)\1;\n""")
_EXPORT = re.compile(r"(?m)^export (?=(?:async function|function|const|class) )")
_COMMENT_LINES = re.compile(r"(?m)^[ \t]*(?://.*|/\*(?:[^*]|\*(?!/))*\*/)\n")


class BundleError(RollbookError, ValueError):
    """Raised for style sheets that cannot be joined."""


@cache
def page_script() -> str:
    """Return the modules of an exported page as one script: main.js without the pages that need a server."""
    files = {name: asset.content.decode() for name, asset in load_assets().items() if name.endswith(".js")}
    names = "|".join(RUN_PAGES)
    files["main.js"] = re.sub(rf'(?m)^.*"(?:\./pages/)?(?:{names})(?:\.js)?".*\n', "", files["main.js"])
    return join_modules(files, "main.js")


@cache
def page_style() -> str:
    """Return the style sheets of index.html, in order, as one."""
    names = re.findall(r'href="/?static/([^"]+\.css)"', load_assets()["index.html"].content.decode())
    return join_styles({name: load_assets()[name].content.decode() for name in names})


def join_styles(files: Mapping[str, str]) -> str:
    """Join style sheets; reject one that would fetch something or close its element.

    >>> join_styles({"a.css": "p { color: red }", "b.css": "@import 'c.css';"})
    Traceback (most recent call last):
        ...
    rollbook.inspect.html_export.BundleError: b.css: '@import' is not allowed in a single file
    """
    for name, text in files.items():
        for match in re.finditer(r"</style|@import|url\(\s*[\"']?(?!data:)", text, re.IGNORECASE):
            raise BundleError(f"{name}: {match[0]!r} is not allowed in a single file")
    out = []
    for name, text in files.items():
        bare = re.sub(r"(?s)/\*.*?\*/", "", text)
        out += [f"/* {name} */", re.sub(r"(?m)^\s+", "", bare).strip()]
    return "\n".join([*out, ""])


def join_modules(files: Mapping[str, str], entry: str) -> str:
    """Join JavaScript modules (name -> source) into one script: `entry` and its imports, in dependency order.

    Removes imports, the word `export`, indentation and comments on lines of their own. This is not a parser:
    `tests/viewer/test_bundle.py` checks that the modules contain nothing that it would misread.

    >>> print(join_modules({
    ...     "main.js": 'import { twice } from "./pages/a.js";\\nconsole.log(twice(2));\\n',
    ...     "pages/a.js": "export const twice = (x) => 2 * x;\\n",
    ... }, "main.js"))
    // pages/a.js
    const twice = (x) => 2 * x;
    // main.js
    console.log(twice(2));
    <BLANKLINE>
    """
    joined: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in joined:
            return
        text = _COMMENT_LINES.sub("", files[name])
        for match in _IMPORT.finditer(text):
            visit(posixpath.normpath(posixpath.join(posixpath.dirname(name), match["file"])))
        joined[name] = re.sub(r"(?m)^\s+", "", _EXPORT.sub("", _IMPORT.sub("", text)))

    visit(entry)
    return "".join(f"// {name}\n{text}" for name, text in joined.items())


MAX_TRAJECTORIES = 200
"""Maximum number of trajectories in a file."""
_MAX_NUMBERS = 256
"""Longer lists of numbers are omitted from a record's JSON, since the frame has them."""
_REDACTION_SECONDS = 60.0
_MAX_PATTERN_LENGTH = 1000
_MAX_PATTERNS = 100
_CONSTANT_KEYS = frozenset(
    {"sha256", "mime", "status", "kind", "state", "role", "type", "id", "key", "truncate_status"}
)
_CONSTANTS = frozenset(
    {*ROLES, *KINDS, *STATUSES, *LENSES, *(lens.key for lens in LENSES.values())}
    | {"single_turn", "multi_turn", "dpo", "prompt_truncated", "response_truncated", "sequential", "diverging"}
    | {"image/png", "image/jpeg", "image/gif", "image/webp", "book", "number", "text", "flag"}
    | {"waiting", "leased", "trained", "dropped", "evaluation", ""}
)
"""Values under these names that are constants of the viewer and are not redacted."""


@dataclass(frozen=True)
class ExportResult:
    """An exported file with its suggested name and counts.

    Args:
        content: The file.
        name: Suggested file name.
        trajectories: Number of trajectories.
        images: Number of images.
        redactions: Number of texts with redacted parts.
    """

    content: bytes
    name: str
    trajectories: int
    images: int
    redactions: int

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self.content)


def export_html(
    source: Source,
    answers: Answers,
    *,
    uids: Sequence[str] | None = None,
    gid: str | None = None,
    filter: str | None = None,
    title: str | None = None,
    redact: Sequence[str] | str = (),
    images: bool = True,
    fields: Sequence[str] | None = None,
    max_mb: float | None = None,
    theme: str = "auto",
    workers: Workers | None = None,
) -> ExportResult:
    """Export samples, a group or the samples of a filter (exactly one of the three) as one HTML file.

    Args:
        source: Source of the samples.
        answers: Answers about it.
        uids: Samples to export.
        gid: Group to export.
        filter: Filter whose samples are exported.
        title: Title of the page.
        redact: Regular expressions; matched characters are replaced by █ everywhere, and token ids are omitted.
        images: Whether to include images.
        fields: Lenses to include ("entropy", "logprob" ...); `None`: all.
        max_mb: Maximum size in megabytes.
        theme: "auto" (the reader's system), "light" or "dark".
        workers: Child processes for redaction.

    Returns:
        The file, and what is in it.

    Raises:
        ValueError: For bad arguments, no samples, too many samples, or a file above `max_mb`.

    >>> import rollbook
    >>> from rollbook.inspect.answers import Answers
    >>> from rollbook.inspect.index import Index
    >>> from rollbook.inspect.sources import BookSource, load
    >>> book = rollbook.open("memory:")
    >>> _ = book.append(rollbook.Experience(eid={"batch": 3, "task": 1}, tokens=[1, 2], response_text="4", reward=1.0))
    >>> source, index = BookSource(book), Index()
    >>> load(source, index)
    >>> page = export_html(source, Answers(source, index), filter="reward > 0")
    >>> page.trajectories, page.images, page.content[:15]
    (1, 0, b'<!doctype html>')
    """
    if sum(selector is not None for selector in (uids, gid, filter)) != 1:
        raise ValueError("export: expected one of uids, gid and filter")
    check_choice("theme", theme, ("auto", "light", "dark"))
    patterns = _check_patterns([redact] if isinstance(redact, str) else redact)
    if gid is not None:
        chosen = [row["uid"] for row in answers.group(gid)["rows"] if row["removed_reason"] is None]
    elif uids is not None:
        for uid in uids:
            if not isinstance(uid, str):
                raise ValueError(f"uids: got {uid!r:.80}, expected the ids of samples")
        chosen = list(dict.fromkeys(uids))
    else:
        matches = answers.list(view="samples", filter=filter, limit=MAX_TRAJECTORIES)
        chosen = [row["uid"] for row in matches["rows"] if row["removed_reason"] is None]
        if matches["total"] > MAX_TRAJECTORIES:
            raise ValueError(
                f"filter: {matches['total']} samples match, expected at most {MAX_TRAJECTORIES}; use a narrower filter"
            )
    if not chosen:
        raise ValueError("export: no samples to export")
    if len(chosen) > MAX_TRAJECTORIES:
        raise ValueError(f"uids: got {len(chosen)}, expected at most {MAX_TRAJECTORIES}")

    trajectories = [_select_lenses(trajectory, fields) for trajectory in _read_trajectories(source, chosen)]
    recorded = _record_answers(source, answers, trajectories)
    media = _read_images(source, trajectories) if images else {}
    redactions = 0
    if patterns:
        with nullcontext(workers) if workers is not None else Workers() as children:
            trajectories, recorded, redactions = _redact(trajectories, recorded, patterns, children)
    if gid is not None:
        start = "#/group/" + _encode_uri(trajectories[0].gid)
    else:
        start = "#/t/" + _encode_uri(trajectories[0].uid) if len(trajectories) == 1 else "#/samples"
    responses = {response_key(path, **selector): answer for path, selector, answer in recorded}
    payload = {
        "responses": responses,
        "media": media,
        "frame": base64.b64encode(encode(trajectories, "f2")).decode(),
        "start": start,
    }
    content = render_page(as_json(payload), title=title or responses["/api/run"]["name"] or "rollbook", theme=theme)
    if max_mb is not None and len(content) > max_mb * 1e6:
        raise ValueError(
            f"max_mb: the file of {len(trajectories)} trajectories and {len(media)} images would have "
            f"{len(content) / 1e6:.1f} MB, expected at most {max_mb:g}; export fewer samples or lenses, or no images"
        )
    return ExportResult(content, _file_name(start, len(trajectories)), len(trajectories), len(media), redactions)


def write_html(path: str | os.PathLike[str], source: Source, answers: Answers, **options: Any) -> ExportResult:
    """Write `export_html` to `path` atomically.

    Args:
        path: The file.
        source: Source of the samples.
        answers: Answers about it.
        options: Other arguments of `export_html`.

    Returns:
        What was exported.

    Raises:
        ValueError: As `export_html`.

    >>> import rollbook, tempfile
    >>> from rollbook.inspect.answers import Answers
    >>> from rollbook.inspect.index import Index
    >>> from rollbook.inspect.sources import BookSource, load
    >>> book = rollbook.open("memory:")
    >>> _ = book.append(rollbook.Experience(eid={"batch": 3, "task": 1}, tokens=[1, 2], response_text="4", reward=1.0))
    >>> source, index = BookSource(book), Index()
    >>> load(source, index)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_html(f"{folder}/page.html", source, Answers(source, index), gid="3/1").trajectories
    1
    """
    check_regular(path)
    exported = export_html(source, answers, **options)
    folder = os.path.dirname(os.path.abspath(os.fspath(path)))
    handle, name = tempfile.mkstemp(prefix=".rollbook-", suffix=".html", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(exported.content)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return exported


def as_iframe(content: bytes, *, height: int = 640) -> str:
    """Return an exported file as an iframe for a notebook's `_repr_html_`; it can run its script and nothing else.

    Args:
        content: Content of the exported file.
        height: Height of the frame, in pixels.

    Returns:
        HTML of the frame.

    >>> as_iframe(b'<p class="x">', height=200)  # doctest: +ELLIPSIS
    '<iframe sandbox="allow-scripts" srcdoc="&lt;p class=&quot;x&quot;&gt;" ... height="200"></iframe>'
    """
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(content.decode())}" '
        f'style="width:100%;border:0" height="{int(height)}"></iframe>'
    )


def render_page(payload: bytes, *, title: str, theme: str) -> bytes:
    """Return the HTML page around a JSON payload."""
    script, style = page_script(), page_style()
    policy = (
        f"default-src 'none'; script-src '{_csp_hash(script)}'; style-src '{_csp_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    packed = base64.b64encode(gzip.compress(payload, 9, mtime=0)).decode()
    chosen = "" if theme == "auto" else f' data-theme="{theme}" data-given="{theme}"'
    # The policy precedes everything it applies to. The script is last, after the page exists.
    return (
        f'<!doctype html>\n<html lang="en"{chosen}>\n<head>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="robots" content="noindex">\n<meta name="referrer" content="no-referrer">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This file needs JavaScript. It makes no network requests.</noscript>\n"
        f'<script type="application/octet-stream" id="bundle">{packed}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode()


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _encode_uri(text: str) -> str:
    """Encode text as encodeURIComponent does."""
    return quote(text, safe="-_.!~*'()")


def response_key(path: str, **parameters: str) -> str:
    """Return the key of a recorded answer: path and sorted parameters, encoded as URLSearchParams does.

    >>> response_key("/api/group", gid="4/geo~3 k*")
    '/api/group?gid=4%2Fgeo%7E3+k*'
    """
    pairs = (f"{name}={quote_plus(value, safe='*').replace('~', '%7E')}" for name, value in sorted(parameters.items()))
    return "?".join([path, *(["&".join(pairs)] if parameters else [])])


def _check_patterns(redact: Sequence[str]) -> list[str]:
    # Patterns are compiled only in a child, since that too can take arbitrarily long.
    for pattern in redact:
        if not isinstance(pattern, str) or not 0 < len(pattern) <= _MAX_PATTERN_LENGTH:
            raise ValueError(
                f"redact: got {str(pattern)[:80]!r}, expected a regular expression of at most 1000 characters"
            )
    if len(redact) > _MAX_PATTERNS:
        raise ValueError(f"redact: got {len(redact)} patterns, expected at most {_MAX_PATTERNS}")
    return list(redact)


def _file_name(start: str, count: int) -> str:
    """Return a file name from our own letters and digits, since record ids are not safe file names."""
    content = {"#/t/": "sample", "#/gr": "group"}.get(start[:4], f"{count}-samples")
    return f"rollbook-{content}-{hashlib.blake2b(start.encode(), digest_size=4).hexdigest()}.html"


def _select_lenses(trajectory: Trajectory, fields: Sequence[str] | None) -> Trajectory:
    if fields is None:
        return trajectory
    arrays = {name: array for name, array in trajectory.arrays.items() if name in fields}
    rejected = None if trajectory.rejected is None else _select_lenses(trajectory.rejected, fields)
    return dataclasses.replace(trajectory, arrays=arrays, rejected=rejected)


# --- recorded answers to the requests of the pages ------------------------------------------------------------------

Answer = tuple[str, dict[str, str], Any]
"""Path, parameters, and the server's answer."""


def _read_trajectories(source: Source, uids: Sequence[str]) -> list[Trajectory]:
    return [
        trajectory for start in range(0, len(uids), 32) for trajectory in source.trajectories(uids[start : start + 32])
    ]


def _record_answers(source: Source, answers: Answers, trajectories: Sequence[Trajectory]) -> list[Answer]:
    """Yield the answers to the requests of the exported pages, for a run that has only these samples."""
    inside = {trajectory.uid for trajectory in trajectories}
    gids = dict.fromkeys(trajectory.gid for trajectory in trajectories)
    run = dict(answers.run())
    run["name"] = os.path.basename(str(run["name"]).rstrip("/\\"))
    run["live"], run["idle"] = False, None
    run["problems"] = []  # they contain file names of this machine
    run["features"] = dict.fromkeys(run["features"], False)
    recorded: list[Answer] = []
    rows: list[dict[str, Any]] = []
    for trajectory in trajectories:
        neighbors = dict(answers.neighbors(trajectory.uid))
        rows.append(neighbors["row"])
        for name in ("previous", "next", "previous_group", "next_group"):
            neighbors[name] = neighbors[name] if neighbors[name] in inside else None
        neighbors["same_prompt"] = []
        recorded.append(("/api/neighbors", {"uid": trajectory.uid}, neighbors))
        # Without the ledger, which names consumers and machines.
        recorded.append(("/api/record", {"uid": trajectory.uid}, _shorten(source.record(trajectory.uid))))
    groups: list[dict[str, Any]] = []
    for gid in gids:
        group = dict(answers.group(gid))
        groups += answers.list(view="groups", gid=gid)["rows"]
        group["rows"] = [row for row in group["rows"] if row["uid"] in inside]
        group["timeline"] = [point for point in group["timeline"] if point["gid"] in gids]
        for name in ("previous", "next"):
            group[name] = group[name] if group[name] in gids else None
        recorded.append(("/api/group", {"gid": gid}, group))
    recorded.append(("/api/run", {}, run))
    # All rows: the page sorts and paginates them.
    recorded.append(("/api/list", {"view": "samples"}, {"rows": rows}))
    recorded.append(("/api/list", {"view": "groups"}, {"rows": groups}))
    return recorded


def _shorten(value: Json) -> Any:
    """Return a record's JSON without long lists of numbers and images, which the file has elsewhere."""
    if isinstance(value, Mapping):
        return {key: _shorten(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) > _MAX_NUMBERS and all(isinstance(entry, (int, float)) or entry is None for entry in value):
            return f"({len(value)} numbers, omitted in this file)"
        return [_shorten(entry) for entry in value]
    if isinstance(value, str):
        return _DATA.sub("data:(omitted in this file)", value)
    return value


_DATA = re.compile(r"data:[a-z]+/[a-zA-Z0-9.+-]+;base64,[A-Za-z0-9+/=]{64,}")


def _read_images(source: Source, trajectories: Sequence[Trajectory]) -> dict[str, str]:
    images: dict[str, str] = {}
    for trajectory in trajectories:
        for picture in trajectory.pictures:
            media = None if picture.sha256 in images else source.media(picture.sha256)
            kind = None if media is None else image_type(media[0])
            if media is not None and kind is not None:
                images[picture.sha256] = f"data:{kind};base64,{base64.b64encode(media[0]).decode()}"
    return images


# --- redaction ------------------------------------------------------------------------------------------------------

_REDACTED_KEYS = frozenset({"info", "metrics", "messages", "tools", "sampling", "label", "reference", "parts", "row"})
"""Entries whose keys are redacted too."""
_REDACTED_NUMBERS = frozenset({"info", "messages", "tools", "sampling", "label", "reference", "row", "eid"})
"""Entries in which numbers (for example, phone numbers) are redacted like texts."""
_HASH = re.compile("[0-9a-f]{64}")
Redact = Callable[[str], str]


def _redact(
    trajectories: list[Trajectory], recorded: list[Answer], patterns: list[str], workers: Workers
) -> tuple[list[Trajectory], list[Answer], int]:
    for trajectory in trajectories:
        if trajectory.tokenized == "ids":
            raise ValueError(
                f"redact: {trajectory.uid} has token ids and no tokenizer, so its text cannot be searched; set one"
            )
    texts: dict[str, str] = {}

    def collect(text: str) -> str:
        return texts.setdefault(text, text)

    for trajectory in trajectories:
        _redact_trajectory(trajectory, collect)
    for path, parameters, answer in recorded:
        _redact_json([parameters, answer], collect, max_integers=_max_integers(path))
    # In an id a slash is encoded as %2F; a pattern may match the decoded form too.
    ids = {
        identifier: identifier.replace("%2F", "/").replace("%25", "%")
        for trajectory in trajectories
        for identifier in (trajectory.uid, trajectory.gid)
    }
    for written in ids.values():
        collect(written)
    unhashed = _replace_hashes(trajectories)
    masked = workers.mask([unhashed(text) for text in texts], patterns, seconds=_REDACTION_SECONDS)
    redactions = sum(unhashed(text) != masked_text for text, masked_text in zip(texts, masked, strict=True))
    texts = dict(zip(texts, masked, strict=True))
    texts |= {identifier: texts[written] for identifier, written in ids.items() if texts[written] != unhashed(written)}
    redacted = [_redact_trajectory(trajectory, texts.__getitem__) for trajectory in trajectories]
    if len({trajectory.uid for trajectory in redacted}) != len(trajectories):
        raise ValueError("redact: the redacted ids of different samples would be equal")
    for trajectory in redacted:
        trajectory.notes.append("Parts of this file are redacted; token ids are omitted.")
    answers = [
        (
            path,
            {name: texts[value] for name, value in parameters.items()},
            _redact_json(answer, texts.__getitem__, max_integers=_max_integers(path)),
        )
        for path, parameters, answer in recorded
    ]
    _update_excerpts([answer for _, _, answer in answers], redacted)
    return redacted, answers, redactions


def _replace_hashes(trajectories: Sequence[Trajectory]) -> Redact:
    """Replace hashes of texts in ids: with the hash and the visible part of a text, the redacted part could be found by
    trying.
    """
    hashes: dict[str, str] = {}
    for trajectory in trajectories:
        for variant in (trajectory, trajectory.rejected):
            if variant is not None:
                text = blake2b(variant.text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
                for content in (variant.prompt, text):
                    if _SHORT_HASH.fullmatch(content):
                        hashes.setdefault(content, "".join("abcdef"[len(hashes) // 6**at % 6] for at in range(16)))
    if not hashes:
        return str
    pattern = re.compile("|".join(hashes))
    return lambda text: pattern.sub(lambda match: hashes[match[0]], text)


_SHORT_HASH = re.compile("[0-9a-f]{16}")


def _max_integers(path: str) -> int:
    """Return how many consecutive integers are shown; in a record, any could be token ids."""
    return 0 if path == "/api/record" else 3


def _redact_trajectory(trajectory: Trajectory, redact: Redact) -> Trajectory:
    """Return the sample with redacted texts and without ids; the number of characters stays the same, so ends stay
    valid.
    """
    changed: dict[str, Any] = {"ids": None}
    for field in dataclasses.fields(trajectory):
        value = getattr(trajectory, field.name)
        if isinstance(value, (str, dict)) or field.name in ("messages", "tools", "label", "reference", "notes"):
            changed[field.name] = _redact_json({field.name: value}, redact, max_integers=0)[field.name]
    changed["arrays"] = trajectory.arrays
    changed["segments"] = [segment._replace(name=redact(segment.name)) for segment in trajectory.segments]
    changed["rejected"] = None if trajectory.rejected is None else _redact_trajectory(trajectory.rejected, redact)
    return dataclasses.replace(trajectory, **changed)


def _redact_json(
    value: Json, redact: Redact, *, max_integers: int, redact_keys: bool = False, redact_numbers: bool = False
) -> Any:
    """Redact all texts in JSON except our constants.

    More than `max_integers` consecutive integers could be token ids and are omitted.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        redacted = {}
        for key, entry in value.items():
            is_constant = (
                not redact_keys
                and key in _CONSTANT_KEYS
                and isinstance(entry, str)
                and (entry in _CONSTANTS or _HASH.fullmatch(entry))
            )
            redacted[redact(key) if redact_keys and isinstance(key, str) else key] = (
                entry
                if is_constant
                else _redact_json(
                    entry,
                    redact,
                    max_integers=max_integers,
                    redact_keys=redact_keys or key in _REDACTED_KEYS,
                    redact_numbers=redact_numbers or key in _REDACTED_NUMBERS,
                )
            )
        return redacted
    if isinstance(value, (list, tuple)):
        count = _count_integers(value)
        if count is not None and count > max_integers:
            return f"({count} integers, omitted: they could be token ids)"
        return [
            _redact_json(
                entry, redact, max_integers=max_integers, redact_keys=redact_keys, redact_numbers=redact_numbers
            )
            for entry in value
        ]
    if redact_numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
        written = str(value)
        redacted_text = redact(written)
        return value if redacted_text == written else redacted_text
    return value


def _count_integers(value: Json) -> int | None:
    """Return the number of integers in nested lists; `None` if they contain anything else."""
    if isinstance(value, (list, tuple)):
        counts = [_count_integers(entry) for entry in value]
        return None if None in counts else sum(count or 0 for count in counts)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        return None
    return 1


def _update_excerpts(value: Json, redacted: Sequence[Trajectory]) -> None:
    """Recompute openings and closings from redacted texts, since the existing ones may cut a redacted part."""
    by_uid = {trajectory.uid: trajectory for trajectory in redacted}
    by_gid = {trajectory.gid: trajectory for trajectory in reversed(redacted)}
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, list):
            waiting += entry
        elif isinstance(entry, dict):
            waiting += entry.values()
            trajectory = by_uid.get(entry.get("uid", "")) or by_gid.get(entry.get("gid", ""))
            if trajectory is not None and "opening" in entry:
                entry["opening"] = extract_opening(trajectory.text[: trajectory.prompt_end])
            if trajectory is not None and "closing" in entry:
                entry["closing"] = extract_closing(trajectory.text[trajectory.prompt_end :])
