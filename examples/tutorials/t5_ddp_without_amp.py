"""T5: apex's DistributedDataParallel with no amp, and a plain loss.backward().

Alone it is a group of one process. Two, or one per GPU (leave --world-size out):
    python -m apex.parallel.multiproc --world-size 2 examples/tutorials/t5_ddp_without_amp.py
"""

import importlib
import os

import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import DistributedDataParallel as ApexDDP


def train(device: torch.device) -> None:
    """Train on this rank's data; rank 0 shows losses, and whether weights are equal."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # other weights and data in each process: the wrapper sends rank 0's
    model = nn.Linear(8, 1).to(device)
    x = torch.randn(32, 8, device=device)
    y = x.sum(1, keepdim=True)
    model = ApexDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over the processes
        optimizer.step()
        losses.append(loss.item())

    weights = [torch.empty_like(model.module.weight) for _ in range(world)]
    dist.all_gather(weights, model.module.weight.detach())
    if rank == 0:
        equal = all(torch.equal(weight, weights[0]) for weight in weights)
        print(
            f"{world} process{'es' if world > 1 else ''} on {device.type}: loss of rank 0 "
            f"{losses[0]:.3f} -> {losses[-1]:.3f}; weights of all ranks equal: {equal}"
        )


device, backend = torch.device("cpu"), "gloo"
if torch.cuda.is_available():
    device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"
    torch.cuda.set_device(device)
importlib.import_module("torch._dynamo")  # before the group: torch 2.13 never frees it otherwise
if "RANK" in os.environ:
    dist.init_process_group(backend)
else:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
train(device)  # a function, so that the wrapper, which holds groups, is gone before they end
dist.destroy_process_group()
