"""Samples, a group or a query as one HTML file that needs nothing: no server, no network, no other file.

Invariant: what the file shows is data in base64, so that no text of a record can end its script; its policy, first in
the head, lets the page's own script and style run, by their hashes, and nothing be fetched. It holds what was asked for
and what the pages of that need: no path, host or setting of the machine it was made on. What a `redact` pattern matches
is nowhere in it.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from hashlib import blake2b
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from rollbook.core.checks import check_choice
from rollbook.core.files import check_regular
from rollbook.inspect.bundle import page_script, page_style
from rollbook.inspect.documents import KINDS, LENSES, ROLES, STATUSES, Trajectory
from rollbook.inspect.frames import encode
from rollbook.inspect.measures import closing_of, opening_of
from rollbook.inspect.messages import as_json, image_type
from rollbook.inspect.queries import Workers

if TYPE_CHECKING:
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.sources import Source

MOST = 200
"""Trajectories in one file."""
_LONG = 256
"""Lists of numbers in a record's JSON that are longer are left out: the frame has them."""
_SECONDS = 60.0
_LONGEST_PATTERN = 1000
_MOST_PATTERNS = 100
_FIXED = frozenset({"sha256", "mime", "status", "kind", "state", "role", "type", "id", "key", "truncate_status"})
_OURS = frozenset(
    {*ROLES, *KINDS, *STATUSES, *LENSES, *(lens.key for lens in LENSES.values())}
    | {"single_turn", "multi_turn", "dpo", "prompt_truncated", "response_truncated", "sequential", "diverging"}
    | {"image/png", "image/jpeg", "image/gif", "image/webp", "book", "number", "text", "flag"}
    | {"waiting", "leased", "trained", "dropped", "evaluation", ""}
)
"""Words of ours that are left as they are, where they stand under such a name; everything else is somebody's text."""


@dataclass(frozen=True)
class Exported:
    """A file, and what is in it. `name`: what to call it; `redactions`: how many texts had something covered."""

    content: bytes
    name: str
    trajectories: int
    images: int
    redactions: int

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
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
) -> Exported:
    """One HTML file of these samples, of a group, or of the samples that a filter finds: exactly one of the three.

    `redact`: regular expressions; a █ stands for each character they match, wherever it is, and token ids, which would
    tell, are left out. `fields`: the lenses to keep ("entropy", "logprob" ...; None: all). `max_mb`: refuse to make a
    larger file. `theme`: "auto" (as the reader's system), "light" or "dark".
    """
    if sum(given is not None for given in (uids, gid, filter)) != 1:
        raise ValueError("export: expected one of uids, gid and filter")
    check_choice("theme", theme, ("auto", "light", "dark"))
    patterns = _patterns([redact] if isinstance(redact, str) else redact)
    if gid is not None:
        chosen = [row["uid"] for row in answers.group(gid)["rows"] if row["gone"] is None]
    elif uids is not None:
        for uid in uids:
            if not isinstance(uid, str):
                raise ValueError(f"uids: got {uid!r:.80}, expected the ids of samples")
        chosen = list(dict.fromkeys(uids))
    else:
        found = answers.list(view="samples", filter=filter, limit=MOST)
        chosen = [row["uid"] for row in found["rows"] if row["gone"] is None]
        if found["total"] > MOST:
            raise ValueError(f"filter: {found['total']} samples match, and one file holds at most {MOST}; narrow it")
    if not chosen:
        raise ValueError("export: there are no samples to put into a file")
    if len(chosen) > MOST:
        raise ValueError(f"uids: got {len(chosen)}, and one file holds at most {MOST}")

    documents = [_kept_lenses(one, fields) for one in _documents(source, chosen)]
    recorded = _recorded(source, answers, documents)
    media = _media(source, documents) if images else {}
    hidden = 0
    if patterns:
        with nullcontext(workers) if workers is not None else Workers() as children:
            documents, recorded, hidden = _redacted(documents, recorded, patterns, children)
    if gid is not None:
        start = "#/group/" + _segment(documents[0].gid)
    else:
        start = "#/t/" + _segment(documents[0].uid) if len(documents) == 1 else "#/samples"
    responses = {response_key(path, **given): answer for path, given, answer in recorded}
    payload = {
        "responses": responses,
        "media": media,
        "frame": base64.b64encode(encode(documents, "f2")).decode(),
        "start": start,
    }
    content = page(as_json(payload), title=title or responses["/api/run"]["name"] or "rollbook", theme=theme)
    if max_mb is not None and len(content) > max_mb * 1e6:
        raise ValueError(
            f"max_mb: the file of {len(documents)} trajectories and {len(media)} images would have "
            f"{len(content) / 1e6:.1f} MB, expected at most {max_mb:g}; take fewer, fewer lenses, or no images"
        )
    return Exported(content, _file_name(start, len(documents)), len(documents), len(media), hidden)


def write_html(path: str | os.PathLike[str], source: Source, answers: Answers, **options: Any) -> Exported:
    """As `export_html`, written to `path`: all of it, or nothing changes there."""
    check_regular(path)
    made = export_html(source, answers, **options)
    folder = os.path.dirname(os.path.abspath(os.fspath(path)))
    handle, name = tempfile.mkstemp(prefix=".rollbook-", suffix=".html", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(made.content)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return made


def as_iframe(content: bytes, *, height: int = 640) -> str:
    """A made file for a notebook's `_repr_html_`: in a frame of its own that can run its script and nothing else.

    >>> as_iframe(b'<p class="x">', height=200)  # doctest: +ELLIPSIS
    '<iframe sandbox="allow-scripts" srcdoc="&lt;p class=&quot;x&quot;&gt;" ... height="200"></iframe>'
    """
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(content.decode())}" '
        f'style="width:100%;border:0" height="{int(height)}"></iframe>'
    )


def page(payload: bytes, *, title: str, theme: str) -> bytes:
    """The HTML around a payload of JSON."""
    script, style = page_script(), page_style()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    packed = base64.b64encode(gzip.compress(payload, 9, mtime=0)).decode()
    chosen = "" if theme == "auto" else f' data-theme="{theme}" data-given="{theme}"'
    # The policy stands before anything it could miss. The script is last: it finds the page there.
    return (
        f'<!doctype html>\n<html lang="en"{chosen}>\n<head>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="robots" content="noindex">\n<meta name="referrer" content="no-referrer">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This file shows itself with JavaScript; it asks the network for nothing.</noscript>\n"
        f'<script type="application/octet-stream" id="bundle">{packed}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _segment(text: str) -> str:
    """As encodeURIComponent writes it."""
    return quote(text, safe="-_.!~*'()")


def response_key(path: str, **given: str) -> str:
    """Under which a page looks for an answer: the path and the parameters by name, as URLSearchParams writes them.

    >>> response_key("/api/group", gid="4/geo~3 k*")
    '/api/group?gid=4%2Fgeo%7E3+k*'
    """
    pairs = (f"{name}={quote_plus(value, safe='*').replace('~', '%7E')}" for name, value in sorted(given.items()))
    return "?".join([path, *(["&".join(pairs)] if given else [])])


def _patterns(redact: Sequence[str]) -> list[str]:
    # They are compiled in a child alone: that too can take as long as it likes.
    for pattern in redact:
        if not isinstance(pattern, str) or not 0 < len(pattern) <= _LONGEST_PATTERN:
            raise ValueError(
                f"redact: got {str(pattern)[:80]!r}, expected a regular expression of at most 1000 letters"
            )
    if len(redact) > _MOST_PATTERNS:
        raise ValueError(f"redact: got {len(redact)} patterns, expected at most {_MOST_PATTERNS}")
    return list(redact)


def _file_name(start: str, count: int) -> str:
    """Made of letters and digits that we choose: a record's id is nobody's file name."""
    what = {"#/t/": "sample", "#/gr": "group"}.get(start[:4], f"{count}-samples")
    return f"rollbook-{what}-{hashlib.blake2b(start.encode(), digest_size=4).hexdigest()}.html"


def _kept_lenses(one: Trajectory, fields: Sequence[str] | None) -> Trajectory:
    if fields is None:
        return one
    arrays = {name: array for name, array in one.arrays.items() if name in fields}
    rejected = None if one.rejected is None else _kept_lenses(one.rejected, fields)
    return dataclasses.replace(one, arrays=arrays, rejected=rejected)


# --- what the pages will ask --------------------------------------------------------------------------------------

Answer = tuple[str, dict[str, str], Any]
"""Path, parameters, and what the server would say."""


def _documents(source: Source, uids: Sequence[str]) -> list[Trajectory]:
    return [one for start in range(0, len(uids), 32) for one in source.documents(uids[start : start + 32])]


def _recorded(source: Source, answers: Answers, documents: Sequence[Trajectory]) -> list[Answer]:
    """What pages of these samples ask a server, answered for a run that has these samples and no others."""
    inside = {one.uid for one in documents}
    gids = dict.fromkeys(one.gid for one in documents)
    run = dict(answers.run())
    run["name"] = os.path.basename(str(run["name"]).rstrip("/\\"))
    run["live"], run["idle"] = False, None
    run["problems"] = []  # they name files of this machine
    run["features"] = dict.fromkeys(run["features"], False)
    found: list[Answer] = []
    rows: list[dict[str, Any]] = []
    for one in documents:
        near = dict(answers.neighbours(one.uid))
        rows.append(near["row"])
        for name in ("previous", "next", "previous_group", "next_group"):
            near[name] = near[name] if near[name] in inside else None
        near["same_prompt"] = []
        found.append(("/api/neighbours", {"uid": one.uid}, near))
        # Not the ledger: it says who trained on it, and where.
        found.append(("/api/record", {"uid": one.uid}, _short(source.record(one.uid))))
    groups: list[dict[str, Any]] = []
    for gid in gids:
        group = dict(answers.group(gid))
        groups += answers.list(view="groups", gid=gid)["rows"]
        group["rows"] = [row for row in group["rows"] if row["uid"] in inside]
        group["timeline"] = [point for point in group["timeline"] if point["gid"] in gids]
        for name in ("previous", "next"):
            group[name] = group[name] if group[name] in gids else None
        found.append(("/api/group", {"gid": gid}, group))
    found.append(("/api/run", {}, run))
    # Whole: the page sorts and pages them itself.
    found.append(("/api/list", {"view": "samples"}, {"rows": rows}))
    found.append(("/api/list", {"view": "groups"}, {"rows": groups}))
    return found


def _short(value: Any) -> Any:
    """A record's JSON without long lists of numbers and images: the file has them elsewhere."""
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) > _LONG and all(isinstance(each, (int, float)) or each is None for each in value):
            return f"({len(value)} numbers, left out of this file)"
        return [_short(each) for each in value]
    if isinstance(value, str):
        return _DATA.sub("data:(left out of this file)", value)
    return value


_DATA = re.compile(r"data:[a-z]+/[a-zA-Z0-9.+-]+;base64,[A-Za-z0-9+/=]{64,}")


def _media(source: Source, documents: Sequence[Trajectory]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in documents:
        for picture in one.pictures:
            media = None if picture.sha256 in found else source.media(picture.sha256)
            kind = None if media is None else image_type(media[0])
            if media is not None and kind is not None:
                found[picture.sha256] = f"data:{kind};base64,{base64.b64encode(media[0]).decode()}"
    return found


# --- redaction ------------------------------------------------------------------------------------------------------

_FREE = frozenset({"info", "metrics", "messages", "tools", "sampling", "label", "reference", "parts", "row"})
"""Where names are somebody's too, not only values."""
_NUMBERS = frozenset({"info", "messages", "tools", "sampling", "label", "reference", "row", "eid"})
"""Where a number is what somebody wrote, as much as a text is: a telephone number, say."""
_HASH = re.compile("[0-9a-f]{64}")
Cover = Callable[[str], str]


def _redacted(
    documents: list[Trajectory], recorded: list[Answer], patterns: list[str], workers: Workers
) -> tuple[list[Trajectory], list[Answer], int]:
    for one in documents:
        if one.tokenized == "ids":
            raise ValueError(
                f"redact: the tokenizer of {one.uid} is not known, so its ids cannot be searched; give a tokenizer"
            )
    texts: dict[str, str] = {}

    def note(text: str) -> str:
        return texts.setdefault(text, text)

    for one in documents:
        _document(one, note)
    for path, given, answer in recorded:
        _mapped([given, answer], note, most=_most(path))
    # In an id a slash stands as %2F: a pattern may find it as it was written, too.
    ids = {each: each.replace("%2F", "/").replace("%25", "%") for one in documents for each in (one.uid, one.gid)}
    for written in ids.values():
        note(written)
    unhashed = _unhashed(documents)
    masked = workers.mask([unhashed(text) for text in texts], patterns, seconds=_SECONDS)
    hidden = sum(unhashed(text) != cover for text, cover in zip(texts, masked, strict=True))
    texts = dict(zip(texts, masked, strict=True))
    texts |= {each: texts[written] for each, written in ids.items() if texts[written] != unhashed(written)}
    covered = [_document(one, texts.__getitem__) for one in documents]
    if len({one.uid for one in covered}) != len(documents):
        raise ValueError("redact: what is covered tells samples apart; their ids would be the same")
    for one in covered:
        one.notes.append("Parts of this file are covered; token ids, which would tell them, are left out.")
    answers = [
        (
            path,
            {name: texts[value] for name, value in given.items()},
            _mapped(answer, texts.__getitem__, most=_most(path)),
        )
        for path, given, answer in recorded
    ]
    _reopen([answer for _, _, answer in answers], covered)
    return covered, answers, hidden


def _unhashed(documents: Sequence[Trajectory]) -> Cover:
    """Other letters for the hashes of texts that ids are made of. From a hash, and what is not covered of its text, one
    can find out the rest by trying: there are few telephone numbers."""
    hashes: dict[str, str] = {}
    for one in documents:
        for each in (one, one.rejected):
            if each is not None:
                text = blake2b(each.text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
                for found in (each.prompt, text):
                    if _SHORT_HASH.fullmatch(found):
                        hashes.setdefault(found, "".join("abcdef"[len(hashes) // 6**at % 6] for at in range(16)))
    if not hashes:
        return str
    known = re.compile("|".join(hashes))
    return lambda text: known.sub(lambda match: hashes[match[0]], text)


_SHORT_HASH = re.compile("[0-9a-f]{16}")


def _most(path: str) -> int:
    """How many whole numbers in a row are shown: any in a record could be token ids, elsewhere a few are bounds."""
    return 0 if path == "/api/record" else 3


def _document(one: Trajectory, cover: Cover) -> Trajectory:
    """The sample with its texts covered, its ids left out. Each character has one in its place, so that ends hold."""
    changed: dict[str, Any] = {"ids": None}
    for each in dataclasses.fields(one):
        value = getattr(one, each.name)
        if isinstance(value, (str, dict)) or each.name in ("messages", "tools", "label", "reference", "notes"):
            changed[each.name] = _mapped({each.name: value}, cover, most=0)[each.name]
    changed["arrays"] = one.arrays
    changed["segments"] = [segment._replace(name=cover(segment.name)) for segment in one.segments]
    changed["rejected"] = None if one.rejected is None else _document(one.rejected, cover)
    return dataclasses.replace(one, **changed)


def _mapped(value: Any, cover: Cover, *, most: int, free: bool = False, numbers: bool = False) -> Any:
    """JSON with every text covered but the words that are ours. More than `most` whole numbers in a row are left out:
    they could be token ids. `free`: names are covered too; `numbers`: so are numbers, where a pattern finds them."""
    if isinstance(value, str):
        return cover(value)
    if isinstance(value, Mapping):
        made = {}
        for key, each in value.items():
            ours = not free and key in _FIXED and isinstance(each, str) and (each in _OURS or _HASH.fullmatch(each))
            made[cover(key) if free and isinstance(key, str) else key] = (
                each
                if ours
                else _mapped(each, cover, most=most, free=free or key in _FREE, numbers=numbers or (key in _NUMBERS))
            )
        return made
    if isinstance(value, (list, tuple)):
        count = _wholes(value)
        if count is not None and count > most:
            return f"({count} whole numbers, left out: they could be token ids)"
        return [_mapped(each, cover, most=most, free=free, numbers=numbers) for each in value]
    if numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
        written = str(value)
        covered = cover(written)
        return value if covered == written else covered
    return value


def _wholes(value: Any) -> int | None:
    """How many whole numbers a list and the lists in it hold; `None` if they hold anything else."""
    if isinstance(value, (list, tuple)):
        counts = [_wholes(each) for each in value]
        return None if None in counts else sum(count or 0 for count in counts)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        return None
    return 1


def _reopen(value: Any, covered: Sequence[Trajectory]) -> None:
    """Openings and closings anew, from covered texts: those that were there may be cut inside of what is covered."""
    by_uid = {one.uid: one for one in covered}
    by_gid = {one.gid: one for one in reversed(covered)}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
            one = by_uid.get(each.get("uid", "")) or by_gid.get(each.get("gid", ""))
            if one is not None and "opening" in each:
                each["opening"] = opening_of(one.text[: one.prompt_end])
            if one is not None and "closing" in each:
                each["closing"] = closing_of(one.text[one.prompt_end :])
