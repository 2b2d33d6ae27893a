"""Every operation that has kernels, through its public function, at sizes of several programs.

Each is a function without arguments that makes its tensors, works, and returns all that it wrote.
The sizes are awkward: more than one chunk of a list, rows that fill no tile, one row too many. Ops
and optimizers are those of `apex.selftest.catalogue`; here is what only these tests need.
test_programs.py names kernels that were never launched.
"""

import functools

import torch

from apex import amp
from apex.contrib.focal_loss import focal_loss
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam, FusedMuon
from apex.parallel import LARC
from apex.selftest.catalogue.entry import DTYPES, random
from apex.selftest.catalogue.lists import LISTS
from apex.selftest.catalogue.ops import OPS
from apex.selftest.catalogue.optimizers import OPTIMIZERS
from apex.transformer import functional as transformer
from apex.transformer.functional.fused_softmax import scaled_masked_softmax

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
CHUNK = 8192
SHAPES = ((CHUNK + 9,), (3, 5), (1,))


def some(*shape, dtype=FLOAT, seed=0):
    return random(shape, dtype, CPU, seed=seed)


def column(dtype=FLOAT, seed=0, shapes=SHAPES):
    return [some(*shape, dtype=dtype, seed=seed + n) for n, shape in enumerate(shapes)]


# -- lists ---------------------------------------------------------------------------------------


def stepped(make, dtype=FLOAT, shapes=SHAPES):
    def run():
        params = [torch.nn.Parameter(tensor) for tensor in column(dtype, shapes=shapes)]
        optimizer = make(params)
        for param, grad in zip(params, column(dtype, 10, shapes), strict=True):
            param.grad = grad
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*params, *(value for value in states if isinstance(value, torch.Tensor))]

    return run


def a_wide_matrix():
    param = torch.nn.Parameter(some(3, CHUNK))
    param.grad = some(3, CHUNK, seed=1)
    optimizer = FusedMuon([param])
    optimizer.step()
    return [param, optimizer.state[param]["momentum_buffer"]]


def listed(op):
    """Where it sets a flag, two chunks overflow and both write it."""

    def run():
        columns = [column(DTYPES[op.dtypes[-1]], 4 * number) for number in range(op.lists)]
        if op.flags and "norm" not in op.name:
            columns[0][0][3] = columns[0][0][-1] = torch.inf
        flag = torch.zeros(1, dtype=torch.int32)
        written = op.ours(flag, *columns)
        return [*written.rounded, *written.norms, flag]

    return run


def trained(level, **options):
    """A step under amp: unscaling, checking, masters."""

    def run():
        model = torch.nn.Linear(100, 90)
        with torch.no_grad():
            model.weight.copy_(some(90, 100))
        optimizer = FusedAdam(model.parameters())
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0, **options
        )
        with amp.scale_loss(model(some(2, 100)).float().sum(), optimizer) as loss:
            loss.backward()
        if options:
            amp.clip_grad_norm_(optimizer, 1.0)  # measured once, updated once
        optimizer.step()
        params = [*model.parameters()]
        amp.reset()
        return params

    return run


def lists():
    for optimizer in OPTIMIZERS:
        for variant in optimizer.variants:
            options = {"lr": 0.1, "weight_decay": 0.1, **optimizer.options, **variant.options}
            make = functools.partial(optimizer.make, **options)
            if not variant.larc:
                dtype = DTYPES[variant.dtypes[0]]
                yield optimizer.called(variant), stepped(make, dtype)
    yield "muon, a wide matrix", a_wide_matrix
    eight_bit = functools.partial(FusedAdam, state="8bit")
    yield "FusedAdam, 8 bits", stepped(eight_bit, BRAIN, ((CHUNK // 256 + 1, 256), (14, 300)))
    yield "larc", stepped(lambda p: LARC(torch.optim.SGD(p, lr=0.1, weight_decay=0.1)))
    for op in LISTS:
        yield op.name, listed(op)
    yield "amp O2", trained("O2")
    yield "amp O2, fused", trained("O2", fused_step=True)


# -- tensors -------------------------------------------------------------------------------------


def gradients(y, *inputs):
    """The output, and the gradients of the inputs."""
    return [y, *torch.autograd.grad(y, inputs, some(*y.shape, dtype=y.dtype, seed=99))]


def called(op, shape, dtype):
    def run():
        leaves, rest = op.inputs(shape, dtype, CPU)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        return gradients(op.ours(*leaves, *rest), *leaves)

    return run


def of_one(function, *shape, dtype=FLOAT, backward=True):
    def run():
        x = some(*shape, dtype=dtype).requires_grad_()
        return gradients(function(x), x) if backward else [function(x)]

    return run


def lost(logits):
    return SoftmaxCrossEntropyLoss.apply(logits, torch.arange(len(logits)))


def focal(logits):
    targets = torch.arange(len(logits)) % logits.shape[1] - 2
    return focal_loss(logits, targets, torch.tensor([3.0]), logits.shape[1] - 1, 0.25, 1.5, 0.1)


def rotary():
    angles = some(7, 1, 1, 8)
    rows, columns = angles[:2].transpose(0, 1), angles[2:].transpose(0, 1)
    tables = (rows.cos(), rows.sin(), columns.cos(), columns.sin())
    bounds = torch.tensor([0, 3, 5])

    def transposed(t):
        return transformer.fused_apply_rotary_pos_emb(t, angles, True)

    def by_sequences(t):
        return transformer.fused_apply_rotary_pos_emb_thd(t, bounds, angles)

    def by_places(t):
        return transformer.fused_apply_rotary_pos_emb_2d(t, 2, 5, *tables)

    yield "rotary, transposed", of_one(transposed, 2, 3, 260, 8, dtype=HALF)
    yield "rotary of sequences", of_one(by_sequences, 6, 3, 8)
    yield "rotary of images", of_one(by_places, 1, 10, 3, 16)


def tensors():
    """Ops at the smaller of their shapes, and what other shapes and options add."""
    for op in OPS:
        if op.operator:
            for dtype in dict.fromkeys((op.dtypes[0], op.dtypes[-1])):
                yield f"{op.name}, {dtype}", called(op, op.checked.small[0], DTYPES[dtype])
    for cls in (FusedLayerNorm, FusedRMSNorm):
        plain = functools.partial(cls, elementwise_affine=False)
        yield f"{cls.__name__}, plain", of_one(plain(100), 19, 100)
        yield f"{cls.__name__}, backward in blocks", of_one(plain(8200), 2, 8200)
        of_output = cls(4100, memory_efficient=True).half()
        yield f"{cls.__name__}, from output", of_one(of_output, 2, 4100, dtype=HALF)
        wide = cls(40_001).half()
        yield (
            f"{cls.__name__}, forward in blocks",
            of_one(wide, 2, 40_001, dtype=HALF, backward=False),
        )
    yield "cross-entropy, in blocks", of_one(lost, 2, 13_001)
    yield "cross-entropy, programs share a row", of_one(lost, 1, 13_001)
    soft = functools.partial(scaled_masked_softmax, mask=None, scale=0.3)
    yield "masked softmax, in blocks", of_one(soft, 1, 2, 1, 17_000, dtype=HALF)
    causal = next(op for op in OPS if op.name == "causal_softmax")
    yield "causal softmax", called(causal, causal.checked.small[0], FLOAT)
    yield "focal loss, gamma 1.5", of_one(focal, 29, 91)
    yield from rotary()


def operations():
    """Yield name and function of every operation."""
    yield from lists()
    yield from tensors()
