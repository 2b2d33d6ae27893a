"""Launch kernels through Triton's own JIT, for a GPU that is not here.

Inspection compiles kernels for a signature that somebody wrote down, and the interpreter never
compiles. Here the operations themselves bind their arguments, specialise on them (a 1 becomes a
constant, an address a multiple of 16), compile and launch; only the driver is a stand-in, which
notes the launch and computes nothing.

    python launched.py [all]

Prints the kernels that each operation launched, as JSON.
"""

from __future__ import annotations

import itertools
import json
import operator
import sys
from collections.abc import Callable, Iterator

import amp_C
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from apex import amp
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.group_norm import GroupNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.ops import _runtime
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex.transformer import functional
from apex.transformer.functional.fused_softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)

Named = tuple[str, Callable[[], object]]
launched: list[str] = []


LARGEST_GRID = (2**31 - 1, 65535, 65535)  # of CUDA


class Launcher:
    """Stands for the C function that Triton builds for each kernel.

    It refuses a grid that CUDA refuses. Triton compares threads and shared memory with `Hopper`.
    """

    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, *args):
        if any(map(operator.gt, (x, y, z), LARGEST_GRID)):
            raise RuntimeError(f"{self.name}: grid {(x, y, z)}, allowed is {LARGEST_GRID}")
        launched.append(self.name)


class Hopper:
    """Stands for the driver of an H200."""

    launcher_cls = Launcher

    class utils:  # Triton's name
        """What a kernel's limits are compared with."""

        @staticmethod
        def load_binary(name, binary, shared, device):
            return 1, 1, 32, 0, 1024  # module, function, registers, spills, most threads

        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


HALF = torch.float16


def parameters(dtype=torch.float32, shapes=((1,), (8193,), (30, 40))):
    made = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.ones_like(param)
    return made


def stepped(cls, dtype=torch.float32, **options):
    return lambda: cls(parameters(dtype), lr=1e-3, **options).step()


def fused_step():
    """O2, clipped: measured once, updated once."""
    model = torch.nn.Linear(8, 8)
    optimizer = FusedAdam(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", fused_step=True, verbosity=0, cast_model_outputs=HALF
    )
    with amp.scale_loss(model(torch.ones(2, 8)).sum(), optimizer) as scaled:
        scaled.backward()
    amp.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    amp.reset()


def multi_tensor():
    buffer = torch.zeros(1, dtype=torch.int32)
    a, b, out = (parameters() for _ in range(3))
    multi_tensor_applier(amp_C.multi_tensor_scale, buffer, [a, out], 0.5)
    multi_tensor_applier(amp_C.multi_tensor_axpby, buffer, [a, b, out], 1.0, 2.0, -1)
    multi_tensor_applier(amp_C.multi_tensor_l2norm, buffer, [a], True)


def normed(cls, rows, columns, dtype=torch.float32, **options):
    def both():
        x = torch.ones(rows, columns, dtype=dtype, requires_grad=True)
        cls(columns, **options).to(dtype)(x).sum().backward()

    return both


def grouped(images, channels, size, groups, act="", dtype=torch.float32):
    def both():
        x = torch.ones(images, channels, size, size, dtype=dtype)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        GroupNorm(groups, channels, act=act).to(dtype)(x).sum().backward()

    return both


def lost(rows, classes, dtype=torch.float32, *options):
    def both():
        logits = torch.ones(rows, classes, dtype=dtype, requires_grad=True)
        labels = torch.zeros(rows, dtype=torch.long)
        SoftmaxCrossEntropyLoss.apply(logits, labels, *options).sum().backward()

    return both


def linearly_lost(rows, features, classes):
    def both():
        hidden = torch.ones(rows, features, requires_grad=True)
        weight = torch.ones(classes, features, requires_grad=True)
        labels = torch.zeros(rows, dtype=torch.long)
        linear_cross_entropy(hidden, weight, labels, chunk_size=2).backward()

    return both


def rotated(*shape, dtype=torch.float32, transposed=False):
    def both():
        t, freqs = torch.ones(shape, dtype=dtype, requires_grad=True), torch.ones(shape[0], 1, 1, 2)
        functional.fused_apply_rotary_pos_emb(t, freqs, transposed).sum().backward()

    return both


def softened(*shape, dtype=HALF, causal=False):
    def both():
        x = torch.ones(shape, dtype=dtype, requires_grad=True)
        mask = torch.zeros(shape[0], 1, *shape[2:], dtype=torch.bool)
        scaled_masked_softmax(x, mask, 0.5).sum().backward()
        if causal:
            scaled_upper_triang_masked_softmax(x, None, 0.5).sum().backward()

    return both


def few() -> Iterator[Named]:
    """Each kernel, and arguments of 1 where there can be one."""
    yield "adam", stepped(FusedAdam)
    yield "adam, low bits", stepped(FusedAdam, torch.bfloat16, storage="low_bits")
    yield "adam, stochastic", stepped(FusedAdam, torch.bfloat16, storage="stochastic")
    yield "sgd", stepped(FusedSGD, momentum=0.9)
    yield "adagrad", stepped(FusedAdagrad)
    yield "lamb", stepped(FusedLAMB)
    yield "novograd", stepped(FusedNovoGrad)
    yield "fused step", fused_step
    yield "amp_C", multi_tensor
    yield "clip", lambda: clip_grad_norm_(parameters(HALF), 1.0)
    yield "layer norm", normed(FusedLayerNorm, 4, 1024, HALF)
    yield "layer norm 1x1", normed(FusedLayerNorm, 1, 1)
    yield "rms norm, wide", normed(FusedRMSNorm, 2, 70_000)
    yield "group norm", grouped(2, 64, 16, 16, "silu", HALF)
    yield "group norm 1x1", grouped(1, 1, 1, 1)
    yield "cross-entropy", lost(3, 1000, HALF, 0.1, 0, True)
    yield "cross-entropy 1x1", lost(1, 1)
    yield "linear cross-entropy", linearly_lost(2, 8, 33)
    yield "rotary", rotated(5, 2, 3, 64, dtype=HALF)
    yield "rotary 1x1", rotated(1, 1, 1, 2)
    yield "masked softmax", softened(2, 4, 3, 64)
    yield "masked softmax 1x1", softened(1, 1, 1, 1)


def more() -> Iterator[Named]:
    """Awkward sizes of every layer and loss, 16-bit optimizers."""
    sizes = ((1, 1), (1, 2), (2, 1), (3, 17), (1, 8192), (2, 70_000), (5, 1024))
    for cls in (FusedAdam, FusedSGD, FusedAdagrad, FusedLAMB):
        yield f"{cls.__name__} bf16", stepped(cls, torch.bfloat16)
        yield f"{cls.__name__} kahan", stepped(cls, torch.bfloat16, storage="kahan")
    for cls, (rows, columns), thrifty, affine in itertools.product(
        (FusedLayerNorm, FusedRMSNorm), sizes, (False, True), (False, True)
    ):
        options = {"memory_efficient": thrifty, "elementwise_affine": affine}
        name = f"{cls.__name__} {rows}x{columns} {options}"
        yield name, normed(cls, rows, columns, **options)
    for rows, classes in sizes:
        for options in ((0.0, 0, False), (0.1, -100, True)):
            yield f"xentropy {rows}x{classes} {options}", lost(rows, classes, HALF, *options)
    shapes = ((1, 2, 1, 1), (2, 4, 3, 2), (2, 320, 32, 32), (1, 32, 1, 1), (1, 1, 5, 1))
    for shape, act, dtype in itertools.product(shapes, ("", "silu"), (torch.float32, HALF)):
        yield f"group norm {shape} {act} {dtype}", grouped(*shape, act, dtype)
    for shape in ((1, 1, 1), (5, 64, 1000)):
        yield f"linear cross-entropy {shape}", linearly_lost(*shape)
    yield from of_transformers()


def of_transformers() -> Iterator[Named]:
    """Awkward sizes of softmaxes and rotary embeddings."""
    for shape in ((1, 1, 1, 1), (1, 2, 1, 17), (2, 1, 3, 70_000), (1, 4, 2, 16_384)):
        yield f"masked softmax {shape}", softened(*shape, dtype=torch.float32)
    for size in (1, 2, 17, 128, 8193):
        yield f"causal softmax {size}", softened(1, 1, size, size, causal=True)
    for shape in ((1, 1, 1, 3), (7, 1, 1, 64), (2, 3, 70, 9)):
        for transposed, dtype in itertools.product((False, True), (torch.float32, HALF)):
            name = f"rotary {shape} {transposed} {dtype}"
            yield name, rotated(*shape, dtype=dtype, transposed=transposed)


def main() -> None:
    """Run the cases under the stand-in."""
    driver.set_active(Hopper())
    torch.set_num_threads(1)
    found = {}
    cases = itertools.chain(few(), more()) if "all" in sys.argv[1:] else few()
    for name, operation in cases:
        launched.clear()
        with _runtime.use("triton"):
            operation()
        found[name] = [*launched]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
