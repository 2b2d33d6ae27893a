"""What amp knows of other ranks: wrappers that reduce gradients, and whether there are any ranks.

A wrapper is torch's DistributedDataParallel or :class:`apex.parallel.DistributedDataParallel`.
Torch's copies the 16-bit weights of rank 0 to all ranks when it is made. Ranks whose masters were
different (other seeds, a checkpoint on rank 0 alone) would keep other low bits. So the masters of
rank 0 are broadcast too, at the first training forward inside the wrapper, and with them the
float32 weights, so that all of a checkpoint that rank 0 alone has loaded arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.amp.gradients.masters import Pairs, table
from apex.ops import flat


class _Active:
    """The wrapper of apex whose forward runs now; torch's keeps its own."""

    wrapper: Any = None


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
    """Whether a wrapper reduces everything, over all ranks, in the usual way."""
    module = _distributed()
    if getattr(wrapper, "parameters_to_ignore", ()) or getattr(wrapper, "_comm_hooks", ()):
        return False
    return bool(module.get_world_size(wrapper.process_group) == module.get_world_size())


def is_wrapper(module: Any) -> bool:
    """Whether ``module`` is a DistributedDataParallel, of torch or of apex."""
    torchs = getattr(torch.nn.parallel, "DistributedDataParallel", ())
    return isinstance(module, torchs) or hasattr(type(module), "require_backward_grad_sync")


def wrappers_inside(model: torch.nn.Module) -> list[Any]:
    """Every wrapper that is a part of ``model``."""
    return [module for module in model.modules() if is_wrapper(module)]


def refuse_join(wrapper: Any) -> None:
    """Raise inside of ``wrapper.join()``, whose end writes the 16-bit weights of one rank."""
    if getattr(getattr(wrapper, "_join_config", None), "enable", False):
        raise RuntimeError(
            "amp: join() of DistributedDataParallel was called with a model that is cast to 16 "
            "bits. It ends with a broadcast of 16-bit weights, which the masters would not get. "
            "Use O1 or O4, or give all ranks as many inputs."
        )


@contextlib.contextmanager
def inside(wrapper: Any) -> Iterator[None]:
    """Make ``wrapper``, of apex, the active one while its module's forward runs."""
    before, _Active.wrapper = _Active.wrapper, wrapper
    try:
        yield
    finally:
        _Active.wrapper = before


def active_wrapper() -> Any:
    """The wrapper whose forward runs now, if any."""
    if not is_initialized():
        return None
    if _Active.wrapper is not None:
        return _Active.wrapper
    wrapper = torch.nn.parallel.DistributedDataParallel
    return wrapper._get_active_ddp_module()  # type: ignore[no-untyped-call]


def broadcast_masters(model: torch.nn.Module, wrapper: Any) -> None:
    """Give all ranks the parameters of the first one: its masters, and weights that equal them.

    Does nothing for a model without masters: there the wrapper has copied all bits.

    Args:
        model: The model, or a part of it, that ``wrapper`` wraps.
        wrapper: The wrapper.
    """
    if not any(map(table.get, model.parameters())):
        return
    ignored = {
        id(parameter)
        for name, parameter in wrapper.module.named_parameters()
        if name in getattr(wrapper, "parameters_to_ignore", ())
    }
    weights = [weight for weight in model.parameters() if id(weight) not in ignored]
    broadcast_parameters(weights, wrapper.process_group)


@torch.no_grad()
def broadcast_parameters(weights: Sequence[torch.Tensor], group: Any) -> None:
    """Give all ranks of ``group`` the first one's masters, and weights that equal them.

    Args:
        weights: Model parameters, with and without masters, in the same order on every rank.
        group: A process group; ``None`` is the default one.
    """
    masters = [table.get(weight) for weight in weights]
    rows = [(w, m) for w, m in zip(weights, masters, strict=True) if m is not None]
    for weight, master in rows:
        master.refresh(weight)
    flat.broadcast([w if (m := table.get(w)) is None else m.tensor for w in weights], group)
    for weight, master in rows:  # .data: a forward may have saved the weight for its backward
        weight.data.copy_(master.tensor)
    Pairs([weight for weight, _ in rows], [master for _, master in rows]).note()
