"""What a step of many small tensors costs the host, in passes, frames and files; no times.

On the way to a kernel: what launches is replaced, since its frames are Triton's.
"""

import itertools
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from apex.kernels import multi_tensor as kernels
from apex.ops import _runtime
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests import passes

APEX = ("apex.optimizers", "apex.ops", "apex.kernels")
# Passes over the list in a step, counted: each takes 3 us to 60 for 148 tensors.
PASSES = {
    "FusedAdam": (FusedAdam, {}, 9),
    "FusedAdam, masters": (FusedAdam, {"capturable": True, "master_weights": True}, 18),
    "FusedSGD": (FusedSGD, {"lr": 0.1, "momentum": 0.9}, 8),
    "FusedLAMB": (FusedLAMB, {}, 11),
    "FusedNovoGrad": (FusedNovoGrad, {}, 13),
}
cases = pytest.mark.parametrize(("kind", "options", "most"), PASSES.values(), ids=PASSES)


def _no_launch(layout, *_, sums=(), **more):
    return torch.ones(len(sums), layout.tensors) if sums else None


def stepped(kind, options, count):
    """A step of ``count`` tensors after two others, and a function that gives new gradients."""
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    params = [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for _ in range(count)]
    memory = [torch.ones(4, 4, dtype=dtype) for _ in params]
    optimizer = kind(params, **options)

    def step():
        with _runtime.use("triton"), mock.patch.object(kernels, "launch", _no_launch):
            optimizer.step()

    def give():
        for param, grad in zip(params, memory, strict=True):
            param.grad = grad.detach()  # a new object, as after each backward

    for _ in range(3):
        give()
        step()
    give()
    return step, give


@cases
def test_passes_over_the_list(kind, options, most):
    step, _ = stepped(kind, options, 64)
    with passes.counted(APEX, 64) as found:
        step()
    assert 4 < len(found) <= most, found


@cases
def test_no_frame_a_tensor(kind, options, most):
    few, many = (len(passes.frames(stepped(kind, options, count)[0])) for count in (32, 64))
    assert few == many


@cases
def test_no_frame_a_tensor_where_some_pause(kind, options, most):
    """Their states are others than those of all parameters in order."""
    opened = []
    for count in (32, 64):
        step, give = stepped(kind, options, count)
        cells = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
        params = cells["optimizer"].cell_contents.param_groups[0]["params"]
        params[3].grad = None
        step()
        give()
        params[3].grad = None
        opened.append(len(passes.frames(step)))
    assert opened[0] == opened[1]


@pytest.mark.parametrize(("name", "most"), [("FusedAdam", 75), ("FusedSGD", 65)])
def test_frames_of_a_step(name, most):
    """Of ours, up to the launch."""
    kind, options, _ = PASSES[name]
    step, _ = stepped(kind, options, 4)
    inside = [file for file in passes.frames(step) if "/src/apex/" in file]
    assert len(inside) <= most


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_files_before_the_update(name):
    kind, options, _ = PASSES[name]
    step, _ = stepped(kind, options, 4)
    _, *files = passes.apex_files(step)  # the first is that of `use`, above
    before = [*itertools.takewhile(lambda file: not file.startswith("ops/updates/"), files)]
    assert before[0].startswith("optimizers/")
    assert len(before) - 1 <= 16, before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lamb_allocates_its_scratch_once(dtype, monkeypatch):
    """For 16-bit gradients; not a tensor for each."""
    made = []
    for name in ("empty", "empty_like"):
        function = getattr(torch, name)

        def noted(*arguments, function=function, **options):
            made.append(function)
            return function(*arguments, **options)

        monkeypatch.setattr(torch, name, noted)
    params = [torch.nn.Parameter(torch.ones(5, 3, dtype=dtype)) for _ in range(20)]
    optimizer = FusedLAMB(params)
    for _ in range(2):
        made.clear()
        for param in params:
            param.grad = torch.ones_like(param)
        with _runtime.use("triton"), mock.patch.object(kernels, "launch", _no_launch):
            optimizer.step()
    assert len(made) == 1
