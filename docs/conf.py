"""Sphinx configuration: `make docs` builds the site into `build/docs`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

from rollbook import __version__

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "docs" / "project"
"""Copies of the pages outside `docs/`, made by each build; their links to `docs/` are adapted."""
shutil.rmtree(PROJECT, ignore_errors=True)
for page in [*ROOT.glob("[A-Z]*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "benchmarks/results").glob("*.md")]:
    copy = PROJECT / page.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = page.read_text(encoding="utf-8")
    for picture in page.parent.glob("*.svg"):
        shutil.copy(picture, copy.parent)
    copy.write_text(re.sub(r"\]\((\.\./)*docs/", lambda match: f"]({match[1] or ''}../", text), encoding="utf-8")

project = "Rollbook"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "Rollbook"
exclude_patterns = ["project/README.md"]
# Annotations are short names, and some names occur in two packages.
# Benchmark results begin with the headings that the benchmarks print.
suppress_warnings = ["ref.python", "myst.header"]
myst_heading_anchors = 3
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # "Attributes:" as a list: autodoc already documents annotated attributes


def to_rst(docstring: str) -> str:
    """Convert the Markdown of a docstring: backticks mark code, and other characters mean themselves.

    >>> to_rst("Lists of `Row`s, |x| <= 1")
    'Lists of ``Row``\\\\ s, \\\\|x\\\\| <= 1'
    """
    # Code that is followed by a letter needs a separator. Doctests, up to the next blank line, stay as they are.
    spans = re.split(r"(^ *>>> .*?(?:\n\s*\n|\Z)|``.+?``|`[^`]+`)", docstring, flags=re.DOTALL | re.MULTILINE)
    for number, span in enumerate(spans):
        if number % 2 == 0:
            spans[number] = re.sub(r"[*|]", r"\\\g<0>", span)
        elif span.startswith("`"):
            separator = r"\ " if spans[number + 1][:1].isalnum() else ""
            spans[number] = f"``{span.strip('`')}``{separator}"
    return "".join(spans)


def process_docstring(app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Convert a docstring in place, before napoleon reads its sections."""
    lines[:] = to_rst("\n".join(lines)).split("\n")


def setup(app: Sphinx) -> None:
    """Register the conversion."""
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
