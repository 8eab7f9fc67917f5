"""Sphinx configuration: `make docs` builds the site into `build/docs`."""

from __future__ import annotations

from rollbook import __version__

project = "Rollbook"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "Rollbook"
exclude_patterns = ["config_page.py", "draw.py"]
nitpicky = False
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_type_aliases: dict[str, str] = {}
napoleon_numpy_docstring = False
