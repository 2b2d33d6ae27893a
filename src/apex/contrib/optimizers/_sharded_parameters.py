"""Parameters of the sharded optimizers after a step: they are gathered, and their readers wait.

With ``overlap_param_sync`` the gathers go on after ``step``. A hook of all modules' forwards waits
for the parameters that a module reads, and all other readers wait because a parameter has another
class meanwhile (:mod:`apex.contrib.optimizers._pending`). That class is not seen by TorchScript,
and it changes what ``torch.compile`` has seen. So the hook waits for all parameters of scripted and
compiled modules, and ``step`` itself waits for

* parameters of modules whose forward was not called yet: nobody knows who reads them;
* those of modules that are scripted, or compiled in place (``module.compile()``);
* all, once a function was compiled that reads one, or a module ran inside of a transform of
  ``torch.func`` that hides its parameters.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from apex._compat import private
from apex.contrib.optimizers._pending import Gather
from apex.contrib.optimizers._sharded_gradients import ShardedGradients, Sharding, remove
from apex.ops.lists.shards import ShardBucket


class ShardedParameters(ShardedGradients):
    """A sharded optimizer that gathers parameters."""

    def __init__(self, params: Any, defaults: dict[str, Any], options: Sharding) -> None:
        self._called = weakref.WeakSet[torch.nn.Module]()  # modules, and those in them
        self._forward_hook: dict[int, Any] = {}  # of all modules; none or one
        self._compile_hook: dict[int, Any] = {}  # of all compilations; none or one
        self._gather_of: dict[ShardBucket, Gather] = {}
        self._gathers: list[Gather] = []  # that have not finished
        self._is_hidden = False  # readers are not seen: step waits
        self._are_called = False  # all parameters are in modules that were called
        for hooks in (self._forward_hook, self._compile_hook):
            weakref.finalize(self, remove, hooks)
        weakref.finalize(self, _finish_or_leave, self._gathers).atexit = False
        super().__init__(params, defaults, options)

    def _take_in(self, params: list[torch.Tensor]) -> None:
        super()._take_in(params)
        self._are_called = False
        if self._options.overlap_param_sync:
            self._watch_forwards()

    def _send_params(self) -> None:
        overlaps, group = self._options.overlap_param_sync, self._own and self._own.shards
        for bucket in reversed(self._buckets):  # the first layers first
            if bucket not in self._gather_of:
                self._gather_of[bucket] = Gather(bucket, self._name, self._lock, self._gathers)
            self._gather_of[bucket].begin(group)
            if not overlaps and len(self._gathers) >= self._options.pipeline_size:
                self._gathers[0].finish()
        if overlaps:
            self._let_readers_wait()
        else:
            self.param_sync()

    def _let_readers_wait(self) -> None:
        """Go on without the parameters whose readers are seen; wait for the others."""
        if not self._is_hidden:
            self._watch_compilations()
        called = self._read_by_called()
        for gather in [*self._gathers]:
            if called.issuperset(map(id, gather.bucket.params)):
                gather.watch()
            else:
                gather.finish()
        self._look_for_all()
        if self._gathers or not self._are_called:
            self._watch_forwards()

    def _read_by_called(self) -> set[int]:
        """Ids of the parameters that only Python code of modules that were called reads."""
        if self._is_hidden:
            return set()
        found, hidden = set[int](), set[int]()
        for module in self._called:
            found.update(map(id, module._parameters.values()))
            if _is_scripted(module) or module._compiled_call_impl is not None:
                hidden.update(map(id, module.parameters()))
        return found - hidden

    def param_sync(self) -> None:
        """Wait until all parameters have the values of the last step, with ``overlap_param_sync``.

        Code that reads a parameter waits automatically. Only four kinds of code do not, so call
        this method before them: a compiled extension, a transform of ``torch.func`` with a
        parameter as an argument, and a view or a ``data_ptr()`` from before the step. If a forward
        pass reads old values, its backward pass raises an error.
        """
        _finish(self._gathers)
        if self._are_called:
            remove(self._forward_hook)

    def _look_for_all(self) -> None:
        held = {id(p) for module in self._called for p in module._parameters.values()}
        self._are_called = self._hooks.keys() <= held

    def _watch_forwards(self) -> None:
        this = weakref.ref(self)

        def before(module: torch.nn.Module, _: Any) -> None:
            optimizer = None if torch.compiler.is_compiling() else this()
            if optimizer is None:
                return
            if module not in optimizer._called:
                optimizer._called.update(module.modules())
                optimizer._look_for_all()
            if optimizer._gathers or _is_transformed():
                optimizer._need(module)
            if not optimizer._gathers and optimizer._are_called:
                remove(optimizer._forward_hook)  # before a model is compiled with it

        if not self._forward_hook:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            self._forward_hook[0] = register(before)

    def _need(self, module: torch.nn.Module) -> None:
        """Wait for the parameters that a module reads."""
        params = [p for p in _read_by(module) if p is not None]
        if _is_transformed() and not self._places.keys() >= {*map(id, params)}:
            self._is_hidden = True  # some are hidden in a transform's tensors
            return self.param_sync()
        wanted = {self._places[id(p)][0] for p in params if id(p) in self._places}
        return _finish([gather for gather in self._gathers if gather.bucket in wanted])

    def _arrived(self, param: torch.Tensor) -> None:
        bucket, _ = self._places.get(id(param), (None, 0))
        if any(gather.bucket is bucket for gather in self._gathers):
            raise RuntimeError(
                f"{self._name}: the forward pass read an old value of a parameter of shape "
                f"{tuple(param.shape)}, in a compiled extension or through a view made before the "
                "step. Call param_sync() before the forward pass, or leave overlap_param_sync=True "
                "out."
            )
        super()._arrived(param)

    def _watch_compilations(self) -> None:
        handler = private.callback_handler  # torch has imported Dynamo already
        dynamos = private.CallbackTrigger.DYNAMO
        this = weakref.ref(self)

        def begins(compilation: Any) -> None:
            optimizer = this()
            if optimizer is None or not optimizer._gathers:
                return
            optimizer.param_sync()
            if compilation.callback_trigger is dynamos and not _in_compiled_module():
                optimizer._is_hidden = True  # else it is compiled again after each step

        known = self._compile_hook.get(0)
        if known is None or known.call not in handler.start_callbacks:  # or reset()
            handler.register_start_callback(begins)
            self._compile_hook[0] = _Registered(begins, handler)


class _Registered:
    """A callback of Dynamo's, which can be removed."""

    def __init__(self, call: Any, handler: Any) -> None:
        self.call, self._handler = call, handler

    def remove(self) -> None:
        if self.call in self._handler.start_callbacks:
            self._handler.remove_start_callback(self.call)


def _finish(gathers: list[Gather]) -> None:
    """Finish gathers, which take themselves off the list."""
    for gather in [*gathers]:
        gather.finish()


def _finish_or_leave(gathers: list[Gather]) -> None:
    """Finish the gathers of an optimizer that is gone; what failed raises where it is read."""
    with contextlib.suppress(RuntimeError):
        _finish(gathers)


def _is_scripted(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_transformed() -> bool:
    """Whether this runs inside of a transform of ``torch.func``."""
    return private.maybe_current_level() is not None


def _in_compiled_module() -> bool:
    """Whether a compiled module is being called, whose parameters have been waited for."""
    frame: Any = sys._getframe(1)  # its own would be kept alive by its locals
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (
            isinstance(owner, private.OptimizedModule) or owner._compiled_call_impl is not None
        ):
            return True
        frame = frame.f_back
    return False


def _read_by(module: torch.nn.Module) -> Iterable[torch.Tensor | None]:
    """Parameters that a module reads itself; its children's too, as MultiheadAttention does."""
    if hasattr(module, "_orig_mod") or _is_scripted(module):  # in which no hooks run
        return module.parameters()
    children = module.children() if module._parameters else ()
    return [param for one in (module, *children) for param in one._parameters.values()]
