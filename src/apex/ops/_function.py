"""Public autograd functions, with ``apply``, ``forward`` and ``backward``, made from a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from apex._compat import private
from apex.ops import _runtime


class _Inlined(torch.autograd.function.FunctionMeta):
    """The type of `Applied`: torch.compile traces its ``apply`` like any function.

    Of a class whose type is torch's own it would trace ``forward`` and ``backward``.
    """


class Applied(torch.autograd.Function, metaclass=_Inlined):
    """``apply`` calls ``function``, whose operations differentiate themselves.

    So an operation chooses its path, derivatives have any order, and ``torch.func`` works.
    ``forward`` and ``backward`` are for programs that call them, and for a subclass with one
    of its own, which calls them: this backward computes ``function`` once more, unless that may
    not be computed twice (``keeps_graph``), as with dropout; then the forward keeps its graph.
    """

    function: ClassVar[Callable[..., torch.Tensor]]
    autocasts: ClassVar[bool] = False  #: Whether autocast matters to ``apply``.
    keeps_graph: ClassVar[bool] = False  #: Whether ``forward`` keeps the graph for ``backward``.
    gradient: ClassVar[str] = "grad_output"  #: What the argument of ``backward`` is called.
    _own: ClassVar[Any] = None  # of a subclass with a forward or backward of its own

    def __init_subclass__(cls) -> None:
        if "function" in vars(cls):
            forward, backward = _methods(cls)
            cls.forward = staticmethod(forward)  # type: ignore[method-assign]
            cls.backward = staticmethod(backward)  # type: ignore[method-assign]
        elif not {"forward", "backward"}.isdisjoint(vars(cls)):
            methods = {name: staticmethod(getattr(cls, name)) for name in ("forward", "backward")}
            cls._own = type(cls.__name__, (torch.autograd.Function,), methods)

    # TorchScript would compile it if it were in the class that a program names.
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Compute the function. The arguments are those of ``forward`` without ``ctx``."""
        if cls._own is not None:
            return cls._own.apply(*args, **kwargs)
        if cls.autocasts or not private.is_any_autocast_enabled():
            return cls.function(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(x, torch.Tensor):
            return cls.function(*args, **kwargs)
        with _runtime.without_autocast(x.device.type):
            return cls.function(*args, **kwargs)

    # TorchScript would not take a list of any length.
    apply.__func__.__annotations__.clear()  # type: ignore[attr-defined]


def _methods(cls: type[Applied]) -> tuple[Callable[..., torch.Tensor], Callable[..., Any]]:
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the result, and save the arguments for ``backward``."""
        args = signature.bind(*args, **kwargs).args
        if cls.keeps_graph:
            needs = (*ctx.needs_input_grad, *[False] * len(args))
            with torch.enable_grad():
                ctx.args = [a.detach().requires_grad_(need) if isinstance(a, torch.Tensor) else a
                            for a, need in zip(args, needs, strict=False)]  # fmt: skip
                ctx.y = cls.apply(*ctx.args)
            return ctx.y.detach()  # type: ignore[no-any-return]
        ctx.save_for_backward(*[a if isinstance(a, torch.Tensor) else None for a in args])
        ctx.rest = [None if isinstance(a, torch.Tensor) else a for a in args]
        y: torch.Tensor = cls.apply(*args)
        on = _runtime.autocasts(y.device.type)
        ctx.dtype = torch.get_autocast_dtype(y.device.type) if on else None
        return y

    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Compute the gradients of the saved arguments."""
        if cls.keeps_graph:
            taken = [isinstance(a, torch.Tensor) and a.requires_grad for a in ctx.args]
            wanted = [a for a, need in zip(ctx.args, taken, strict=True) if need]
            found = iter(torch.autograd.grad(ctx.y, wanted, grad_output, retain_graph=True))
            return tuple(next(found) if need else None for need in taken)
        create, device = torch.is_grad_enabled(), grad_output.device.type
        saved, args = ctx.saved_tensors, [*ctx.rest]
        needs = (*ctx.needs_input_grad, *[False] * len(args))[: len(args)]
        for i, tensor in enumerate(saved):
            if tensor is not None:  # a view: partial derivatives, if one comes from another
                args[i] = tensor.view_as(tensor) if create else tensor.detach()
                args[i].requires_grad_(needs[i] or args[i].requires_grad)
        with torch.enable_grad(), torch.autocast(device, ctx.dtype, enabled=bool(ctx.dtype)):
            y = cls.apply(*args)
        wanted = [a for a, need in zip(args, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grad_output, create_graph=create))
        return tuple(next(found) if need else None for need in needs)

    def named(*names: str, after: Any = ()) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([*(inspect.Parameter(name, kind) for name in names), *after])

    signature = inspect.signature(cls.function)
    forward.__signature__ = named("ctx", after=signature.parameters.values())  # type: ignore[attr-defined]
    backward.__signature__ = named("ctx", cls.gradient)  # type: ignore[attr-defined]
    return forward, backward
