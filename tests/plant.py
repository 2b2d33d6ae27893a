"""Plant the bugs of ``tests/behaviours.py`` in a copy of the tree, and say whether tests are red.

    python -m tests.plant NAME [NAME ...]     these, one at a time, with the test named beside each
    python -m tests.plant --all               all of them: the tests have to see every one
    python -m tests.plant NAME --tests WORDS  with other arguments of pytest: "tests/amp -k scale"
    python -m tests.plant --check             only see whether each old text occurs once

First all these tests run as the tree is, where they must be green. The working tree is only read.
The exit status is 0 if all was green before and each bug was seen.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from tests.behaviours import BEHAVIOURS, Behaviour
from tools import quiet_without_reader
from tools.copies import Copies, Copy, TimedOut

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 300  # for one bug; ranks that wait for each other for ever have seen it
FUNCTION = re.compile(r"^def (\w+)\(", re.MULTILINE)
RENAMED = "if it was moved, write down where it is now"
PLANT_ANEW = "plant it anew from the sentence, see its test red, and write the new text down"


def problems(of: Sequence[Behaviour], root: pathlib.Path = ROOT) -> list[str]:
    """What is wrong in the table: a text that does not occur once, a test that is not there."""
    found = []
    for one in of:
        file = root / one.file
        count = file.read_text("utf-8").count(one.old) if file.is_file() else 0
        if count != 1:
            found.append(f"{one.name}: old occurs {count} times in {one.file}: {PLANT_ANEW}")
        file, function = one.test.split("[")[0].split("::")
        if function not in functions(root / file):
            found.append(
                f"{one.name}: there is no {file}::{function}: {RENAMED}; else {PLANT_ANEW}"
            )
    return found


@functools.cache
def functions(file: pathlib.Path) -> set[str]:
    """The names of a file's functions."""
    return {*FUNCTION.findall(file.read_text("utf-8"))} if file.is_file() else set()


def see(one: Behaviour, copy: Copy, arguments: Sequence[str]) -> tuple[bool, str]:
    """Plant a bug; say whether a test was red, and a line about it."""
    text = (copy.folder / one.file).read_text("utf-8")
    assert text.count(one.old) == 1, one.name
    try:
        with copy.changed(one.file, text.replace(one.old, one.new)):
            status, red, last = copy.run(arguments or [one.test], SECONDS)
    except TimedOut:
        return True, f"red    {one.name}: no end within {SECONDS} s"
    if status == 1 and red:
        return True, "\n       ".join([f"red    {one.name}: {red[0]}", *red[1:]])
    how = "GREEN " if status == 0 else "ERROR "
    return False, f"{how} {one.name}: {last}"


def see_all(of: Sequence[Behaviour], arguments: Sequence[str], count: int) -> int:
    """Plant bugs one at a time in each of some copies; return how many were not seen."""
    tests = arguments or [one.test for one in of]
    with Copies(ROOT, min(count, len(of))) as copies:
        ((status, red, last),) = copies.each(lambda copy, _: copy.run(tests, SECONDS), [None])
        if status != 0:
            print("These are not green without a bug:", *(red or [last]), sep="\n  ")
            return len(of)
        unseen = 0
        for is_seen, line in copies.each(lambda copy, one: see(one, copy, arguments), of):
            unseen += not is_seen
            print(line, flush=True)
    print(f"{len(of) - unseen} of {len(of)} bugs were seen")
    return unseen


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.plant",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="plant all of them")
    parser.add_argument("--check", action="store_true", help="look at the texts alone")
    parser.add_argument("--tests", default="", metavar="WORDS", help="other arguments of pytest")
    parser.add_argument(
        "--copies", type=int, default=os.cpu_count() or 1, help="of the tree, used at a time"
    )
    given = parser.parse_intermixed_args(words)
    by_name = {one.name: one for one in BEHAVIOURS}
    if unknown := [name for name in given.names if name not in by_name]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(by_name)}")
    if not (given.names or given.all or given.check):
        parser.error("name some bugs, or pass --all or --check")
    chosen = [by_name[name] for name in given.names] or BEHAVIOURS
    found = problems(chosen)
    print(*found, sep="\n", end="\n" if found else "")
    if given.check or found:
        return int(bool(found))
    return int(see_all(chosen, shlex.split(given.tests), given.copies) > 0)


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main())
