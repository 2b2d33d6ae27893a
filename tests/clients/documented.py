"""What pages of docs show for packages that the default environment lacks."""

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def callback(package, page="nan.md", name="Explain"):
    """The class ``name`` of the page's block that begins with ``import package``."""
    page = DOCS / page
    _, found, after = page.read_text(encoding="utf-8").partition(f"\n    import {package}\n")
    assert found, f"{page} has no block that imports {package}"
    lines = after.splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("    "))
    names = {}
    code = textwrap.dedent("\n".join([f"    import {package}", *lines[:end]]))
    exec(compile(code, str(page), "exec"), names)
    return names[name]


def program(page, end):
    """The code of a page, hidden or shown, up to the block that contains ``end``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^(?:```python|<!-- [^\n]*: python)\n(.*?)^(?:```|-->)$", text)
    last = next(number for number, block in enumerate(blocks) if end in block)
    return "".join(blocks[: last + 1])
