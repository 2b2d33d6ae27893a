"""Small programs that use the private names of torch, one for each family of names.

Each returns numbers, the same in each process. ``tests/test_private_names.py`` runs them in
processes in which one name is hidden.
"""

import contextlib
import tempfile
import warnings
from types import SimpleNamespace

import torch
from torch import nn

from apex._compat import names, private


def _model(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.ReLU(), nn.Linear(16, 4))


def _batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator), torch.arange(6) % 4


def _loss(model):
    x, labels = _batch()
    return nn.functional.cross_entropy(model(x).float(), labels)


def _numbers(*tensors):
    return [x for tensor in tensors for x in tensor.detach().double().flatten().tolist()]


def _normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- operations ------------------------------------------------------------------------------------


def operations():
    """Forward and backward of operations, eager."""
    from apex.normalization import FusedRMSNorm
    from apex.ops.layers.scaled_softmax import scaled_softmax
    from apex.ops.layers.swiglu import swiglu
    from apex.ops.losses.cross_entropy import cross_entropy
    from apex.ops.norms.group_norm import group_norm

    found = []
    x, labels = _normal(64, 64).requires_grad_(), torch.arange(64)
    image = _normal(2, 8, 4, 4).requires_grad_()
    for y in (
        FusedRMSNorm(64)(x),
        scaled_softmax(x.view(1, 1, 64, 64), None, 1.0, False),
        swiglu(x),
        cross_entropy(x, labels),
        group_norm(image, 2, activation="silu"),
    ):
        leaf = image if y.shape == image.shape else x
        found += [y, *torch.autograd.grad((y * y).sum(), leaf)]
    return _numbers(*found)


def many_gradients():
    """A backward under vmap."""
    from apex.normalization import FusedRMSNorm

    x = _normal(64, 64).requires_grad_()
    y = FusedRMSNorm(64)(x)
    dy = torch.stack([torch.ones_like(y), y.detach()])
    return _numbers(*torch.autograd.grad(y, x, dy, is_grads_batched=True))


def under_a_dispatch_mode():
    """A definition differentiated where operators are recorded."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from apex.ops.losses.linear_cross_entropy import linear_cross_entropy

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x, weight = _normal(8, 4).requires_grad_(), _normal(6, 4)
    with Mode():
        loss = linear_cross_entropy(x, weight, torch.arange(8) % 6).sum()
        return _numbers(*torch.autograd.grad(loss, x))


def embedding_in_parallel():
    """An embedding of which another rank has half, of a tensor-parallel group of one."""
    from apex.transformer import parallel_state, tensor_parallel

    with _alone():
        parallel_state.initialize_model_parallel()
        layer = tensor_parallel.VocabParallelEmbedding(8, 4, use_cpu_initialization=True)
        layer.num_embeddings_per_partition = layer.vocab_end_index = 4
        with torch.no_grad():
            layer.weight.copy_(_normal(8, 4))
        y = layer(torch.arange(8))
        parallel_state.destroy_model_parallel()
    return _numbers(y)


def parallel_checkpoint():
    """Recomputation of tensor-parallel layers."""
    from apex.transformer import parallel_state, tensor_parallel

    with _alone():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model, x = _model(), _batch()[0].requires_grad_()
        tensor_parallel.checkpoint(model, False, x).sum().backward()
        parallel_state.destroy_model_parallel()
    return _numbers(x.grad)


@contextlib.contextmanager
def _alone():
    """A process group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


# -- optimizers ------------------------------------------------------------------------------------


def optimizers():
    """Three steps of each optimizer, some on 16-bit weights."""
    from apex import optimizers as fused
    from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType, FusedAdamSWA

    found = []
    for make, dtype in (
        (lambda p: fused.FusedAdam(p, lr=0.01, weight_decay=0.1), torch.float32),
        (lambda p: fused.FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False), torch.float32),
        (lambda p: fused.FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True), torch.float32),
        (lambda p: fused.FusedAdagrad(p, lr=0.1, weight_decay=0.1), torch.float32),
        (lambda p: fused.FusedAdagrad(p, lr=0.1), torch.bfloat16),
        (lambda p: fused.FusedLAMB(p, lr=0.01, weight_decay=0.1), torch.float32),
        (lambda p: fused.FusedLAMB(p, lr=0.01, weight_decay=0.1, adam_w_mode=False), torch.float32),
        (lambda p: fused.FusedNovoGrad(p, lr=0.01, weight_decay=0.1), torch.float32),
        (lambda p: fused.FusedNovoGrad(p, lr=0.01, reg_inside_moment=True), torch.float32),
        (lambda p: fused.FusedLion(p, lr=0.01, weight_decay=0.1), torch.float32),
    ):
        params = [nn.Parameter(_normal(5, 3, seed=n).to(dtype)) for n in range(3)]
        optimizer = make(params)
        for step in range(3):
            for n, param in enumerate(params):
                param.grad = _normal(5, 3, seed=10 * step + n).to(dtype)
            optimizer.step()
        found += params
    params = [nn.Parameter(_normal(5, 3, seed=n)) for n in range(3)]
    averages = [param.detach().clone() for param in params]
    compute = [nn.Parameter(param.detach().clone()) for param in params]
    swa = FusedAdamSWA(
        params, compute, averages, swa_decay_rate=0.9, lr=0.01,
        adam_math_mode=AdamMathType.PyTorchAdam,
    )  # fmt: skip
    for step in range(2):
        for n, param in enumerate(compute):
            param.grad = _normal(5, 3, seed=10 * step + n)
        swa.step()
        swa.zero_grad(set_to_none=False)
    return _numbers(*found, *params, *averages)


def scaled_step():
    """A capturable optimizer under torch's GradScaler."""
    from apex.optimizers import FusedAdam

    params = [nn.Parameter(_normal(5, 3, seed=n)) for n in range(3)]
    optimizer = FusedAdam(params, lr=0.01, capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        loss = sum((param * _normal(5, 3, seed=step)).sum() for param in params)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return _numbers(*params)


def peers():
    """What the self-test compares optimizers with."""
    from apex.selftest.catalogue.optimizers import OPTIMIZERS  # noqa: F401

    from apex.selftest.catalogue import peers as module

    return module


def unscaling():
    """Unscale gradients of each kind in place."""
    from apex.ops.lists.unscale import multiply_, unscale_

    grads = [_normal(4, 3), _normal(4, 3, seed=1).half()]
    sparse = torch.sparse_coo_tensor([[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (3, 2)).coalesce()
    flag = unscale_([*grads, sparse], torch.tensor(4.0))
    multiply_(grads, 3.0)
    bad = unscale_([torch.tensor([1.0, torch.inf])], torch.tensor(4.0))
    return _numbers(*grads, sparse.values(), flag, bad)


def negative_gradients():
    """Unscale a gradient that is a negative view."""
    from apex.ops.lists.unscale import unscale_

    grad = torch._neg_view(_normal(4, 3))
    unscale_([grad], torch.tensor(4.0))
    return _numbers(grad)


def flat_lists():
    """Lists of tensors as one."""
    from apex.ops.lists.flat import flatten, unflatten

    tensors = [_normal(4, 3), _normal(5), _normal(0, 2)]
    return _numbers(*unflatten(flatten(tensors) * 2, tensors), flatten(tensors[:1]))
