"""Steps and norms are the same under ``set_default_dtype`` and ``set_default_device``.

Programs set both for their models. What is made on the way has a dtype and a device of its own.
"""

import functools

import amp_C
import pytest
import torch

from apex.contrib.clip_grad import clip_grad_norm_
from apex.optimizers import FusedAdam, FusedMixedPrecisionLamb
from tests.default_programs import default
from tests.optimizers.common import EVERY, PATHS, give_grads, on, parameters, same, values

SMALL = ((7,), (33, 5), (2000,))
OTHERS = ["meta", torch.bfloat16, torch.float64]  # meta stands for a GPU
others = pytest.mark.parametrize("other", OTHERS, ids=str)
paths = pytest.mark.parametrize("path", PATHS)


def stepped(make, other, path, dtype):
    params = parameters(dtype, shapes=SMALL)
    with default(other):
        optimizer = make(params)
    for number in range(2):
        give_grads(params, number)
        with on(path), default(other):
            optimizer.step()
    return values(params)


@functools.cache
def undisturbed(make, path, dtype):
    return stepped(make, None, path, dtype)


def adam_on_the_device(params):
    return FusedAdam(params, capturable=True, master_weights=True, max_grad_norm=0.5)


def mixed_lamb(params):
    return FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.bfloat16)


@pytest.mark.parametrize("make", [*EVERY.values(), adam_on_the_device, mixed_lamb])
@others
@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step(make, other, path, dtype):
    assert same(stepped(make, other, path, dtype), undisturbed(make, path, dtype))


@others
@paths
def test_norms_and_scaling(other, path):
    results = []
    for dtype_or_device in (None, other):
        params = parameters(shapes=SMALL)
        give_grads(params, 0)
        grads = [param.grad for param in params]
        flag = torch.zeros(1, dtype=torch.int32)
        with default(dtype_or_device), on(path):
            norm, each = amp_C.multi_tensor_l2norm(65536, flag, [grads], True)
            amp_C.multi_tensor_scale(65536, flag, [grads, grads], 0.3)
            total = clip_grad_norm_(params, 1.0)
        results.append([norm, each, total, *grads])
        assert all(x.dtype == torch.float32 for x in results[-1])
    assert same(*results)


@others
@paths
def test_the_first_step_of_amp_cs_sgd(other, path):
    results = []
    for dtype_or_device in (None, other):
        columns = [values(parameters(shapes=SMALL, seed=seed)) for seed in range(3)]
        flag = torch.zeros(1, dtype=torch.int32)
        with default(dtype_or_device), on(path):
            amp_C.multi_tensor_sgd(
                65536, flag, columns, 0.1, 0.9, 0.5, 0.1, False, True, False, 1.0
            )
        results.append([*columns[1], *columns[2]])
    assert same(*results)
