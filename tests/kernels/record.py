"""Write what tests compare kernels with, for a new op or a changed kernel.

    python -m tests.kernels.record NAME ...

writes what is launched (``launches.json``), and of the operations named instructions
(``instructions.json``) and registers (``tools/kernels/registers.json``); without a name of all. It
copies ``thresholds.json`` into the table of docs/which-kernel.md. Look at what changed.
"""

import json
import re
import sys

from tests.kernels import launches, test_instructions
from tests.ops.test_thresholds import lines
from tests.test_dev import ROOT
from tools.kernels import versions

PAGE = ROOT / "docs" / "which-kernel.md"
HEAD = "| operation | GPU | wall | |\n|---|---|---|---|\n"


def registers(found):
    """Add limits of kernels that have none: the most that a case takes, up to a multiple of 8."""
    known = json.loads(versions.LIMITS.read_text("utf-8"))
    most = {}
    for one in found:
        most[one["kernel"]] = max(most.get(one["kernel"], 0), -(-one["registers"] // 8) * 8)
    text = json.dumps(most | known, indent=0, sort_keys=True)
    versions.LIMITS.write_text(text + "\n", "utf-8")


def main(names):
    """Write all of it."""
    launches.main()
    registers(test_instructions.record(names))
    page = PAGE.read_text("utf-8")
    table = HEAD + "".join(f"{line}\n" for line in lines())
    PAGE.write_text(re.sub(re.escape(HEAD) + r"(?:\|.*\n)*", lambda _: table, page), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
