"""Every operation that has kernels, through its public function, at sizes of several programs.

Each is a function without arguments that makes its tensors, works, and returns all that it wrote.
The sizes are awkward: more than one chunk of a list, rows that fill no tile, one row too many. Ops
and optimizers are those of `apex.catalogue`, some with other arguments or at other shapes.
What is not in it: norms without weights, two more functions of rotary embeddings, steps under amp.
test_programs.py names kernels that were never launched.
"""

import dataclasses
import functools

import torch

from apex import amp
from apex.catalogue.entry import DTYPES, random
from apex.catalogue.lists import LISTS
from apex.catalogue.ops import OPS
from apex.catalogue.optimizers import OPTIMIZERS, TRUST
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam
from apex.parallel import LARC
from apex.transformer import functional as transformer

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
CHUNK = 8192
SHAPES = ((CHUNK + 9,), (3, 5), (1,))
BY_NAME = {op.name: op for op in OPS}
VARIANTS = {
    optimizer.called(variant): (optimizer, variant)
    for optimizer in OPTIMIZERS
    for variant in optimizer.variants
}


def some(*shape, dtype=FLOAT, seed=0):
    return random(shape, dtype, CPU, seed=seed)


def column(dtype=FLOAT, seed=0, shapes=SHAPES):
    return [some(*shape, dtype=dtype, seed=seed + n) for n, shape in enumerate(shapes)]


# -- lists ---------------------------------------------------------------------------------------


def made(name, params):
    """The variant of an optimizer that has a name."""
    entry, variant = VARIANTS[name]
    options = {"lr": 0.1, "weight_decay": 0.1, **entry.options, **variant.options}
    optimizer = entry.make(params, **options)
    return LARC(optimizer, TRUST) if variant.larc else optimizer


def stepped(name, dtype=None, shapes=SHAPES, steps=1):
    """A step or several, by default in the first of the variant's dtypes."""
    dtype = dtype or DTYPES[VARIANTS[name][1].dtypes[0]]

    def run():
        params = [torch.nn.Parameter(tensor) for tensor in column(dtype, shapes=shapes)]
        optimizer = made(name, params)
        for param, grad in zip(params, column(dtype, 10, shapes), strict=True):
            param.grad = grad
        for _ in range(steps):
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*params, *(value for value in states if isinstance(value, torch.Tensor))]

    return run


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
    for name, (_, variant) in VARIANTS.items():
        if not variant.larc:
            yield name, stepped(name)
    yield "muon, a wide matrix", stepped("FusedMuon", shapes=((3, CHUNK),))
    large = ((CHUNK // 256 + 1, 256), (14, 300))  # enough for a state in 8 bits
    yield "FusedAdam, 8 bits", stepped("FusedAdam, state=8bit", BRAIN, large)
    yield "FusedAdamSWA, two steps", stepped("FusedAdamSWA of apex.contrib", steps=2)
    yield "larc", stepped("FusedSGD, LARC")
    for op in LISTS:
        yield op.name, listed(op)
    yield "amp O2", trained("O2")
    yield "amp O2, fused", trained("O2", fused_step=True)


# -- tensors -------------------------------------------------------------------------------------


def gradients(y, *inputs):
    """The output, and the gradients of the inputs."""
    return [y, *torch.autograd.grad(y, inputs, some(*y.shape, dtype=y.dtype, seed=99))]


def called(op, shape, dtype, backward=True):
    def run():
        leaves, rest = op.inputs(shape, dtype, CPU)
        if not backward:
            return [op.ours(*leaves, *rest)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        return gradients(op.ours(*leaves, *rest), *leaves)

    return run


def of_one(function, *shape, dtype=FLOAT):
    def run():
        x = some(*shape, dtype=dtype).requires_grad_()
        return gradients(function(x), x)

    return run


def with_gamma(gamma, op):
    """A focal loss with another gamma, the argument before the smoothing."""

    def rest(logits):
        *before, _, smoothing = op.rest(logits)
        return *before, gamma, smoothing

    return dataclasses.replace(op, rest=rest)


def rotary():
    angles = some(7, 1, 1, 8)
    rows, columns = angles[:2].transpose(0, 1), angles[2:].transpose(0, 1)
    tables = (rows.cos(), rows.sin(), columns.cos(), columns.sin())
    bounds = torch.tensor([0, 3, 5])

    transposing = functools.partial(BY_NAME["rotary"].ours, transpose_output_memory=True)
    transposed = dataclasses.replace(BY_NAME["rotary"], ours=transposing)

    def by_sequences(t):
        return transformer.fused_apply_rotary_pos_emb_thd(t, bounds, angles)

    def by_places(t):
        return transformer.fused_apply_rotary_pos_emb_2d(t, 2, 5, *tables)

    yield "rotary, transposed", called(transposed, (2, 3, 260, 8), HALF)
    yield "rotary of sequences", of_one(by_sequences, 6, 3, 8)
    yield "rotary of images", of_one(by_places, 1, 10, 3, 16)


def tensors():
    """Ops at the smaller of their shapes, and what other shapes and options add."""
    for op in OPS:
        if op.operator:
            for dtype in dict.fromkeys((op.dtypes[0], op.dtypes[-1])):
                yield f"{op.name}, {dtype}", called(op, op.checked.small[0], DTYPES[dtype])
    for cls, name in ((FusedLayerNorm, "layer_norm"), (FusedRMSNorm, "rms_norm")):
        plain = functools.partial(cls, elementwise_affine=False)
        yield f"{cls.__name__}, plain", of_one(plain(100), 19, 100)
        yield f"{cls.__name__}, backward in blocks", of_one(plain(8200), 2, 8200)
        from_output = called(BY_NAME[f"{name}, memory-efficient"], (2, 4100), HALF)
        yield f"{cls.__name__}, from output", from_output
        wide = called(BY_NAME[name], (2, 40_001), HALF, backward=False)
        yield f"{cls.__name__}, forward in blocks", wide
    loss = BY_NAME["cross_entropy"]
    yield "cross-entropy, in blocks", called(loss, (2, 13_001), FLOAT)
    yield "cross-entropy, programs share a row", called(loss, (1, 13_001), FLOAT)
    unmasked = dataclasses.replace(BY_NAME["masked_softmax"], rest=lambda x: (None, 0.3))
    yield "masked softmax, in blocks", called(unmasked, (1, 2, 1, 17_000), HALF)
    causal = BY_NAME["causal_softmax"]
    yield "causal softmax", called(causal, causal.checked.small[0], FLOAT)
    focal = with_gamma(1.5, BY_NAME["focal_loss, smoothed"])
    yield "focal loss, gamma 1.5", called(focal, (29, 91), FLOAT)
    yield from rotary()


def operations():
    """Yield name and function of every operation."""
    yield from lists()
    yield from tensors()
