"""Sphinx: the pages of this folder, and the API from the docstrings. Built by ``./dev docs``."""

import re
from typing import Any

import apex

project = "apex"
author = "The apex contributors"
copyright = f"the apex contributors, BSD-3-Clause. Version {apex.__version__}"
version = release = apex.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links such as distributed.md#fsdp2-and-dtensor
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_include_init_with_doc = True
napoleon_use_ivar = True  # attributes that are properties too are described once
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["code.css"]
html_title = "apex"

# Attributes of classes that no program uses, and classes that programs read but do not construct.
INTERNAL = re.compile(
    "autocasts|gradient|keeps_graph|(narrow_)?slots|slot_shapes|multi_tensor_.*|warned|.*import_error"
)
RESULTS = re.compile(r".*\.(Finding|Patched|Report|Watch|WhatIf)")


def setup(app: Any) -> None:
    """Leave these attributes, and the arguments of these classes, off the API pages."""
    skip = "autodoc-skip-member", lambda *args: bool(INTERNAL.fullmatch(args[2])) or None
    arguments = "autodoc-process-signature", lambda *args: RESULTS.fullmatch(args[2]) and ("", None)
    app.connect(*skip)
    app.connect(*arguments)
