"""What docs/nan.md shows for packages that the default environment lacks."""

import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "nan.md"


def callback(package):
    """The class ``Explain`` of the page's block that begins with ``import package``."""
    _, found, after = PAGE.read_text(encoding="utf-8").partition(f"\n    import {package}\n")
    assert found, f"{PAGE} has no block that imports {package}"
    lines = after.splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("    "))
    names = {}
    code = textwrap.dedent("\n".join([f"    import {package}", *lines[:end]]))
    exec(compile(code, str(PAGE), "exec"), names)
    return names["Explain"]
