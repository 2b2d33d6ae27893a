"""Lines of code by folder: without comments, docstrings and blank lines. No check reads them.

Run ``python -m tools.size [FOLDER ...]``; the default is src, tests, tools and benchmarks of the
tree of this file. A folder's lines contain those of the folders below it.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools import quiet_without_reader

__all__ = ["by_folder", "code_lines"]

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "benchmarks")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Count the lines that hold a token of code.

    Each line of a string that spans several counts, unless it is a docstring.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - {*_docstrings(ast.parse(source))})


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of the lines of all docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            yield from range(text.lineno, (text.end_lineno or text.lineno) + 1)


def by_folder(root: Path, folders: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the number of files and of lines of code in each folder that has any.

    Names are relative to ``root``.
    """
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        length = code_lines(path.read_text("utf-8"))
        for parent in path.relative_to(root).parents[:-1]:  # the last one is "."
            files[parent.as_posix()] += 1
            lines[parent.as_posix()] += length
    return {folder: (files[folder], lines[folder]) for folder in sorted(files)}


def main(folders: list[str]) -> int:
    """Print a table, a folder in a row; return the exit code."""
    asked = folders or FOLDERS
    if missing := [name for name in asked if not (ROOT / name).is_dir()]:
        print(f"size: {missing[0]} is no folder of {ROOT}", file=sys.stderr)
        return 2
    print("  files     code  folder")
    for folder, (files, lines) in by_folder(ROOT, asked).items():
        print(f"{files:7,}  {lines:7,}  {'  ' * folder.count('/')}{folder.split('/')[-1]}")
    return 0


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main(sys.argv[1:]))
