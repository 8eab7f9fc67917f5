"""Modules joined into one script: it runs as they do, and what could change its meaning is refused by name."""

from __future__ import annotations

import hashlib
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
            assert [each for each in named if not each.startswith("http://www.w3.org/")] == [], name


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


def test_words_of_modules_inside_texts_are_left_alone() -> None:
    source = (
        "/* import { x } from './x.js';\nexport default 3 */\n"
        "// export { y }\n"
        "const text = `\nimport { z } from \"./z.js\";\nexport default ${`${1 + { a: '}' }.a}`} const text = 1`;\n"
        "const pattern = /[/'\"`]export {/g;\n"
        "const divided = text.length / 2 / 1;\n"
        "export function take(a, b = '{') { if (/}/.test(a)) return `${b}`; }\n"
        "export async function wait() { const text = 2; return text; }\n"
    )
    joined = join_modules({"main.js": source}, "main.js")
    assert joined == "// main.js\n" + source[source.index("const text") :].replace(
        "export function", "function"
    ).replace("export async", "async")


def test_comments_and_indentation_go_and_text_stays() -> None:
    source = (
        "// why\n\nfunction a() { // here\n  /* over\n     lines */\n  return (\n"
        "    `two\n\n    lines // no comment ${b(\n      '/* no comment */')}\n  `\n  );\n}\n\n\n"
        "const c = a() /* between */ / 2; // at the end"
    )
    assert join_modules({"main.js": source}, "main.js").splitlines()[1:] == [
        "function a() { ",
        "return (",
        "`two",
        "",
        "    lines // no comment ${b(",
        "'/* no comment */')}",
        "  `",
        ");",
        "}",
        "const c = a()  / 2;",
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
    ("files", "said"),
    [
        ({"main.js": 'import { a } from "./a.js";'}, "main.js: imports a.js, which is not there"),
        ({"main.js": 'import { b } from "./a.js";', "a.js": "export const a = 1;"}, "'b', which a.js does not export"),
        ({"main.js": 'import { a as b } from "./a.js";', "a.js": "export const a = 1;"}, "cannot rename"),
        ({"main.js": 'import a from "./a.js";'}, "main.js, line 1"),
        ({"main.js": '\nimport * as a from "./a.js";'}, "main.js, line 2"),
        ({"main.js": 'import "./a.js";'}, "expected import { a, b } from"),
        ({"main.js": 'import { a } from "https://evil.example/a.js";'}, "expected a file of this folder"),
        ({"main.js": 'import { a } from "left-pad";'}, "expected a file of this folder"),
        ({"main.js": 'const a = await import("./a.js");'}, "import() and import.meta"),
        ({"main.js": "const here = import.meta.url;"}, "import() and import.meta"),
        ({"main.js": "export default function a() {}"}, "expected export function"),
        ({"main.js": "const a = 1;\nexport { a };"}, "main.js, line 2"),
        ({"main.js": "const a = 1;\nfunction a() {}"}, "main.js: declares 'a' twice"),
        ({"main.js": "const a = 1, b = 2;"}, "one plain name"),
        ({"main.js": "const { a } = window;"}, "one plain name"),
        ({"main.js": 'import { b } from "./b.js";\nconst a = b;', "b.js": "const a = 1;\nexport const b = a;"}, "b.js"),
        (
            {"main.js": 'import { b } from "./b.js";\nexport const a = 1;', "b.js": 'import { a } from "./main.js";'},
            "main.js -> b.js -> main.js",
        ),
        ({"main.js": "const a = '</script>';"}, "'</script' is not allowed"),
        ({"main.js": "const a = '</SCRIPT';"}, "'</script' is not allowed"),
        ({"main.js": "const a = '<!--';"}, "'<!--' is not allowed"),
        ({"main.js": "const a = `open"}, "a template does not end"),
        ({"main.js": "const a = 'open\n';"}, "a string does not end"),
        ({"main.js": "/* open"}, "a comment does not end"),
        ({"main.js": "function a() {"}, "'{' is not closed"),
        ({"main.js": "function a() ]"}, "']' closes nothing"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_its_file(files: dict[str, str], said: str) -> None:
    with pytest.raises(BundleError) as error:
        join_modules(files, "main.js")
    assert said in str(error.value)


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
