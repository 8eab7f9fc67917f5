"""Modules joined into one script, and that they contain only what joining reads."""

from __future__ import annotations

import hashlib
import posixpath
import re
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.inspect.html_export import (
    RUN_PAGES,
    TYPES,
    BundleError,
    join_modules,
    join_styles,
    load_assets,
    page_script,
    page_style,
)

STATIC = Path(str(resources.files("rollbook.inspect") / "static"))


def test_point_12_what_is_served_is_what_the_package_holds_by_hash() -> None:
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
    assert set(load_assets()) == set(files)
    for name, path in files.items():
        assert load_assets()[name].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert load_assets()[name].type == TYPES[path.suffix[1:]]


def test_point_12_no_file_of_the_page_names_another_machine() -> None:
    for name, asset in load_assets().items():
        if asset.type.startswith("text/"):
            text = asset.content.decode()
            named = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"(?m)^\s*//.*$", "", text))
            assert [url for url in named if not url.startswith("http://www.w3.org/")] == [], name


def test_the_page_joins_every_module_once_and_in_order() -> None:
    files = {name: asset.content.decode() for name, asset in load_assets().items() if name.endswith(".js")}
    for script, missing in ((join_modules(files, "main.js"), set()), (page_script(), {*RUN_PAGES})):
        names = re.findall(r"(?m)^// ((?:pages/)?[\w-]+\.js)$", script)
        assert len(set(names)) == len(names) and names[-1] == "main.js"
        left = set(files) - set(names)
        assert {f"pages/{name}.js" for name in missing} <= left, "what a single file has no answers for"
        assert missing or not left, "a module that main.js does not reach is dead"
        assert not re.search(r"(?m)^(?:import|export)\b", script)
        for name in names if not missing else names[:-1]:
            for target in re.findall(r'(?m)^(?:import|\}) .*from "\.{1,2}/((?:pages/)?[\w-]+\.js)"', files[name]):
                assert names.index(target) < names.index(name), f"{name} before {target}"
    assert {"pages/group.js", "pages/trajectory.js", "pages/samples.js"} <= set(names)


def test_the_page_joins_its_sheets_in_the_order_of_its_links() -> None:
    links = re.findall(r'<link rel="stylesheet" href="/?static/([^"]+)"', load_assets()["index.html"].content.decode())
    assert links and re.findall(r"(?m)^/\* (\S+\.css) \*/$", page_style()) == links


def test_modules_stand_after_what_they_import() -> None:
    files = {
        "main.js": 'import { b } from "./b.js";\nimport { c } from "./pages/c.js";\nb(c);\n',
        "b.js": "import {\n  c,\n  d,\n} from './pages/c.js';\nexport function b(x) { return c + d + x; }\n",
        "pages/c.js": 'import { e } from "../e.js";\nexport const c = e;\nexport const d = 2;\n',
        "e.js": "export class e {}\n",
        "unused.js": "nothing reads this(",
    }
    joined = join_modules(files, "main.js")
    assert re.findall(r"(?m)^// (\S+)$", joined) == ["e.js", "pages/c.js", "b.js", "main.js"]
    code = [line for line in joined.splitlines() if line and not line.startswith("//")]
    assert code == [
        "class e {}",
        "const c = e;",
        "const d = 2;",
        "function b(x) { return c + d + x; }",
        "b(c);",
    ]


def test_the_modules_contain_only_what_joining_reads() -> None:
    files = {name: asset.content.decode() for name, asset in load_assets().items() if name.endswith(".js")}
    top = re.compile(r"(?m)^(export )?(?:async function|function|const|let|class) ([A-Za-z_$][\w$]*)(?= =|[(; ])")
    exported: dict[str, set[str]] = {}
    owners: dict[str, str] = {}
    for name, text in files.items():
        exported[name] = {match[2] for match in top.finditer(text) if match[1]}
        for match in top.finditer(text):
            assert owners.setdefault(match[2], name) == name, f"{name}: {match[2]} is also in {owners[match[2]]}"
        assert len(set(top.findall(text))) == len(top.findall(text)), name
    for name, text in files.items():
        assert not re.search(r"(?i)</script|<!--", text), name
        assert not re.search(r"\bimport\s*[(.]", text), f"{name}: works only in separate files"
        for line in text.splitlines():
            assert line.count("`") % 2 == 0, f"{name}: a template of several lines would lose its indentation: {line}"
            if re.match(r"(?:export|async|function|const|let|var|class)\b", line):
                assert top.match(line), f"{name}: not one plain name: {line}"
            assert not re.match(r"(?:let|var) [\w$]+,", line), f"{name}: not one plain name: {line}"
        imports = re.findall(r"(?m)^import\b[^;]*;$", text)
        assert len(imports) == len(re.findall(r"(?m)^import\b", text))
        for statement in imports:
            match = re.fullmatch(r'import \{ ([\w$]+(?:, [\w$]+)*) \} from "(\.{1,2}/[\w/-]+\.js)";', statement)
            assert match, f"{name}: {statement}"
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
            assert set(match[1].split(", ")) <= exported[target], f"{name}: {target} does not export all of these"


def test_comments_and_indentation_go_and_text_stays() -> None:
    source = "// why\n\n/** Doubles.\n * a * b */\nfunction a() { // here\n  return '/* no comment */'; // why\n}\n\n"
    assert join_modules({"main.js": source}, "main.js").splitlines()[1:] == [
        "function a() { // here",
        "return '/* no comment */'; // why",
        "}",
    ]
    sheet = "/* why */\na {\n  color: red; /* here */\n}\n\n  b { content: '  x' }\n"
    assert join_styles({"a.css": sheet}).splitlines() == [
        "/* a.css */",
        "a {",
        "color: red; ",
        "}",
        "b { content: '  x' }",
    ]


@pytest.mark.parametrize(
    "sheet", ["@import 'x.css';", "a { background: url(https://evil.example/x) }", "a{background:URL('x')}", "</style>"]
)
def test_a_sheet_that_would_fetch_or_break_out_is_refused(sheet: str) -> None:
    with pytest.raises(BundleError, match=re.escape("b.css: ")):
        join_styles({"a.css": "p { color: red }", "b.css": sheet})


_TEXTS = st.text(alphabet="ab{}()[]'\"`/\\$*\n;=. import", max_size=30)


@given(st.lists(_TEXTS, max_size=4))
def test_any_text_in_a_string_is_no_code(texts: list[str]) -> None:
    quoted = [text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") for text in texts]
    parts = [f"const a{place} = '{text}';\n" for place, text in enumerate(quoted)]
    source = "".join(f"export {part}" for part in parts) + "run();\n"
    assert join_modules({"main.js": source}, "main.js") == "// main.js\n" + "".join(parts) + "run();\n"
