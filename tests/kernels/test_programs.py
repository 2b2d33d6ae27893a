"""No kernel depends on the order of its programs, and no two programs of a launch race.

See programs.py (what is recorded) and operations.py (what is run).
"""

import collections
import functools

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, and not interpreted", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

if not hasattr(InterpretedFunction, "run"):
    pytest.skip("the interpreter of Triton 3.5 cannot be watched", allow_module_level=True)

from apex.ops import _runtime
from tests.kernels import programs
from tests.kernels.operations import operations
from tests.kernels.programs import ORDERS, bits, recorded
from tools.kernels import finding

OPERATIONS = dict(operations())


@functools.cache
def ran(name, order="forward"):
    """What an operation wrote, and its launches."""
    torch.manual_seed(0)
    with _runtime.use("triton"), recorded(order) as launches:
        written = OPERATIONS[name]()
    return bits(written), launches


# Every other one by default: tests/gpu finds races of the compiled code as well.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if number % 2 else [])
        for number, name in enumerate(OPERATIONS)
    ],
)
def test_the_order_of_programs_changes_nothing_and_none_race(name):
    expected, launches = ran(name)
    assert launches
    assert [race for launch in launches for race in launch.races()] == []
    written, _ = ran.__wrapped__(name, "reversed")
    assert all(map(torch.equal, expected, written))


@pytest.mark.slow
def test_every_kernel_was_launched_by_several_programs():
    """Those of all `cases()`, with every function that is compiled into them."""
    most = collections.Counter()
    for name in OPERATIONS:
        for launch in ran(name)[1]:
            for function in launch.functions:
                most[function] = max(most[function], len(launch.order))
    for case in finding.cases():
        for function in (case.kernel, *case.constants.values()):
            if isinstance(function, InterpretedFunction):
                where = f"{function.fn.__module__}.{function.__name__}"
                few = 0 if function.__name__ == "norm_kernel" else 1  # one program has all sums
                assert most[function] > few, f"{where}: add an operation to operations.py"


# -- what is planted -----------------------------------------------------------------------------


@triton.jit
def overlapping(out_ptr, BLOCK: tl.constexpr):
    """Each program writes one element too many."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + program * (BLOCK - 1) + lanes, lanes * 0 + program)


@triton.jit
def shifting(x_ptr, BLOCK: tl.constexpr):
    """In place, and each program reads what the next one writes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at + 1))


@triton.jit
def ticketing(counter_ptr, out_ptr):
    """No race, and the first come are the first served."""
    tl.store(out_ptr + tl.program_id(0), tl.atomic_add(counter_ptr, 1))


@triton.jit
def flagging(flag_ptr, VALUE: tl.constexpr):
    """Every program writes the flag; with ``VALUE`` None its own number."""
    tl.store(flag_ptr, tl.program_id(0) if VALUE is None else VALUE)


@triton.jit
def filling(out_ptr, BLOCK: tl.constexpr):
    """Every program writes the same, and more than one element."""
    tl.store(out_ptr + tl.arange(0, BLOCK), 1)


def planted(kernel, *arguments, order="forward", **constants):
    tensors = [torch.arange(size, dtype=torch.int32) for size in arguments]
    with recorded(order) as launches:
        kernel[(3,)](*tensors, **constants)
    return bits(tensors), [race for launch in launches for race in launch.races()]


def test_a_race_between_writes_is_found():
    assert planted(overlapping, 64, BLOCK=16)[1] == [
        "overlapping: programs 0, 1 write one address (8 bytes)"
    ]


def test_a_race_between_a_read_and_a_write_is_found():
    assert planted(shifting, 64, BLOCK=16)[1] == [
        "shifting: programs 0, 1 read what another program writes (8 bytes)"
    ]


def test_atomics_and_equal_values_are_allowed_by_name_only(monkeypatch):
    meeting = "ticketing: programs 0, 1, 2 change one address (4 bytes)"
    assert planted(ticketing, 1, 3)[1] == [meeting]
    writing = "flagging: programs 0, 1, 2 write one address (4 bytes)"
    assert planted(flagging, 1, VALUE=1)[1] == [writing]
    monkeypatch.setattr(programs, "ATOMIC", {"ticketing": "planted"})
    monkeypatch.setattr(programs, "SAME_VALUE", {"flagging": "planted"})
    assert planted(ticketing, 1, 3)[1] == []
    assert planted(flagging, 1, VALUE=1)[1] == []
    assert planted(flagging, 1, VALUE=None)[1] == [writing.replace("4", "1")]  # the lowest byte
    monkeypatch.setattr(programs, "SAME_VALUE", {"filling": "planted"})
    assert planted(filling, 64, BLOCK=16)[1] == [
        "filling: programs 0, 1, 2 write one address (64 bytes)"
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_a_dependence_on_the_order_is_found(order):
    expected, _ = planted(ticketing, 1, 3)
    written, _ = planted(ticketing, 1, 3, order=order)
    assert all(map(torch.equal, expected, written)) == (order == "forward")
