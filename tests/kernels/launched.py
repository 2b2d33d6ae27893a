"""Launch kernels through Triton's own JIT, for a GPU that is not here.

Inspection compiles what launchers pass for tensors without memory, and the interpreter never
compiles. Here the operations themselves bind their arguments, specialise on them (a 1 becomes a
constant, an address a multiple of 16), compile and launch; only the driver is a stand-in.

    python launched.py [NAME ...]

Prints the kernels that each operation launched, as JSON; without names those of all.
"""

import json
import sys

import torch
from triton.runtime import driver

from apex.bench.catalogue.ops import OPS
from apex.ops import _runtime
from tests.kernels.driver import Hopper, launched
from tests.kernels.operations import BRAIN, FLOAT, called, operations


def cases():
    """All operations, and ops of as few elements as there can be, and at all of their shapes."""
    yield from operations()
    for op in OPS:
        if op.operator:
            least = 4 if "rotary" in op.name else 1  # of which three quarters are rotated
            yield f"{op.name}, of one", called(op, op.of_matrix((1, least)), FLOAT)
            for shape in ((1, 2 * least), (2, least), (3, 17), (1, 8192), (2, 70_000), (5, 1024)):
                yield f"{op.name}, {shape}", called(op, op.of_matrix(shape), BRAIN)


def main(names):
    driver.set_active(Hopper())
    torch.set_num_threads(1)
    found = {}
    for name, operation in cases():
        if name in names or not names:
            launched.clear()
            with _runtime.use("triton"):
                operation()
            found[name] = [*launched]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
