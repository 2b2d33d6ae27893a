"""What test_plans.py has done in a process where kernels are compiled: no interpreter, no GPU."""

import contextlib
import itertools
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from apex.catalogue.entry import DTYPES
from apex.catalogue.ops import OPS
from apex.kernels._plans import Family
from apex.ops import _runtime
from apex.ops.layers import scaled_softmax, swiglu
from apex.ops.losses import cross_entropy, focal_loss
from apex.ops.norms import group_norm, row_norms
from tests.amp.test_frames import frames_of
from tests.kernels.driver import Hopper, Launcher, without_machine_code

SIZES = (1, 2, 16, 32, 2**31 - 1, 2**31, 2**31 + 1)
CPU = torch.device("cpu")


@triton.jit
def _plus(x):
    return x + 1.0


@triton.jit
def _minus(x):
    return x - 1.0


@triton.jit
def _planned(x_ptr, y_ptr, size, other, scale, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    if y_ptr is not None:
        tl.store(y_ptr + at, (FUNCTION(x) * scale + other).to(y_ptr.dtype.element_ty), at < size)


ran = []  # of the process, as Triton keeps launchers for as long


class Noting(Launcher):
    """Notes which compiled kernel ran, with what."""

    def __call__(self, *args):
        super().__call__(*args)
        ran.append((self, args))


class Recording(Hopper):
    """A driver that computes nothing."""

    launcher_cls = Noting


@contextlib.contextmanager
def recording():
    """Launches compute nothing, and what ran is noted."""
    driver.set_active(Recording())
    ran.clear()
    hook = mock.patch.object(
        knobs.runtime, "add_stages_inspection_hook", without_machine_code, create=True
    )
    with hook, _runtime.use("triton"):
        yield


def _of_the_jit(family, grid, tensors, numbers):
    """What Triton's JIT takes for the same arguments."""
    arguments = (*tensors, *numbers, *family.constants)
    return family.kernel[grid](*arguments, **family.options).run


def differing(**more):
    """Calls of a kernel for which a plan took another than the JIT; ``more``: what is planted."""
    buffer = torch.zeros(64, dtype=torch.float32)
    places = [buffer[offset : offset + 16] for offset in (0, 1, 4)]  # a multiple of 16 bytes, 4, 16
    families = {
        (y is None, function): Family(_planned, (function, 16))
        for y, function in itertools.product((None, buffer), (_plus, _minus))
    }
    wrong, planned = [], 0
    with recording():
        for _, size, other, x, y, function in itertools.product(
            range(2), SIZES, (1, 16), places[:2], (None, places[2]), (_plus, _minus)
        ):
            family = families[y is None, function]
            numbers, varying = (size, other, 0.5), (size, other)
            family.launch((1, 1, 1), (x, y), numbers, *more.get("varying", varying))
            taken, args = ran[-1]
            planned += isinstance(args[9], int)
            if taken is not _of_the_jit(family, (1, 1, 1), (x, y), numbers):
                wrong.append((size, other, x.storage_offset(), y is None, function.__name__))
    return wrong, planned


@contextlib.contextmanager
def compared():
    """Note launches whose plan is another kernel than the JIT's, and how many took a plan."""
    wrong, planned = [], []
    original = Family.launch

    def launch(family, grid, tensors, numbers, *varying):
        original(family, grid, tensors, numbers, *varying)
        taken, args = ran[-1]
        if not any(isinstance(arg, torch.Tensor) for arg in args[9:]):
            planned.append(family.kernel.__name__)
        if taken is not _of_the_jit(family, grid, tensors, numbers):
            wrong.append((family.kernel.__name__, [*numbers]))

    with recording(), mock.patch.object(Family, "launch", launch):
        yield wrong, planned


def of_operations(name):
    """An operation at many shapes and places in memory."""
    op = {each.name: each for each in OPS}[name]
    with compared() as (wrong, planned):
        for shape, dtype in itertools.product(_shapes(op), (op.dtypes[0], op.dtypes[-1])):
            for offset in (0, 0, 1):
                leaves, rest = op.inputs(shape, DTYPES[dtype], CPU)
                leaves[0] = _moved(leaves[0], offset).requires_grad_()
                y = op.ours(*leaves, *rest)
                torch.autograd.grad(y, leaves[0], torch.ones_like(y))
    return wrong, len(planned)


def of_mixed_arguments():
    """Dtypes that differ, tensors that are absent, gradients that are not needed, one by one."""
    made = torch.ones
    types = (torch.float32, torch.float16)
    with compared() as (wrong, planned):
        for x, w, both in itertools.product(types, types, (True, False)):
            row, weight = made(16, 16, dtype=x), made(16, dtype=w)
            pair = (weight, weight.clone()) if both else (weight, None)
            for centered in (True, False)[not both :]:
                constants = ((16,), 1e-5, centered, w)
                _both_ways(row_norms.OP, (row, *pair), constants)
                _both_ways(row_norms.MEMORY_EFFICIENT, (row, *pair), (*constants, x))
            image = made(2, 16, 2, 2, dtype=x).to(memory_format=torch.channels_last)
            _both_ways(group_norm.OP, (image, *pair), (2, 1e-5, True))
        for needs in ((True, True), (True, False), (False, True)):
            for dtype in types:
                _both_ways(
                    swiglu.OP, (made(4, 16, dtype=dtype), made(4, 16, dtype=dtype)), (), needs
                )
        for labels, padding, smoothing in itertools.product(
            (torch.int64, torch.int32), (0, -100, -(2**63)), (0.0, 0.1)
        ):
            label = made(4, dtype=labels)
            _both_ways(cross_entropy.OP, (made(4, 16),), (label, smoothing, padding))
            _both_ways(focal_loss.OP, (made(4, 16),), (label, made(1), 9, 0.25, 2.0, smoothing))
        for mask, causal in ((None, False), (None, True), (made(1, 1, 4, 4) > 2, False)):
            _both_ways(scaled_softmax.OP, (made(2, 3, 4, 4),), (mask, 0.5, causal))
    return wrong, len(planned)


def _both_ways(operation, leaves, rest, needs=None):
    """Twice, so that the second takes plans; with every gradient or those that are needed."""
    for _ in range(2):
        inputs = [None if leaf is None else leaf.detach() for leaf in leaves]
        for number, leaf in enumerate(inputs):
            if leaf is not None:
                leaf.requires_grad_(needs is None or needs[number])
        y = operation(*inputs, *rest)
        wanted = [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]
        torch.autograd.grad(y, wanted, torch.ones_like(y))


def _shapes(op):
    return [op.of_matrix(shape) for shape in ((1, 16), (2, 16), (16, 16), (3, 33), (17, 33))]


def _moved(tensor, offset):
    """The same numbers that many elements further in memory."""
    if not offset or not tensor.is_contiguous():
        return tensor
    room = tensor.new_empty(tensor.numel() + offset)
    return room[offset:].view(tensor.shape).copy_(tensor)


def left_to_the_jit():
    """Which launches, of those after a plan was made, went to the JIT."""
    x, y = torch.zeros(16), torch.zeros(16)
    family, went = Family(_planned, (_plus, 16)), {}
    numbers = (16, 3, 0.5)

    def goes(name, tensors=(x, y), numbers=numbers, varying=(16, 3)):
        with mock.patch.object(Family, "_by_the_jit") as by_the_jit:
            family.launch((1, 1, 1), tensors, numbers, *varying)
        went[name] = by_the_jit.called

    class Elsewhere(torch.Tensor):
        def get_device(self):
            return 3

    with recording():
        family.launch((1, 1, 1), (x, y), numbers, 16, 3)
        goes("the same again")
        goes("a tensor of another device", (x, y.as_subclass(Elsewhere)))
        goes("a large number", numbers=(2**31, 3, 0.5), varying=(2**31, 3))
        hooks = knobs.runtime.launch_enter_hook
        hooks.calls.append(print)
        goes("a hook")
        hooks.calls.clear()
        _planned.pre_run_hooks.append(lambda *args, **kwargs: None)
        other = Family(_planned, (_plus, 16))
        other.launch((1, 1, 1), (x, y), numbers, 16, 3)
        went["a hook of the kernel"] = not other.plans
        _planned.pre_run_hooks.clear()
        with mock.patch.object(torch.version, "hip", "7"):
            other.launch((1, 1, 1), (x, y), numbers, 16, 3)
        went["AMD"] = not other.plans
    return went


def options():
    """Warps and fusion of the compiled kernels of three families with the same constants."""
    x = torch.zeros(16)
    found = []
    with recording():
        for more in ((4, True), (8, True), (4, False)) * 2:
            Family(_planned, (_plus, 16), *more).launch((1, 1, 1), (x, x), (16, 3, 0.5), 16, 3)
            found.append(ran[-1][0])
    return len({id(launcher) for launcher in found[3:]})


def frames():
    """Frames of each operation: of apex's files and of all, forward and backward."""
    found = {}
    with recording():
        for op in OPS:
            if not op.operator:
                continue
            leaves, rest = op.inputs(op.of_matrix((16, 64)), torch.float16, CPU)
            leaves = [leaf.requires_grad_() for leaf in leaves]
            for _ in range(3):
                y = op.ours(*leaves, *rest)
                dy = torch.ones_like(y)
                torch.autograd.grad(y, leaves, dy)
            y = op.ours(*leaves, *rest)
            ways = (
                frames_of(lambda op=op, a=(leaves, rest): op.ours(*a[0], *a[1])),
                frames_of(lambda y=y, a=(leaves, dy): torch.autograd.grad(y, *a)),
            )
            found[op.name] = [
                (sum(n for (file, _), n in way.items() if "/src/apex/" in file), way.total())
                for way in ways
            ]
    return found


def differing_without_sizes():
    """`differing`, where launches say nothing about the numbers that vary."""
    return differing(varying=())
