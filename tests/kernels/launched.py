"""Launch kernels through Triton's own JIT, for a GPU that is not here.

Inspection compiles what launchers pass for tensors without memory, and the interpreter never
compiles. Here the operations themselves bind their arguments, specialise on them (a 1 becomes a
constant, an address a multiple of 16), compile and launch; only the driver is a stand-in, which
notes the launch and computes nothing.

    python launched.py [all]

Prints the kernels that each operation launched, as JSON.
"""

from __future__ import annotations

import functools
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
from tests.kernels.operations import BRAIN, FLOAT, HALF, column, of_one, stepped

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
    a, b, out = (column() for _ in range(3))
    multi_tensor_applier(amp_C.multi_tensor_scale, buffer, [a, out], 0.5)
    multi_tensor_applier(amp_C.multi_tensor_axpby, buffer, [a, b, out], 1.0, 2.0, -1)
    multi_tensor_applier(amp_C.multi_tensor_l2norm, buffer, [a], True)


def grouped(images, channels, size, groups, act="", dtype=torch.float32):
    norm = GroupNorm(groups, channels, act=act).to(dtype)

    def normed(x):
        return norm(x.to(memory_format=torch.channels_last))

    return of_one(normed, images, channels, size, size, dtype=dtype)


def lost(rows, classes, dtype=torch.float32, *options):
    labels = torch.zeros(rows, dtype=torch.long)
    loss = SoftmaxCrossEntropyLoss.apply
    return of_one(lambda logits: loss(logits, labels, *options), rows, classes, dtype=dtype)


def linearly_lost(rows, features, classes):
    weight = torch.ones(classes, features, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    return of_one(lambda x: linear_cross_entropy(x, weight, labels, chunk_size=2), rows, features)


def rotated(*shape, dtype=torch.float32, transposed=False):
    freqs = torch.ones(shape[0], 1, 1, 2)
    rotate = functional.fused_apply_rotary_pos_emb
    return of_one(lambda t: rotate(t, freqs, transposed), *shape, dtype=dtype)


def masked(*shape, dtype=HALF):
    mask = torch.zeros(shape[0], 1, *shape[2:], dtype=torch.bool)
    return of_one(lambda x: scaled_masked_softmax(x, mask, 0.5), *shape, dtype=dtype)


def causal(size):
    softmax = functools.partial(scaled_upper_triang_masked_softmax, scale=0.5)
    return of_one(lambda x: softmax(x, None), 1, size, size, dtype=HALF)


def few() -> Iterator[Named]:
    """Each kernel, and arguments of 1 where there can be one."""
    yield "adam", stepped(FusedAdam)
    yield "adam, low bits", stepped(functools.partial(FusedAdam, storage="low_bits"), BRAIN)
    yield "adam, stochastic", stepped(functools.partial(FusedAdam, storage="stochastic"), BRAIN)
    yield "sgd", stepped(functools.partial(FusedSGD, lr=0.1, momentum=0.9))
    yield "adagrad", stepped(FusedAdagrad)
    yield "lamb", stepped(FusedLAMB)
    yield "novograd", stepped(FusedNovoGrad)
    yield "fused step", fused_step
    yield "amp_C", multi_tensor
    yield "clip", lambda: clip_grad_norm_(with_gradients(), 1.0)
    yield "layer norm", of_one(FusedLayerNorm(1024).half(), 4, 1024, dtype=HALF)
    yield "layer norm 1x1", of_one(FusedLayerNorm(1), 1, 1)
    yield "rms norm, wide", of_one(FusedRMSNorm(70_000), 2, 70_000)
    yield "group norm", grouped(2, 64, 16, 16, "silu", HALF)
    yield "group norm 1x1", grouped(1, 1, 1, 1)
    yield "cross-entropy", lost(3, 1000, HALF, 0.1, 0, True)
    yield "cross-entropy 1x1", lost(1, 1)
    yield "linear cross-entropy", linearly_lost(2, 8, 33)
    yield "rotary", rotated(5, 2, 3, 64, dtype=HALF)
    yield "rotary 1x1", rotated(1, 1, 1, 2)
    yield "masked softmax", masked(2, 4, 3, 64)
    yield "masked softmax 1x1", masked(1, 1, 1, 1)


def with_gradients():
    params = [torch.nn.Parameter(tensor) for tensor in column(HALF)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def more() -> Iterator[Named]:
    """Awkward sizes of every layer and loss, 16-bit optimizers."""
    sizes = ((1, 1), (1, 2), (2, 1), (3, 17), (1, 8192), (2, 70_000), (5, 1024))
    for cls, storage in itertools.product((FusedAdam, FusedSGD, FusedLAMB), ("plain", "kahan")):
        make = functools.partial(cls, lr=0.1, storage=storage)
        yield f"{cls.__name__} bf16 {storage}", stepped(make, BRAIN)
    for cls, (rows, columns), thrifty, affine in itertools.product(
        (FusedLayerNorm, FusedRMSNorm), sizes, (False, True), (False, True)
    ):
        norm = cls(columns, memory_efficient=thrifty, elementwise_affine=affine)
        yield f"{norm} {rows} {thrifty}", of_one(norm, rows, columns)
    for (rows, classes), options in itertools.product(sizes, ((0.0, 0, False), (0.1, -100, True))):
        yield f"xentropy {rows}x{classes} {options}", lost(rows, classes, HALF, *options)
    shapes = ((1, 2, 1, 1), (2, 4, 3, 2), (2, 320, 32, 32), (1, 32, 1, 1), (1, 1, 5, 1))
    for shape, act, dtype in itertools.product(shapes, ("", "silu"), (FLOAT, HALF)):
        yield f"group norm {shape} {act} {dtype}", grouped(*shape, act, dtype)
    for shape in ((1, 1, 1), (5, 64, 1000)):
        yield f"linear cross-entropy {shape}", linearly_lost(*shape)
    for shape in ((1, 1, 1, 1), (1, 2, 1, 17), (2, 1, 3, 70_000), (1, 4, 2, 16_384)):
        yield f"masked softmax {shape}", masked(*shape, dtype=FLOAT)
    for size in (1, 2, 17, 128, 8193):
        yield f"causal softmax {size}", causal(size)
    for shape in ((1, 1, 1, 3), (7, 1, 1, 64), (2, 3, 70, 9)):
        for transposed, dtype in itertools.product((False, True), (FLOAT, HALF)):
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
