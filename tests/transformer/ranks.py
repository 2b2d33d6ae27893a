"""What two ranks do with ``GradScaler`` and with tensors in parts; jobs for ``tests.ranks``."""

import warnings

import torch
import torch.distributed as dist

from apex.optimizers import FusedAdam
from apex.transformer import parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from tests.ranks import error_of


class Unscales(torch.optim.SGD):
    """Unscales its gradients itself, and says that it did."""

    _custom_amp_unscale_grads = True
    calls = 0

    def unscale_grads(self, inv_scale, found_inf, allow_fp16):
        self.calls += 1
        flag = found_inf.clone()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(inv_scale)
                flag.fill_(max(flag.item(), float(not param.grad.isfinite().all())))
        return {found_inf.device: flag}


def _optimizer(kind, param):
    if kind == "custom":
        return Unscales([param], lr=1.0)
    if kind == "flag in step":  # step() is given the flag and skips by itself
        return FusedAdam([param], lr=1.0, capturable=True)
    return torch.optim.SGD([param], lr=1.0)


def training(kind, unscale, alone, rank):
    """Three steps, the second of which overflows on rank 1; scales and weights after each."""
    groups = [dist.new_group([member]) for member in range(2)] if alone else [None, None]
    scaler = GradScaler(8.0, process_group=groups[rank])
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = _optimizer(kind, param)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        factor = torch.inf if (step, rank) == (1, 1) else 1.0
        scaler.scale((param * factor).sum()).backward()
        if kind == "no gradient" and rank == 0:
            param.grad = None
        if unscale:
            scaler.unscale_(optimizer)
        before = param.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), not torch.equal(param, before)))
    return found, getattr(optimizer, "calls", None)


def in_a_megatron_program(width, rank):
    """The scales of :func:`training` where ``width`` ranks share a model."""
    parallel_state.initialize_model_parallel(width)
    try:
        return [scale for scale, _ in training("sgd", False, False, rank)[0]]
    finally:
        parallel_state.destroy_model_parallel()


def without_reduction(rank):
    """What torch's own scaler does: the ranks differ."""
    return _plain(torch.amp.GradScaler("cpu", init_scale=8.0), rank)


def _plain(scaler, rank):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale((param * (torch.inf if rank else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def parts(rank):
    """This rank's part of 12 numbers, and all again; in a group of one rank as well; errors."""
    whole = torch.arange(12.0).view(3, 4).t()
    part = split_tensor_into_1d_equal_chunks(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = gather_split_1d_tensor(part)
    groups = [dist.new_group([member]) for member in range(2)]
    mine, other = groups[rank], groups[1 - rank]
    alone = gather_split_1d_tensor(part, group=mine)
    undivided = split_tensor_into_1d_equal_chunks(whole, group=mine)
    said = [
        error_of(split_tensor_into_1d_equal_chunks, torch.ones(3)),
        error_of(split_tensor_into_1d_equal_chunks, whole, group=other),
        error_of(gather_split_1d_tensor, part, group=other),
        error_of(GradScaler, process_group=other),
    ]
    return part.tolist(), both.tolist(), torch.equal(alone, part), len(undivided), said
