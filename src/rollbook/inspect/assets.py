"""Static files of the web pages, and their bundle for self-contained HTML: one script and one style sheet.

Invariant: the manifest is read once, and a name that is not in it does not exist, so no request ever becomes a path.
Bundling removes `import` lines, the word `export`, comments and indentation, and orders modules after their imports.
Anything that could change their meaning (duplicate names, missing exports, cycles, other import or export forms, text
that ends a script in HTML) raises `BundleError` with the file's name.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise

from rollbook.core.errors import RollbookError

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "png": "image/png",
    "woff2": "font/woff2",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page. `sha256` in hexadecimal digits."""

    content: bytes
    type: str
    sha256: str


@cache
def manifest() -> dict[str, Asset]:
    """Every file under static/ by its name relative to it, with slashes.

    >>> manifest()["index.html"].type
    'text/html; charset=utf-8'
    >>> "../assets.py" in manifest()
    False
    """
    return dict(sorted(_walk(resources.files("rollbook.inspect") / "static", "")))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    files = []
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            if entry.name != "__pycache__":
                files += _walk(entry, name + "/")
            continue
        if entry.name.startswith("."):
            continue
        kind = TYPES.get(entry.name.rpartition(".")[2])
        if kind is None:
            raise ValueError(f"{name}: a file of the viewer's pages ends in {', '.join(TYPES)}")
        content = entry.read_bytes()
        files.append((name, Asset(content, kind, hashlib.sha256(content).hexdigest())))
    return files


# --- bundle ---------------------------------------------------------------------------------------------------------

RUN_PAGES = ("overview", "step", "prompt", "compare", "search", "sql")
_IMPORT = re.compile(r"import\s*\{(?P<names>[^{}]*)\}\s*from\s*(?P<quote>[\"'])(?P<file>[^\"']*)(?P=quote)\s*;?[ \t]*")
_EXPORT = re.compile(r"export\s+(?=(?:async\s+function|function|const|let|class)\b)")
_DECLARED = re.compile(r"(?:async\s+)?(?P<kind>function|class|const|let|var)\b\s*\*?\s*(?P<name>[A-Za-z_$][\w$]*)?")
_NAME = re.compile(r"[A-Za-z_$][\w$]*")
_WORD = re.compile(r"[\w$]")
_CLOSED = {")": "(", "]": "[", "}": "{"}
_COMMENT = re.compile(r"//[^\n]*|/\*(?s:.*?)\*/|/\*")
# After one of these a slash begins a pattern, after a value it divides.
_BEFORE_PATTERN = re.compile(
    r"(?:^|[(,=:\[!&|?{};+*%<>~^-]|\b(?:return|typeof|case|in|of|delete|void|throw|await|yield))$"
)


class BundleError(RollbookError, ValueError):
    """Raised for modules or style sheets that cannot be joined."""


@cache
def page_script() -> str:
    """The modules of a page that stands alone, as one: main.js, but for the pages that ask of a whole run."""
    files = {name: asset.content.decode() for name, asset in manifest().items() if name.endswith(".js")}
    files["main.js"] = without_pages(files["main.js"], RUN_PAGES)
    return join_modules(files, "main.js")


def without_pages(main: str, pages: Collection[str]) -> str:
    """main.js without the lines that import and register these pages.

    >>> print(without_pages('''import { a } from "./pages/a.js";
    ... import { b } from "./pages/b.js";
    ... registerPage("a", a);
    ... registerPage("b", b);''', ["a"]))
    import { b } from "./pages/b.js";
    registerPage("b", b);
    """
    removed = [f"pages/{name}.js" for name in pages]
    names = {
        imported_name
        for file, imported in _Module("main.js", main).imports
        if file in removed
        for imported_name in imported
    }
    return "\n".join(line for line in main.splitlines() if names.isdisjoint(re.findall(r"[\w$]+", line)))


@cache
def page_style() -> str:
    """The sheets that index.html names, in its order, as one."""
    names = re.findall(r'href="/?static/([^"]+\.css)"', manifest()["index.html"].content.decode())
    return join_styles({name: manifest()[name].content.decode() for name in names})


def join_styles(files: Mapping[str, str]) -> str:
    """Sheets one after the other; one that would fetch something, or that ends the element it stands in, is refused.

    >>> join_styles({"a.css": "p { color: red }", "b.css": "@import 'c.css';"})
    Traceback (most recent call last):
        ...
    rollbook.inspect.assets.BundleError: b.css: '@import' cannot stand in a file of its own
    """
    for name, text in files.items():
        for match in re.finditer(r"</style|@import|url\(\s*[\"']?(?!data:)", text, re.IGNORECASE):
            raise BundleError(f"{name}: {match[0]!r} cannot stand in a file of its own")
    out = []
    for name, text in files.items():
        bare = re.sub(r"(?s)/\*.*?\*/", "", text)
        out += [f"/* {name} */", re.sub(r"(?m)^\s+", "", bare).strip()]
    return "\n".join([*out, ""])


def join_modules(files: Mapping[str, str], entry: str) -> str:
    """One script out of `files` (name -> source): `entry` and all it needs, each after what it imports.

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
    modules: dict[str, _Module] = {}
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise BundleError(f"{name}: imports itself: {' -> '.join([*path[path.index(name) :], name])}")
        if name in modules:
            return
        modules[name] = module = _Module(name, files[name])
        for target, names in module.imports:
            if target not in files:
                raise BundleError(f"{name}: imports {target}, which is not there")
            visit(target, (*path, name))
            for dependency in names:
                if dependency not in modules[target].exports:
                    raise BundleError(f"{name}: imports {dependency!r}, which {target} does not export")
        order.append(name)

    visit(entry, ())
    owners: dict[str, str] = {}
    for name in order:
        for declaration in modules[name].declared:
            if owners.setdefault(declaration, name) != name:
                raise BundleError(f"{name}: declares {declaration!r}, which {owners[declaration]} declares too")
    return "\n".join(f"// {name}\n{modules[name].text.strip()}" for name in order) + "\n"


class _Module:
    """One file: what it imports, exports and declares, and its text without the words of modules."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        for end in ("</script", "<!--"):
            if end in text.lower():
                raise BundleError(f"{name}: {end!r} cannot stand in a script of an HTML page")
        hidden, flat, tops, cuts, fixed = _skeleton(name, text)
        self.imports: list[tuple[str, list[str]]] = []
        self.exports: set[str] = set()
        self.declared: list[str] = []
        for start, stop in pairwise([*tops, len(text)]):
            place = start
            word = re.compile(r"[\w$]+").match(hidden, start)
            if word is None:
                continue
            if word[0] == "import":
                match = _IMPORT.match(text, start)
                if match is None:
                    raise self._bad(text, start, "expected import { a, b } from './file.js';")
                names = [imported_name.strip() for imported_name in match["names"].split(",") if imported_name.strip()]
                if not all(_NAME.fullmatch(imported_name) for imported_name in names):
                    raise self._bad(text, start, "an import cannot rename")
                if not match["file"].startswith(("./", "../")):
                    raise self._bad(text, start, "expected a file of this folder")
                self.imports.append((posixpath.normpath(posixpath.join(posixpath.dirname(name), match["file"])), names))
                cuts.append(match.span())
                continue
            exported = _EXPORT.match(hidden, start)
            if exported is not None:
                cuts.append(exported.span())
                place = exported.end()
            elif word[0] == "export":
                raise self._bad(text, start, "expected export function, async function, const, let or class")
            declared = _DECLARED.match(hidden, place)
            if declared is not None:
                if declared["name"] is None or (
                    declared["kind"] in ("const", "let", "var") and "," in flat[place:stop]
                ):
                    raise self._bad(text, start, "a top-level declaration is expected to have one plain name")
                self.declared.append(declared["name"])
                if exported is not None:
                    self.exports.add(declared["name"])
        for bad in re.finditer(r"\bimport\s*[(.]|\bimport\.meta\b", hidden):
            raise self._bad(text, bad.start(), "import() and import.meta do not work in one file")
        twice = {imported_name for imported_name in self.declared if self.declared.count(imported_name) > 1}
        if twice:
            raise BundleError(f"{name}: declares {min(twice)!r} twice")
        self.text = _squeezed(text, cuts, fixed)

    def _bad(self, text: str, start: int, why: str) -> BundleError:
        line = text.count("\n", 0, start) + 1
        return BundleError(f"{self.name}, line {line}: got {text[start : start + 60].splitlines()[0]!r}; {why}")


Spans = list[tuple[int, int]]


def _squeezed(text: str, cuts: Spans, fixed: Spans) -> str:
    """The text without what is cut, without indentation and without empty lines; what is fixed stays as it is."""
    kind = bytearray(len(text))  # 1: cut, 2: fixed
    for value, spans in ((1, cuts), (2, fixed)):
        for start, stop in spans:
            kind[start:stop] = bytes([value]) * (stop - start)
    out: list[str] = []
    fresh = True  # nothing but blanks in this line so far
    for letter, mode in zip(text, kind, strict=True):
        # A comment over several lines ends a line, as it did.
        if mode == 2 or (not fresh and letter == "\n") or (mode == 0 and not (fresh and letter.isspace())):
            out.append(letter)
            fresh = letter == "\n" and mode != 2
    return "".join(out)


def _skeleton(name: str, text: str) -> tuple[str, str, list[int], Spans, Spans]:
    """The source with comments, strings, templates and patterns blanked; the same with what stands in brackets blanked
    too; where its top-level statements begin; where comments stand, and where the texts of templates do.

    No parser: it tells code from text, and counts brackets, which is all that joining needs.
    """
    out = list(text)
    inside: list[int] = []  # places within brackets
    tops: list[int] = []
    comments: Spans = []
    templates: Spans = []
    open_brackets: list[str] = []
    fresh = True  # a statement may begin here
    place = 0
    before = ""  # the code before this place, without blanks, its last few characters

    def blank(start: int, stop: int) -> None:
        for at in range(start, stop):
            if out[at] != "\n":
                out[at] = " "

    while place < len(text):
        letter = text[place]
        if letter == "\n" and not open_brackets:
            fresh = fresh or before[-1:] in (";", "}")
        if letter.isspace():
            place += 1
            continue
        start = place
        comment = _COMMENT.match(text, place)
        if comment is not None:
            if comment[0] == "/*":
                raise BundleError(f"{name}: a comment does not end")
            place = comment.end()
            comments.append((start, place))
            blank(start, place)
            continue
        if fresh and not open_brackets:
            tops.append(place)
            fresh = False
        if letter in "\"'":
            place = _past_string(name, text, place)
            blank(start + 1, place - 1)
            before = '"'
        elif letter == "`" or (letter == "}" and open_brackets and open_brackets[-1] == "`"):
            # A template, from its start or from the end of a ${...} in it, up to its end or the next ${.
            if letter == "}":
                open_brackets.pop()
            place, more = _past_template(name, text, place + 1)
            templates.append((start, place))
            blank(start, place)
            if more:
                open_brackets.append("`")
            before = "" if more else '"'
        elif letter == "/" and _BEFORE_PATTERN.search(before):
            place = _past_pattern(name, text, place)
            blank(start, place)
            before = '"'
        else:
            if letter in "([{":
                open_brackets.append(letter)
            elif letter in _CLOSED and (not open_brackets or open_brackets.pop() != _CLOSED[letter]):
                raise BundleError(f"{name}, line {text.count(chr(10), 0, place) + 1}: {letter!r} closes nothing")
            if open_brackets:
                inside.append(place)
            place += 1
            # Words are kept apart, so that `return` is seen as a word and `of` is not seen in `roof`.
            glued = bool(_WORD.match(letter)) and start > 0 and bool(_WORD.match(text[start - 1]))
            before = (before + letter if glued or not _WORD.match(letter) else " " + letter)[-12:]
            if letter == ";" and not open_brackets:
                fresh = True
    if open_brackets:
        raise BundleError(f"{name}: {open_brackets[-1]!r} is not closed")
    hidden = "".join(out)
    for at in inside:
        out[at] = " "
    return hidden, "".join(out), tops, comments, templates


def _past_string(name: str, text: str, place: int) -> int:
    quote = text[place]
    place += 1
    while place < len(text) and text[place] not in (quote, "\n"):
        place += 2 if text[place] == "\\" else 1
    if place >= len(text) or text[place] == "\n":
        raise BundleError(f"{name}: a string does not end")
    return place + 1


def _past_template(name: str, text: str, place: int) -> tuple[int, bool]:
    while place < len(text):
        if text[place] == "`":
            return place + 1, False
        if text.startswith("${", place):
            return place + 2, True
        place += 2 if text[place] == "\\" else 1
    raise BundleError(f"{name}: a template does not end")


def _past_pattern(name: str, text: str, place: int) -> int:
    place += 1
    in_class = False
    while place < len(text) and text[place] != "\n":
        if text[place] == "/" and not in_class:
            place += 1
            while place < len(text) and _WORD.match(text[place]):
                place += 1
            return place
        in_class = text[place] == "[" or (in_class and text[place] != "]")
        place += 2 if text[place] == "\\" else 1
    raise BundleError(f"{name}: a pattern does not end")
