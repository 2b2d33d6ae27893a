"""Undo of an ``initialize`` that raises.

Before the first change, :func:`rollback` saves what may be changed: hooks, weights, buffers and
gradients of the models; attributes, groups and state of the optimizers, and amp's records of them;
registrations, wrapped functions and dispatcher kernels of the process. The thread's autocast state
and ``_amp_state`` are not among them: ``initialize`` changes those last, when nothing can fail.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.amp import distributed_checkpoint, registry
from apex.amp import optimizer as managing
from apex.amp.casting import dispatcher, rules
from apex.amp.casting import models as modules
from apex.amp.casting.rules import _USER_CAST_REGISTRY, _USER_PROMOTE_REGISTRY
from apex.amp.gradients.masters import table
from apex.amp.replaced import optimizers_inside

# One initialize or reset at a time: they change tables of the process.
lock = threading.RLock()


@contextlib.contextmanager
def rollback(models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> Iterator[None]:
    """Put back everything that the block has changed if it raises.

    Args:
        models: Those that it may change.
        optimizers: Likewise.
    """
    with lock, contextlib.ExitStack() as undo:
        log = _UndoLog(undo)
        log.save_process()
        for optimizer in optimizers:
            log.save_optimizer(optimizer)
        weights = {id(weight) for model in models for weight in model.parameters()}
        for optimizer in registry.managed():  # whose 16-bit weights may be in the models
            for param in managing.halves_of(optimizer):
                if id(param) in weights:
                    log.save_container(optimizer.state.get(param))
        for module in {module for model in models for module in model.modules()}:
            log.save_module(module)
        yield
        undo.pop_all()


class _UndoLog:
    """Saves what may be changed, and fills ``undo`` with the calls that restore it."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self.undo = undo
        self.seen: set[int] = set()

    def save_process(self) -> None:
        if not dispatcher.is_installed():
            self.undo.callback(dispatcher.uninstall)
        if not distributed_checkpoint.is_installed():
            self.undo.callback(distributed_checkpoint.uninstall)
        self.undo.callback(rules.restore, keep=rules.patched())
        self.save_container(_USER_CAST_REGISTRY)
        self.save_container(_USER_PROMOTE_REGISTRY)
        self.undo.callback(modules.set_prepared, list(modules.prepared()))
        self.undo.callback(registry.set_managed, registry.managed())
        for record in managing.states():
            self.undo.callback(setattr, record, "superseded", record.superseded)

    def save_optimizer(self, optimizer: Any) -> None:
        self.save_container(vars(optimizer))
        for inner in optimizers_inside(optimizer):
            self.save_container(inner._optimizer_step_pre_hooks)
        self.save_container(optimizer.param_groups)  # LARC's are those of the optimizer inside
        self.save_container(optimizer.state)
        record = managing.state_of(optimizer)
        if record is None:
            return
        for part in record.parts():
            self.save_container(vars(part))
        for group in optimizer.param_groups:
            for param in group["params"]:
                self.save_tensor(param, unscaled_in_place=True)

    def save_module(self, module: torch.nn.Module) -> None:
        for name in modules.HOOK_TABLES:
            self.save_container(getattr(module, name, None))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                self.save_tensor(tensor, unscaled_in_place=table.get(tensor) is not None)

    def save_container(self, container: Any) -> None:
        """Save what a dict, list or set holds, and what those inside of it hold."""
        if not isinstance(container, (dict, list, set)) or id(container) in self.seen:
            return
        self.seen.add(id(container))
        before: Any = container.copy()
        fill = container.extend if isinstance(container, list) else container.update
        self.undo.callback(fill, before)
        self.undo.callback(container.clear)  # runs before the line above
        for value in before.values() if isinstance(before, dict) else before:
            self.save_container(value)

    def save_tensor(self, tensor: torch.Tensor, *, unscaled_in_place: bool) -> None:
        """Save the data and gradient of a weight, master or buffer, and the master's record."""
        if id(tensor) in self.seen:
            return
        self.seen.add(id(tensor))
        grad = tensor.grad if tensor.is_leaf else None
        values = grad.clone() if grad is not None and unscaled_in_place else None
        self.undo.callback(_restore_tensor, tensor, tensor.data, grad, values)
        master = table.get(tensor)
        if master is not None:
            fields = {name: getattr(master, name) for name in type(master).__slots__}
            self.undo.callback(_restore_master, tensor, master, fields)
            for value in fields.values():
                self.save_container(value)
        else:
            self.undo.callback(table.pop, tensor)


@torch.no_grad()
def _restore_tensor(
    tensor: torch.Tensor,
    data: torch.Tensor,
    grad: torch.Tensor | None,
    values: torch.Tensor | None,
) -> None:
    if tensor.dtype != data.dtype:
        tensor.grad = None  # it could not be set beside data of another dtype
    tensor.data = data
    if grad is not None and values is not None:
        grad.copy_(values)
    if tensor.is_leaf:
        tensor.grad = grad


def _restore_master(weight: torch.Tensor, master: Any, fields: dict[str, Any]) -> None:
    table.put(weight, master)
    for name, value in fields.items():
        setattr(master, name, value)
