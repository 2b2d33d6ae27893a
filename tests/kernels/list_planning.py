"""What test_plans.py has done with launches over lists of tensors; as planning.py."""

import contextlib
import itertools
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from apex.kernels import _plans
from apex.kernels import multi_tensor as kernels
from apex.ops.layers import swiglu
from apex.ops.lists import storage
from apex.ops.lists.multi_tensor import run
from apex.ops.lists.quantized import Quantized
from apex.ops.lists.scale import AXPBY, SCALE, AxpbyScalars, ScaleScalars
from apex.ops.updates.sgd import MOMENTUM, MomentumScalars
from apex.optimizers._eight_bit import CODES
from tests.kernels import planning

SINGLE, HALF, CPU = torch.float32, torch.float16, torch.device("cpu")


def _column(dtype=SINGLE, *, shift=0, sizes=(16, 40)):
    """Tensors that begin that many elements behind an address that is a multiple of 16."""
    return [torch.zeros(size + shift, dtype=dtype)[shift:] for size in sizes]


def _one(value, dtype=SINGLE, *, shift=0):
    return torch.full((1 + shift,), value, dtype=dtype)[shift:].reshape(())


def _calls():
    """Pairs of a name and what `run` is given: neighbours differ in one thing."""
    for shift, dtype in itertools.product((0, 1), (SINGLE, HALF)):
        yield f"{dtype} {shift}", _axpby([_column(dtype, shift=shift), _column(), _column()])
    numbers = (
        1, 1.0, 0.5, True, False, 16, 2**31, _one(2.0), _one(2.0, shift=1), _one(2.0, HALF),
        torch.ones(1), torch.ones(2), torch.ones(3)[1:],
    )  # fmt: skip
    others = 1.0, _one(2.0), _one(2.0, shift=1)
    for (n, a), (m, b) in itertools.product(enumerate(numbers), enumerate(others)):
        yield f"numbers {n} {m}", _axpby(scalars=AxpbyScalars(a, b))
    flags = (*map(_one, (0, 0), (SINGLE, torch.int32)), _one(0, shift=1))
    for number, flag in enumerate(flags):
        yield f"skipped {number}", _axpby(noop=flag)
        for flags_of in ((1,), (1, 2), ()):
            yield f"flag {number} {flags_of}", _axpby(flag=flag, flags=flags_of)
    yield "no flag", _axpby()
    for stores in (((0, 0),), ((0, 0), (2, 0)), ((2, 0), (0, 0))):
        yield f"stores {stores}", _axpby(stores=stores)
    for sums, largest in itertools.product(((2,), (4,), (2, 4)), (False, True)):
        options = {"sums": sums, "largest": largest}
        yield f"sums {sums} {largest}", (SCALE, [_column()], (), ScaleScalars(1.0), options)
    half = torch.bfloat16
    for stored in (storage.PLAIN, storage.LOW_BITS, storage.KAHAN, storage.STOCHASTIC):
        extra = [] if stored.extra is None else [_column(stored.extra)]
        seed = torch.ones((), dtype=torch.int32) if stored.seeded else None
        columns = [_column(half), _column(half), _column(), *extra]
        yield stored.name, _momentum(columns, codec=stored.codec(), seed=seed)
    absmax = [torch.zeros(1) for _ in range(2)]
    for number in (1, 2):
        columns = [_column(), _column(), _column()]
        columns[number] = _column(torch.uint8)
        codec = storage.PLAIN.codec((Quantized(number, CODES["exp_avg"], absmax),))
        yield f"8 bits {number}", _momentum(columns, codec=codec)


def _axpby(columns=None, stores=((2, 0),), scalars=None, **options):
    columns = columns or [_column() for _ in range(3)]
    return AXPBY, columns, stores, scalars or AxpbyScalars(1.0, 0.5), options


def _momentum(columns, **options):
    numbers = MomentumScalars(1.0, 0.1, 0.9, 1.0, 0.0, 0.0, 0.0, 0.0)
    return MOMENTUM, columns, ((1, 0), (2, 1)), numbers, options


def _ran(call):
    """What a call ran: compiled kernels, or the error; and whether one went through the JIT."""
    update, columns, stores, scalars, options = call
    planning.ran.clear()
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as jit:
        try:
            run(update, columns, stores, scalars, **options)
        except triton.CompilationError as error:  # of other constants
            return [str(error)], True
    return [launcher for launcher, _ in planning.ran], jit.called


@contextlib.contextmanager
def _recording(families):
    with planning.recording(), mock.patch.object(kernels, "_FAMILIES", families):
        yield


def differing(families=None):
    """Calls that took another kernel than where nothing is planned; those that went to the JIT.

    Args:
        families: What is planted instead of the dictionary of families.
    """
    wrong, by_the_jit, every = [], set(), [*_calls()]
    with _recording({} if families is None else families):
        for turn, (name, call) in itertools.product(range(2), every):
            taken, went = _ran(call)
            with mock.patch.object(kernels, "_FAMILIES", {}):
                expected, _ = _ran(call)
            if taken != expected:
                wrong.append(name)
            if went and turn:
                by_the_jit.add(name)
    return wrong, by_the_jit


class _Short(dict):
    """Families by a key that lacks one part, counted from its end."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def get(self, key):
        return super().get((*key[: -self.part], *key[-self.part :][1:]))

    def __setitem__(self, key, value):
        super().__setitem__((*key[: -self.part], *key[-self.part :][1:]), value)


def differing_without_addresses():
    """`differing`, where a key does not say which addresses are multiples of 16."""
    with mock.patch.object(_plans, "_aligned", return_value=()):
        return differing()


def parts_that_matter():
    """Of a key's last parts, those without which a call takes another kernel, and all of them."""
    parts = range(1, 10)  # the sums and what follows; before it are the kinds of scalars
    return [part for part in parts if differing(_Short(part))[0]], [*parts]


def left_to_the_jit():
    """Which launches went to the JIT after a plan was made."""
    call, found = dict(_calls())["no flag"], {}
    with _recording({}):
        _ran(call)
        found["the same again"] = _ran(call)[1]
        hooks = planning.knobs.runtime.launch_enter_hook
        hooks.calls.append(lambda *args: None)
        found["a hook"] = _ran(call)[1]
        hooks.calls.clear()
    with _recording({}), mock.patch.object(torch.version, "hip", "7"):
        _ran(call)
        found["AMD"] = _ran(call)[1]

    class Elsewhere(torch.Tensor):
        def get_device(self):
            return 3

    with _recording({}):
        for _ in range(2):
            other = _axpby(scalars=AxpbyScalars(1.0, _one(2.0).as_subclass(Elsewhere)))
            found["a number on another device"] = _ran(other)[1]
    return found


def counted_by_the_benchmark():
    """How many launches benchmarks/launch_cost.py notes of a call: by the JIT, then by its plan."""
    from benchmarks.launch_cost import recorded

    _, call = next(_calls())
    row = torch.zeros(4, 16, dtype=HALF)
    found = []
    with _recording({}):
        for _ in range(3):
            with recorded() as launches:
                _ran(call)
                swiglu.OP(row, row)
            same = []
            for one in launches:
                planning.ran.clear()
                one.again()
                one.by_the_jit()
                same.append(len({launcher for launcher, _ in planning.ran}) == 1)
            found.append(same)
    return found
