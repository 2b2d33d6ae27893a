"""Where a watch or a check sits in a program, so that nothing of it is saved or copied with it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from apex._compat import private

_Begin = Callable[[torch.nn.Module, Any, Any], Any]  # what it returns is given to the other
_End = Callable[[Any, Any], None]


def put_on_model(model: torch.nn.Module, begin: _Begin, end: _End) -> Callable[[], None]:
    """Call ``begin`` and ``end`` around each call of ``model``; return what undoes that."""
    names = vars(model)
    ours = names["_compiled_call_impl"] = _WatchedCall(model, begin, end)

    def undo() -> None:
        if names.get("_compiled_call_impl") is not ours:
            return  # the program has called model.compile() since
        if ours.before is None:
            del names["_compiled_call_impl"]
        else:
            names["_compiled_call_impl"] = ours.before

    return undo


class _WatchedCall:
    """The call of a watched module, in ``_compiled_call_impl``, where torch looks first.

    torch leaves that attribute out of what it pickles and copies; a hook would be in both. It is
    also outside of all hooks of the program, which a replay runs again.
    """

    def __init__(self, model: torch.nn.Module, begin: _Begin, end: _End) -> None:
        self._model, self._begin, self._end = model, begin, end
        self.before = vars(model).get("_compiled_call_impl")
        self._inner = self.before or model._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._inner(*args, **kwargs)
        call = self._begin(self._model, args, kwargs)
        try:
            output = self._inner(*args, **kwargs)
        except BaseException:
            self._end(None, None)
            raise
        self._end(call, output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:  # a class whose __getstate__ gives all attributes
        return type(None), ()


def put_on_scaler(scaler: Any, step: Callable[..., Any]) -> Callable[[], None]:
    """Let ``step(scaler, ...)`` be the step of a GradScaler; return what undoes that."""
    ours = {"step": types.MethodType(step, scaler), "__getstate__": lambda: state()}

    def state() -> dict[str, Any]:  # what pickle and copy ask for: without these two
        whole = type(scaler).__getstate__(scaler)
        return {name: one for name, one in whole.items() if name not in ours}

    def undo() -> None:
        for name in ours:
            vars(scaler).pop(name, None)

    vars(scaler).update(ours)
    return undo


def unwrapped(model: Any) -> Any:
    """The module inside of a data-parallel wrapper, whose replay needs no other rank."""
    while "DataParallel" in type(model).__name__ and isinstance(
        getattr(model, "module", None), torch.nn.Module
    ):
        if isinstance(model, torch.nn.DataParallel) and len(model.device_ids) > 1:
            break  # it copies the attributes of the module inside to replicas
        model = model.module
    return model


def around(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Let ``around(inner, ...)`` be a function of ``owner``; return what undoes that."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def function(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    setattr(owner, name, function)
    return lambda: setattr(owner, name, inner)


def after_init(kind: Any, tell: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``tell`` with each new object of ``kind``; return what undoes that."""

    def init(inner: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        tell(self)

    return around(kind, "__init__", init)


def pop_mode(mode: Any) -> bool:
    """Take a function mode from torch's stack, wherever it is; whether it was there."""
    depth = private.len_torch_function_stack()
    if not any(private.get_function_stack_at(i) is mode for i in range(depth)):
        return False
    above = []
    while (top := private.pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        private.push_mode(one)
    return True
