"""What amp knows of other ranks: torch's DistributedDataParallel, and whether there are any.

DistributedDataParallel copies the 16-bit weights of rank 0 to all ranks when it is made. Ranks
whose masters were different (other seeds, a checkpoint on rank 0 alone) would keep other low bits.
So the masters of rank 0 are broadcast too, at the first training forward inside the wrapper, and
with them the float32 weights, so that all of a checkpoint that rank 0 alone has loaded arrives.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.amp.gradients.masters import table


def _distributed() -> Any:
    """``torch.distributed`` where this torch has it and a process group was made."""
    module = getattr(torch, "distributed", None)
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def is_initialized() -> bool:
    """Whether a process group was made."""
    return _distributed() is not None


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    module = _distributed()
    return module is not None and module.get_world_size() > 1


def reduces_all(wrapper: Any) -> bool:
    """Whether a DistributedDataParallel reduces everything, over all ranks, in the usual way."""
    module = _distributed()
    if wrapper.parameters_to_ignore or getattr(wrapper, "_comm_hooks", ()):
        return False
    return bool(module.get_world_size(wrapper.process_group) == module.get_world_size())


def wrappers_inside(model: torch.nn.Module) -> list[Any]:
    """Every DistributedDataParallel that is a part of ``model``."""
    ddp = torch.nn.parallel.DistributedDataParallel
    return [module for module in model.modules() if isinstance(module, ddp)]


def refuse_join(wrapper: Any) -> None:
    """Raise inside of ``wrapper.join()``, whose end writes the 16-bit weights of one rank."""
    if getattr(getattr(wrapper, "_join_config", None), "enable", False):
        raise RuntimeError(
            "amp: join() of DistributedDataParallel was called with a model that is cast to 16 "
            "bits. It ends with a broadcast of 16-bit weights, which the masters would not get. "
            "Use O1 or O4, or give all ranks as many inputs."
        )


def active_wrapper() -> Any:
    """The DistributedDataParallel whose forward runs now, if any."""
    if not is_initialized():
        return None
    wrapper = torch.nn.parallel.DistributedDataParallel
    return wrapper._get_active_ddp_module()  # type: ignore[no-untyped-call]


@torch.no_grad()
def broadcast_masters(model: torch.nn.Module, wrapper: Any) -> None:
    """Give all ranks the parameters of the first one: its masters, and weights that equal them.

    Does nothing for a model without masters: there DistributedDataParallel has copied all bits.

    Args:
        model: The model, or a part of it, that ``wrapper`` wraps.
        wrapper: The DistributedDataParallel.
    """
    weights = list(model.parameters())
    masters = [table.get(weight) for weight in weights]
    if not any(masters):
        return
    module, group = _distributed(), wrapper.process_group
    first = module.get_global_rank(group, 0)
    ignored = {
        id(parameter)
        for name, parameter in wrapper.module.named_parameters()
        if name in wrapper.parameters_to_ignore
    }
    for weight, master in zip(weights, masters, strict=True):
        if id(weight) in ignored:
            continue
        if master is None:
            module.broadcast(weight.data, first, group=group)
            continue
        master.refresh(weight)
        module.broadcast(master.tensor.detach(), first, group=group)
        weight.data.copy_(master.tensor)  # a forward may have saved the weight for its backward
