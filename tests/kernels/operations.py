"""Every operation that has kernels, through its public function, at sizes of several programs.

Each is a function without arguments that makes its tensors, works, and returns all that it wrote.
The sizes are awkward: more than one chunk of a list, rows that fill no tile, one row too many. Add
an operation here with its kernel file: test_programs.py names kernels that were never launched.
"""

import functools
import itertools

import amp_C
import torch

from apex import amp
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.optimizers import FusedAdam as ContribFusedAdam
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.mlp import swiglu
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex.parallel import LARC
from apex.transformer import functional as transformer
from apex.transformer.functional.fused_softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CHUNK = 8192
SHAPES = ((CHUNK + 9,), (3, 5), (1,))
STORAGES = ("low_bits", "kahan", "stochastic")


def random(*shape, dtype=FLOAT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def column(dtype=FLOAT, seed=0):
    return [random(*shape, dtype=dtype, seed=seed + n) for n, shape in enumerate(SHAPES)]


# -- lists ---------------------------------------------------------------------------------------


def stepped(make, dtype=FLOAT, meter=False, steps=1):
    def run():
        params = [torch.nn.Parameter(tensor) for tensor in column(dtype)]
        optimizer = make(params)
        if meter:
            optimizer.count_lost_updates()
        for number in range(steps):
            for param, grad in zip(params, column(dtype, 10 + number), strict=True):
                param.grad = grad
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*params, *(value for value in states if isinstance(value, torch.Tensor))]

    return run


def scaled():
    """Two chunks overflow, and both write the flag."""
    x, out, flag = column(), column(HALF, 5), torch.zeros(1, dtype=torch.int32)
    x[0][3] = x[0][-1] = float("inf")
    amp_C.multi_tensor_scale(CHUNK, flag, [x, out], 0.5)
    assert flag.item() == 1
    return [*out, flag]


def added():
    out, flag = column(HALF, 9), torch.zeros(1, dtype=torch.int32)
    amp_C.multi_tensor_axpby(CHUNK, flag, [column(), column(seed=4), out], 1.5, -2.0, -1)
    return [*out, flag]


def measured(dtype=FLOAT):
    flag = torch.zeros(1, dtype=torch.int32)
    return [*amp_C.multi_tensor_l2norm(CHUNK, flag, [column(dtype)], True), flag]


def measured_while_scaled():
    out, flag = column(seed=5), torch.zeros(1, dtype=torch.int32)
    norms = amp_C.multi_tensor_l2norm_scale(CHUNK, flag, [column(), out], 0.5, True)
    return [*norms, *out]


def lamb_in_stages():
    columns, update = [column(seed=seed) for seed in (0, 4, 8)], column(seed=12)
    columns.append([tensor.square() for tensor in column(seed=16)])
    flag, decays = torch.zeros(1, dtype=torch.int32), torch.tensor([0.1, 0.0, 0.2])
    amp_C.multi_tensor_lamb_stage1_cuda(
        CHUNK, flag, [*columns, update], decays, 0, 0.9, 0.99, 1e-6, 3.0, 1.0
    )
    norms = [torch.stack([x.norm() for x in tensors]) for tensors in (columns[1], update)]
    amp_C.multi_tensor_lamb_stage2_cuda(CHUNK, flag, [columns[1], update], *norms, 0.1, 0.1, False)
    return [*columns[1], *columns[2], *columns[3], *update]


def clipped(norm_type):
    def run():
        params = [torch.nn.Parameter(tensor) for tensor in column(HALF)]
        for param, grad in zip(params, column(HALF, 7), strict=True):
            param.grad = grad
        norm = clip_grad_norm_(params, 0.1, norm_type)
        return [norm, *(param.grad for param in params)]

    return run


def trained(level, **options):
    """A step under amp: unscaling, checking, masters."""

    def run():
        model = torch.nn.Linear(100, 90)
        with torch.no_grad():
            model.weight.copy_(random(90, 100))
        optimizer = FusedAdam(model.parameters())
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0, **options
        )
        with amp.scale_loss(model(random(2, 100)).float().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        params = [*model.parameters()]
        amp.reset()
        return params

    return run


def lists():
    makers = {
        "adam": lambda params, **more: FusedAdam(params, weight_decay=0.1, **more),
        "sgd": lambda params, **more: FusedSGD(params, lr=0.1, **more),
        "adagrad": lambda params, **more: FusedAdagrad(params, **more),
        "lamb": lambda params, **more: FusedLAMB(params, **more),
        "lion": lambda params, **more: FusedLion(params, weight_decay=0.1, **more),
        "novograd": lambda params, **more: FusedNovoGrad(params, **more),
    }
    for name, make in makers.items():
        yield name, stepped(make)
    for storage in STORAGES:
        stored = functools.partial(FusedAdam, storage=storage)
        yield f"adam, {storage}", stepped(stored, BRAIN)
        yield f"adam, {storage}, metered", stepped(stored, BRAIN, meter=True)
    yield "adam, metered", stepped(FusedAdam, BRAIN, meter=True)
    yield "lamb, low bits", stepped(lambda p: FusedLAMB(p, storage="low_bits"), BRAIN)
    yield "adam, eps inside", stepped(lambda p: ContribFusedAdam(p, eps_inside_sqrt=True))
    yield (
        "adam, masters",
        stepped(lambda p: FusedAdam(p, capturable=True, master_weights=True), HALF, steps=2),
    )
    yield "momentum", stepped(lambda p: FusedSGD(p, lr=0.1, momentum=0.9), steps=2)
    masters = stepped(lambda p: FusedMixedPrecisionLamb(p, reduced_precision_dtype=HALF), HALF)
    yield "lamb, masters", masters
    yield "novograd, largest", stepped(lambda p: FusedNovoGrad(p, norm_type=0))
    yield "larc", stepped(lambda p: LARC(torch.optim.SGD(p, lr=0.1, weight_decay=0.1)))
    yield "scale", scaled
    yield "axpby", added
    yield "l2norm", measured
    yield "l2norm, fp16", lambda: measured(HALF)
    yield "l2norm and scale", measured_while_scaled
    yield "lamb in stages", lamb_in_stages
    yield "clip", clipped(2.0)
    yield "clip, largest", clipped(float("inf"))
    yield "amp O2", trained("O2")
    yield "amp O2, fused", trained("O2", fused_step=True)


# -- tensors -------------------------------------------------------------------------------------


def gradients(y, *inputs):
    """The output, and the gradients of the inputs that exist."""
    inputs = [tensor for tensor in inputs if tensor is not None]
    return [y, *torch.autograd.grad(y, inputs, random(*y.shape, dtype=y.dtype, seed=99))]


def normed(cls, rows, columns, dtype=FLOAT, *, backward=True, **options):
    def run():
        x = random(rows, columns, dtype=dtype).requires_grad_()
        layer = cls(columns, **options).to(dtype)
        with torch.no_grad():
            for number, param in enumerate(layer.parameters()):
                param.copy_(1 + random(columns, seed=number) / 4)
        return gradients(layer(x), x, *layer.parameters()) if backward else [layer(x)]

    return run


def grouped(images, channels, height, width, groups, act="", dtype=FLOAT):
    def run():
        x = random(images, channels, height, width, dtype=dtype)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        layer = GroupNorm(groups, channels, act=act).to(dtype)
        return gradients(layer(x), x, *layer.parameters())

    return run


def lost(rows, classes, dtype=FLOAT, *options):
    def run():
        logits = random(rows, classes, dtype=dtype).requires_grad_()
        labels = torch.arange(rows) % classes
        return gradients(SoftmaxCrossEntropyLoss.apply(logits, labels, *options), logits)

    return run


def linearly_lost(rows, features, classes, dtype=FLOAT):
    def run():
        hidden = random(rows, features, dtype=dtype).requires_grad_()
        weight = random(classes, features, dtype=dtype, seed=1).requires_grad_()
        labels = torch.arange(rows) % classes
        return gradients(linear_cross_entropy(hidden, weight, labels, chunk_size=2), hidden, weight)

    return run


def gated(*shape, dtype=FLOAT):
    def run():
        gate, up = (random(*shape, dtype=dtype, seed=seed).requires_grad_() for seed in (1, 2))
        return gradients(swiglu(gate, up), gate, up)

    return run


def focal(anchors, columns, gamma=2.0, dtype=FLOAT):
    def run():
        logits = random(anchors, columns, dtype=dtype).requires_grad_()
        targets = torch.arange(anchors) % columns - 2
        loss = focal_loss(logits, targets, torch.tensor([3.0]), columns - 1, 0.25, gamma, 0.1)
        return gradients(loss, logits)

    return run


def softened(*shape, dtype=FLOAT, causal=False):
    def run():
        x = random(*shape, dtype=dtype).requires_grad_()
        mask = random(shape[0], 1, *shape[2:], seed=1) > 0.5
        if causal:
            return gradients(scaled_upper_triang_masked_softmax(x, None, 0.3), x)
        return gradients(scaled_masked_softmax(x, mask, 0.3), x)

    return run


def rotated(turn, *shape, dtype=FLOAT):
    def run():
        t = random(*shape, dtype=dtype).requires_grad_()
        return gradients(turn(t), t)

    return run


def indexed(rows, columns, dtype=FLOAT):
    def run():
        in1, in2 = (random(n, columns, dtype=dtype, seed=n).requires_grad_() for n in (7, rows))
        return gradients(index_mul_2d(in1, in2, torch.arange(rows) * 5 % 6), in1, in2)

    return run


def rotary():
    angles = random(7, 1, 1, 8)
    rows, columns = angles[:2].transpose(0, 1), angles[2:].transpose(0, 1)
    tables = (rows.cos(), rows.sin(), columns.cos(), columns.sin())
    bounds = torch.tensor([0, 3, 5])

    def by_angles(transpose):
        return lambda t: transformer.fused_apply_rotary_pos_emb(t, angles, transpose)

    def by_sequences(t):
        return transformer.fused_apply_rotary_pos_emb_thd(t, bounds, angles)

    def by_places(t):
        return transformer.fused_apply_rotary_pos_emb_2d(t, 2, 5, *tables)

    yield "rotary", rotated(by_angles(False), 7, 2, 3, 10)
    yield "rotary, transposed", rotated(by_angles(True), 2, 3, 260, 8, dtype=HALF)
    yield "rotary of sequences", rotated(by_sequences, 6, 3, 8)
    yield "rotary of images", rotated(by_places, 1, 10, 3, 16)


def tensors():
    sizes = ((19, 100), (2, 8200))  # the latter in blocks, backward
    for cls, (rows, columns) in itertools.product((FusedLayerNorm, FusedRMSNorm), sizes):
        name = f"{cls.__name__} {rows}x{columns}"
        yield name, normed(cls, rows, columns)
        yield f"{name}, from output", normed(cls, rows, columns, HALF, memory_efficient=True)
        yield f"{name}, plain", normed(cls, rows, columns, elementwise_affine=False)
    for cls in (FusedLayerNorm, FusedRMSNorm):
        yield f"{cls.__name__}, forward in blocks", normed(cls, 2, 40_001, HALF, backward=False)
    yield "group norm", grouped(2, 12, 9, 7, 3)
    yield "group norm, silu", grouped(2, 64, 9, 16, 8, "silu", HALF)
    yield "cross-entropy", lost(5, 100, HALF, 0.1, 0, True)
    yield "cross-entropy, in blocks", lost(2, 13_001)
    yield "cross-entropy, programs share a row", lost(1, 13_001)
    yield "swiglu", gated(9, 1000, dtype=HALF)
    yield "masked softmax", softened(2, 2, 3, 300, dtype=HALF)
    yield "masked softmax, in blocks", softened(1, 2, 1, 17_000, dtype=HALF)
    yield "causal softmax", softened(1, 2, 33, 33, causal=True)
    yield "linear cross-entropy", linearly_lost(5, 8, 33)
    yield "focal loss", focal(29, 91, dtype=HALF)
    yield "focal loss, gamma 1.5", focal(29, 91, 1.5)
    yield "index_mul_2d", indexed(29, 200, HALF)
    yield from rotary()


def operations():
    """Yield name and function of every operation."""
    yield from lists()
    yield from tensors()
