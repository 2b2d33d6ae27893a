"""Parameters of the sharded optimizers after a step: they are gathered, and their readers wait.

With ``overlap_param_sync`` the gathers go on after ``step``. A hook of all modules' forwards waits
for the parameters that a module reads. It sees which modules there are, too: until all parameters
have arrived ``state_dict`` of the modules that have some waits, and copying or pickling them is an
error. Other readers are not seen; of those in a forward pass the backward pass knows.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from apex.contrib.optimizers._sharded_gradients import ShardedGradients, Sharding, remove


class ShardedParameters(ShardedGradients):
    """A sharded optimizer that gathers parameters."""

    def __init__(self, params: Any, defaults: dict[str, Any], options: Sharding) -> None:
        self._called = weakref.WeakSet[torch.nn.Module]()  # modules, and those in them
        self._forward_hook: dict[int, Any] = {}  # of all modules; none or one
        self._state_hooks: dict[int, Any] = {}  # of ``state_dict``, by the id of a module
        for hooks in (self._forward_hook, self._state_hooks):
            weakref.finalize(self, remove, hooks)
        super().__init__(params, defaults, options)

    def _take_in(self, params: list[torch.Tensor]) -> None:
        super()._take_in(params)
        if self._options.overlap_param_sync:
            self._watch_forwards()

    def _send_params(self) -> None:
        overlaps = self._options.overlap_param_sync
        for bucket in reversed(self._buckets):  # the first layers first
            self._gathers.append((bucket, *bucket.gather(self._own and self._own.shards)))
            if not overlaps and len(self._gathers) >= self._options.pipeline_size:
                self._finish_gather(0)
        if not overlaps:
            self.param_sync()
        elif self._gathers:
            self._watch_forwards()
            self._watch_state_dicts()

    def param_sync(self) -> None:
        """Wait until all parameters have the values of the last step, with overlap_param_sync.

        A module's forward does so for its own parameters, and after a forward of a model its
        ``state_dict`` for all. Call it before anything else reads parameters: an average of
        ``model.parameters()``, ``torch.nn.functional`` with a weight of another module,
        ``model.compile()``. If a forward pass has read old ones its backward pass raises.
        """
        self._finish_gathers()
        remove(self._state_hooks)

    def _finish_gathers(self) -> None:
        while self._gathers:
            self._finish_gather(0)

    def _finish_gather(self, number: int) -> None:
        bucket, work, flat = self._gathers.pop(number)
        bucket.close(work, flat, self._name)
        if not self._gathers:
            remove(self._forward_hook)

    def _watch_forwards(self) -> None:
        this = weakref.ref(self)

        def before(module: torch.nn.Module, _: Any) -> None:
            optimizer = None if torch.compiler.is_compiling() else this()
            if optimizer is None:
                return
            if module not in optimizer._called:
                optimizer._called.update(module.modules())
                held = {id(p) for one in optimizer._called for p in one._parameters.values()}
                if not optimizer._gathers and optimizer._hooks.keys() <= held:
                    remove(optimizer._forward_hook)  # before a model is compiled with it
            if torch.is_grad_enabled():
                optimizer._need(_read_by(module))
            else:  # no backward pass will find a reader of old values
                optimizer.param_sync()

        if not self._forward_hook:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            self._forward_hook[0] = register(before)

    def _watch_state_dicts(self) -> None:
        hook = _StateDictHook(self)
        for module in [*self._called]:
            if any(id(param) in self._places for param in module._parameters.values()):
                with contextlib.suppress(RuntimeError):  # a ScriptModule takes none
                    handle = module.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
                    self._state_hooks[id(module)] = handle

    def _need(self, params: Iterable[torch.Tensor | None]) -> None:
        """Wait for some parameters."""
        wanted = {id(self._places[id(p)][0]) for p in params if id(p) in self._places}
        for number in reversed(range(len(self._gathers))):
            if id(self._gathers[number][0]) in wanted:
                self._finish_gather(number)
        if not self._gathers:
            self.param_sync()


class _StateDictHook:
    """Waits for the parameters of an optimizer before ``state_dict`` of a module reads them."""

    def __init__(self, optimizer: ShardedParameters | None) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)

    def __call__(self, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._finish_gathers()  # the hooks stay: torch is iterating over them

    def __reduce__(self) -> tuple[Any, ...]:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._gathers:
            raise RuntimeError(
                f"{optimizer._name}: a module was copied or pickled while new values of its "
                "parameters were on their way. With overlap_param_sync=True call param_sync() "
                "before."
            )
        return _StateDictHook, (None,)


def _read_by(module: torch.nn.Module) -> Iterable[torch.Tensor | None]:
    """Parameters that a module reads itself; its children's too, as MultiheadAttention does."""
    if hasattr(module, "_orig_mod"):  # torch.compile(model), in which no hooks run
        return module.parameters()
    children = module.children() if module._parameters else ()
    return [param for one in (module, *children) for param in one._parameters.values()]
