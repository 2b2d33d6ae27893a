"""Plant random bugs in lines of a change or of a file, and list those that no test sees.

    python -m tools.mutate --since HEAD~3                   lines of src that changed since then
    python -m tools.mutate src/apex/ops/losses --bugs 50    all lines of these files and folders
    python -m tools.mutate ... --tests "--quick tests/ops"  with these tests alone

A bug is a changed operator, condition or call. First the tests run once in a copy of the tree, the
quick selection by default, which shows what tests run each line. Then each bug is planted in a
copy. The tests that run its line are repeated, the fastest first, and then others of their files,
for up to --seconds. For each survivor decide: is a test missing, or is the program the same for
its users? Then simpler code may do. The exit status is 0 if no bug survived.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools import quiet_without_reader, traced
from tools.copies import Copies, Copy, TimedOut, listed

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 3600.0  # seconds of the first run
HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
TOKEN = re.compile(r"is\s+not|not\s+in|\b(?:is|in|and|or)\b|[-+*/%<>=!&|^]+")
PAIRS = [
    ("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in"), ("and", "or"),
    ("+", "-"), ("*", "/"), ("+=", "-="), ("*=", "/="), ("&", "|"), ("add", "sub"),
    ("add_", "sub_"), ("mul", "div"), ("mul_", "div_"), ("amax", "amin"), ("max", "min"),
    ("any", "all"), ("ones", "zeros"), ("ones_like", "zeros_like"),
]  # fmt: skip
OTHER = {"**": "*", "//": "*", "%": "//"}
OTHER |= {old: new for pair in PAIRS for old, new in (pair, pair[::-1])}
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr)  # texts, and what cannot happen


class Bug(NamedTuple):
    """The characters of a file from ``begin`` to ``end``, and what replaces them.

    Attributes:
        lines: Of the smallest statement around them; of a compound one its head.
        called: Whether they are in the body of a function: an import alone does not run them.
    """

    file: str
    line: int
    begin: int
    end: int
    new: str
    lines: range
    called: bool

    def planted(self, source: str) -> str:
        """Return the file's text with the bug."""
        return source[: self.begin] + self.new + source[self.end :]


class Finder:
    """Finds everything that can be changed in a file."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self.lines = [f"{line}\n" for line in source.split("\n")]
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.found: dict[tuple[int, int, str], Bug] = {}
        self._visit(ast.parse(source), range(0), False)

    def _visit(self, node: ast.AST, lines: range, called: bool) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or 0) + 1
            lines = range(node.lineno, max(end, node.lineno + 1))
        for begin, end, new in self._changes(node):
            line = self.source.count("\n", 0, begin) + 1
            self.found[begin, end, new] = Bug(self.file, line, begin, end, new, lines, called)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                wanted = isinstance(child, ast.AST) and not isinstance(child, LEFT_OUT)
                if wanted and name not in ("annotation", "returns"):
                    self._visit(child, lines, called or (function and name == "body"))

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Yield what can be changed in a node itself, its parts left alone."""
        match node:
            case ast.BinOp(left=a, right=b) | ast.AugAssign(target=a, value=b):
                yield from self._operators([a, b])
            case ast.Compare(left=a, comparators=others):
                yield from self._operators([a, *others])
            case ast.BoolOp(values=values):
                yield from self._operators(values)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=a) if type(a) is not ast.Constant:
                yield *self._span(node), self._text(a)
            case (
                ast.If(test=a) | ast.IfExp(test=a) | ast.While(test=a) | ast.comprehension(ifs=[a])
            ):
                yield *self._span(a), "False"
                yield *self._span(a), "True"
            case ast.Constant(value=bool() as value):
                yield *self._span(node), str(not value)
            case ast.Expr(value=ast.Call()):
                yield *self._span(node), "pass"
            case ast.Call():
                yield from self._calls(node)

    def _operators(self, operands: Sequence[ast.expr]) -> Iterator[tuple[int, int, str]]:
        for left, right in itertools.pairwise(operands):
            begin, end = self._span(left)[1], self._span(right)[0]
            text = re.sub(r"#.*", lambda x: " " * len(x[0]), self.source[begin:end])
            token = TOKEN.search(text)
            if token and (new := OTHER.get(" ".join(token[0].split()))):
                yield begin + token.start(), begin + token.end(), new

    def _calls(self, node: ast.Call) -> Iterator[tuple[int, int, str]]:
        """Call another method; or none: ``x.clone()`` and ``float(x)`` become ``x``."""
        begin, end = self._span(node)
        behind = self._span(node.func)[1]
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in OTHER:
            yield behind - len(name), behind, OTHER[name]
        if (begin, end, "pass") in self.found:  # a statement
            return
        match node:
            case ast.Call(func=ast.Attribute(value=a), args=[], keywords=[]):
                yield begin, end, self._text(a)
            case ast.Call(args=[a], keywords=[]) if not isinstance(a, ast.Starred):
                yield begin, end, self._text(a)

    def _span(self, node: Any) -> tuple[int, int]:
        """Return where a node begins and ends, in characters; ``ast`` counts bytes."""
        places = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        begin, end = (
            self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())
            for line, column in places
        )
        return begin, end

    def _text(self, node: ast.expr) -> str:
        begin, end = self._span(node)
        return f"({self.source[begin:end]})"


def changed_lines(since: str, paths: Sequence[str]) -> dict[str, set[int]]:
    """Return, for each file, the numbers of lines that a commit does not have."""
    command = ["git", "diff", "--unified=0", "--no-ext-diff", "--no-color", since, "--", *paths]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = {}
    for part in done.stdout.split("\n+++ b/")[1:]:
        hunks = [(int(start), int(count or 1)) for start, count in HUNK.findall(part)]
        found[part.split("\n")[0]] = {line for s, n in hunks for line in range(s, s + n)}
    return found


def candidates(paths: Sequence[str], since: str | None) -> list[Bug]:
    """Find the bugs that can be planted in these files and folders, or in what changed there."""
    lines = changed_lines(since, paths) if since else {}
    inside = [Path(path) for path in paths]
    found: list[Bug] = []
    for name in listed(ROOT):
        if name.endswith(".py") and any(Path(name).is_relative_to(path) for path in inside):
            bugs = Finder(name, (ROOT / name).read_text("utf-8")).found.values()
            found += [bug for bug in bugs if not since or bug.line in lines.get(name, ())]
    return found


class Measured:
    """Which tests run each line, and how long each takes; of what ``tools.traced`` wrote."""

    def __init__(self, text: str) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.red: set[str] = set()
        for outcome, seconds, test in re.findall(r"^test (\w+) (\S+) (.+)$", text, re.MULTILINE):
            self.seconds[test] += float(seconds)
            self.red |= {test} if outcome == "failed" else set()
        keys = {traced.key(test).hex(): test for test in self.seconds.keys() - self.red}
        self.tests: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
        for key, file, line in re.findall(r"^(\w{16}) (.+):(\d+)$", text, re.MULTILINE):
            self.tests[file, int(line)] |= {keys[key]} if key in keys else set()

    def runners(self, bug: Bug) -> set[str]:
        """Return the tests that run a line; for one outside of functions, those of the file."""
        exact = self.tests.get((bug.file, bug.line), set()) if bug.called else set()
        return exact or {
            test
            for (file, line), tests in self.tests.items()
            if file == bug.file and (line in bug.lines or not bug.called)
            for test in tests
        }

    def affordable(self, runners: set[str], seconds: float) -> list[str]:
        """Return what to repeat in this time: runners, then others of their files, fast ones first.

        A fixture or a cache runs a line for several tests, and the first of them is its runner.
        """
        files = {test.partition("::")[0] for test in runners}
        others = {test for test in self.seconds if test.partition("::")[0] in files} - self.red
        first, *rest = [*self._ordered(runners), *self._ordered(others - runners)]
        chosen, used = [first], self.seconds[first]
        for test in rest:
            used += self.seconds[test]
            chosen += [test] if used < seconds else []
        return chosen

    def _ordered(self, tests: set[str]) -> list[str]:
        """Order them: the fastest case of each function, and then the other cases."""
        by_time = sorted(tests, key=lambda test: (self.seconds[test], test))
        first = {test.partition("[")[0]: test for test in reversed(by_time)}
        return sorted(by_time, key=lambda test: first[test.partition("[")[0]] != test)


def measure(copy: Copy, files: Sequence[str], tests: Sequence[str]) -> Measured:
    """Run tests, and see which of them runs which line of these files."""
    hook = copy.folder.parent / "hook"
    hook.mkdir()
    shutil.copyfile(traced.__file__, hook / "sitecustomize.py")
    (hook / "files").write_text("".join(f"{copy.folder / name}\n" for name in files), "utf-8")
    words = ["-p", "sitecustomize", *tests]
    done = copy.run(words, LIMIT, [hook], {traced.FOLDER: str(hook)})
    print(f"without a bug: {done.last}", *done.red, sep="\n  ", flush=True)
    measured = Measured((hook / "lines").read_text("utf-8").replace(f"{copy.folder}{os.sep}", ""))
    if not measured.seconds:
        sys.exit("mutate: no test ran; --tests are arguments of pytest")
    return measured


def plant(copy: Copy, bug: Bug, tests: Sequence[str], limit: float) -> str:
    """Repeat tests with a bug in the copy; return what has seen it, or nothing."""
    source = (copy.folder / bug.file).read_text("utf-8")
    names = copy.folder.with_suffix(".tests")  # too many for a command line
    names.write_text("\n".join(tests), "utf-8")
    try:
        with copy.changed(bug.file, bug.planted(source)):
            done = copy.run(["-x", f"@{names}"], limit)
    except TimedOut:
        return f"no end within {limit:.0f} s"
    if done.status < 0:
        return f"a crash, signal {-done.status}"
    return "" if done.status == 0 else (done.red or [done.last])[0]


def show(bug: Bug, said: str) -> str:
    """Describe a bug: place, what is known of it, the old and the new lines."""
    source = (ROOT / bug.file).read_text("utf-8")
    first = source.rfind("\n", 0, bug.begin) + 1
    last = source.find("\n", bug.end)
    new = source[first : bug.begin] + bug.new + source[bug.end : last]
    lines = [f"    - {line}" for line in source[first:last].split("\n")]
    lines += [f"    + {line}" for line in new.split("\n")]
    return "\n".join([f"{bug.file}:{bug.line}  {said}", *lines])


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files and folders; by default src")
    add("--since", metavar="COMMIT", help="only lines that changed since then")
    add("--bugs", type=int, default=20, help="how many (%(default)s)")
    add("--seed", type=int, default=0, help="of the choice (%(default)s)")
    add("--tests", default="", metavar="WORDS", help="arguments of pytest, for the first run")
    add("--seconds", type=float, default=60.0, help="of tests that a bug is shown (%(default)s)")
    add("--limit", type=float, default=300.0, help="seconds until a run is ended (%(default)s)")
    add("--copies", type=int, default=os.cpu_count() or 1, help="of the tree, used at a time")
    args = parser.parse_args(words)
    if not (args.paths or args.since):
        parser.error("pass files or folders, or --since COMMIT, or both")
    paths = args.paths or ["src"]
    found = candidates(paths, args.since)
    if not found:
        parser.error(f"nothing to change in {', '.join(paths)}; paths are relative to {ROOT}")
    bugs = sorted(random.Random(args.seed).sample(found, min(args.bugs, len(found))))
    print(f"{len(bugs)} of {len(found)} possible bugs, seed {args.seed}", flush=True)
    survivors = []
    with Copies(ROOT, min(args.copies, len(bugs))) as copies:
        files, tests = sorted({bug.file for bug in bugs}), shlex.split(args.tests)
        (measured,) = copies.each(lambda copy, _: measure(copy, files, tests), [None])

        def see(copy: Copy, bug: Bug) -> tuple[Bug, str, str]:
            runners = measured.runners(bug)
            if not runners:
                return bug, "", "SURVIVED: no test runs the line"
            repeated = measured.affordable(runners, args.seconds)
            seen_by = plant(copy, bug, repeated, args.limit)
            passed = f"SURVIVED {len(repeated)} tests; {len(runners)} run the line"
            return bug, seen_by, f"seen by {seen_by}" if seen_by else passed

        for bug, seen_by, said in copies.each(see, bugs):
            survivors += [] if seen_by else [show(bug, said)]
            print(show(bug, said), flush=True)
    print(f"\n{len(survivors)} of {len(bugs)} bugs survived", *survivors, sep="\n")
    return int(bool(survivors))


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main())
