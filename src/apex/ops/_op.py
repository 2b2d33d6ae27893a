"""Build a differentiable operation on tensors from a schema, a definition and a kernel file.

An operation computes the same on every path; :meth:`op.__call__` chooses one:

* **definition**: PyTorch functions, which every device, dtype, derivative and transform knows;
* **kernel**: the Triton kernels of ``kernels/<name>.py``, on a GPU, in an ``autograd.Function``;
* **pieces**: PyTorch functions for a part of the rows at a time, in the same ``autograd.Function``,
  for operations that need a backward of their own on a CPU as well;
* **operator**: ``torch.ops.apex.<name>``, one node of a compiled graph, which runs the kernel. An
  eager call goes without it: the dispatcher costs 14 us a call, an ``autograd.Function`` 1 us. The
  compiler cannot fuse it with its neighbours: see ``compiles_to_operator``.

From the schema follow the operator and its backward, their functions for fake tensors, what is
saved, gradients of gradients (of the definition), vmap over a backward, and the autocast rule.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.library import Library, register_autograd, register_fake, register_vmap

from apex.ops import _runtime
from apex.ops._check import ArgumentError

_LIBRARY = Library("apex", "FRAGMENT")  # type: ignore[no-untyped-call]
_NEVER = 2**63 - 1


class op:  # lower case, like torch.autocast: used as a function
    """A function of the arguments in a schema, differentiable as often as its definition is.

    A kernel file, and ``pieces``, offer::

        allocate(*args) -> (y, *more)          uninitialized; also called with fake tensors; y
                                               alone, and no tuple, if there is nothing more
        forward(*args) -> (y, *more)           the same, computed
        backward(dy, needs, **saved) -> [...]  gradients in the order of grads; None where the
                                               tensor is absent, anything where needs is False.
                                               saved: the tensors in saves and all arguments that
                                               are no tensors

    Args:
        schema: ``name(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor more)``, without
            defaults: arguments, the result, and what the forward computes for the backward besides.
            The first argument is a tensor.
        definition: ``definition(*args) -> y`` in PyTorch functions; rounds to 16 bits once.
        grads: Names of the tensors that the kernel computes gradients for.
        least: Elements of the first argument from which on an eager call on a GPU takes the kernel.
        kernel: Name of the kernel file, if it is not the operation's; "" if there is none.
        saves: Names of the tensors that are saved for the backward: arguments, or results. By
            default all arguments and all results but ``y``. The gradient of an argument that is
            in ``grads`` and not among them is like ``y``; where its dtype may differ, the last
            argument, ``<name>_dtype``, says it to the backward alone.
        gradient: ``gradient(dy, **saved) -> [...]`` in PyTorch functions, in the order of
            ``grads``: the definition of the backward, for operations that save less than their
            arguments. Gradients of gradients are those of it; without it such operations have none.
            No argument outside of ``grads`` may require a gradient then.
        pieces: Forward and backward where no kernel runs, for calls of which ``pieces.pays(*args)``
            says that they are faster on a CPU; for all calls if there is no ``pays``, or if they
            need them (see ``saves``).
        autocast: Under ``torch.autocast`` cast tensors to its dtype (``"half"``), to float32
            (``"float"``) or not at all (``"leave"``). float64 is never cast.
        contiguous: Whether tensors are made contiguous for the kernel; else it is given any.
        takes: Whether the kernel takes the first argument as it lies in memory; if not, the
            definition does.
        compiles_to_operator: Whether ``torch.compile`` for a GPU gets the operator for these
            arguments. If not, it gets the definition, which it fuses with what is around. Which of
            them moves fewer bytes is in docs/performance.md.
    """

    def __init__(
        self,
        schema: str,
        definition: Callable[..., torch.Tensor],
        *,
        grads: Sequence[str],
        least: int = _NEVER,
        kernel: str | None = None,
        saves: Sequence[str] | None = None,
        gradient: Callable[..., Sequence[torch.Tensor | None]] | None = None,
        pieces: Any = None,
        autocast: Literal["half", "float", "leave"] = "leave",
        contiguous: bool = True,
        takes: Callable[[torch.Tensor], bool] = lambda x: True,
        compiles_to_operator: Callable[..., bool] = lambda *args: True,
    ) -> None:
        self.name, arguments, results = _parsed(schema)
        self.definition, self.grads, self.least, self.pieces = definition, grads, least, pieces
        self.gradient = gradient
        self.autocast, self.contiguous, self.takes = autocast, contiguous, takes
        self.compiles_to_operator = compiles_to_operator
        self._kernel_file = self.name if kernel is None else kernel
        self.names = list(arguments)
        self.tensors = [name for name, kind in arguments.items() if kind.startswith("Tensor")]
        self.constants = [name for name in arguments if name not in self.tensors]
        self.results = list(results)
        # Of the arguments that definition and forward are called with.
        self._count = sum(not name.endswith("_dtype") for name in arguments)
        self.saves = list(saves or [*self.tensors, *self.results[1:]])
        #: Whether every call needs the kernel or pieces.
        always = pieces is not None and not hasattr(pieces, "pays")
        self.own_backward = always or (gradient is None and not set(grads) <= set(self.saves))
        self.operator = _define(schema, self.run, self._allocate)
        kinds = {**dict.fromkeys(self.results, "Tensor"), **arguments}
        rest = [*self.saves, *self.constants]
        self.backward_operator = _define(
            f"{self.name}_backward(Tensor dy, bool[] needs, "
            f"{', '.join(f'{kinds[name]} {name}' for name in rest)}) -> "
            + (f"({', '.join(['Tensor'] * len(grads))})" if len(grads) > 1 else "Tensor"),
            self._run_backward,
            self._empty_gradients,
        )
        register_autograd(
            self.operator, self.gradients, setup_context=self._save_for_operator, lib=_LIBRARY
        )
        methods = {
            "forward": staticmethod(self.save_and_run),
            "backward": staticmethod(lambda *args: self.gradients(*args)),  # compiled: no method
        }
        self._function: Any = type(self.name, (torch.autograd.Function,), methods)

    # -- forward -----------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> torch.Tensor:
        """Cast the arguments under autocast, choose a path and compute ``y``."""
        device_type = args[0].device.type
        if not _runtime.autocasts(device_type):
            return self._called(args)
        args = self.cast(*args)
        with torch.autocast(device_type, enabled=False):
            return self._called(args)

    def cast(self, *args: Any) -> tuple[Any, ...]:
        """Cast tensors as autocast does, if it is on for the device of the first."""
        if not isinstance(args[0], torch.Tensor):
            found = type(args[0]).__name__
            raise ArgumentError(f"{self.name}: {self.names[0]} is a {found}; pass a tensor.")
        device_type = args[0].device.type
        if self.autocast == "leave" or not _runtime.autocasts(device_type):
            return args
        half = self.autocast == "half"
        dtype = torch.get_autocast_dtype(device_type) if half else torch.float32
        casts = [isinstance(a, torch.Tensor) and a.dtype in _runtime.DTYPES for a in args]
        return tuple(a.to(dtype) if cast else a for a, cast in zip(args, casts, strict=True))

    def _called(self, args: tuple[Any, ...]) -> torch.Tensor:
        if self._by_definition(args):
            return self.definition(*args[: self._count])
        if _runtime.recorded():
            return _as_tuple(self.operator(*args))[0]
        y: torch.Tensor = self._function.apply(*args)
        return y

    def _by_definition(self, args: tuple[Any, ...]) -> bool:
        x = args[0]
        if _runtime.transformed() or not all(map(_runtime.is_plain, args)):
            return True
        if torch.compiler.is_compiling():  # whatever the size, which would be a guard
            opaque = _compiles(x) and self.takes(x) and self.compiles_to_operator(*args)
            return not (self.own_backward or opaque)
        if x.numel() == 0:
            return True
        if self.own_backward or self._fuses(x, self.least):
            return False
        pays = x.is_cpu and self.pieces is not None and _runtime.forced() is None
        return not (pays and self.pieces.pays(*args))

    def _fuses(self, x: torch.Tensor, least: int = 1) -> bool:
        """Whether the kernel is to run, given that the path is not the definition."""
        if x.dtype not in _runtime.DTYPES or x.numel() < (1 if _runtime.forced() else least):
            return False
        return bool(self._kernel_file) and _runtime.can_fuse(x.device) and self.takes(x)

    def run(self, *args: Any) -> Any:
        """Compute ``y`` and what the backward needs, outside of autograd."""
        return self._computed(self.implementation(args[0]), args)

    def implementation(self, x: torch.Tensor) -> Any:
        """What computes ``forward`` and ``backward``: kernels, pieces, or None."""
        return self._kernels() if self._fuses(x) else self.pieces

    def _kernels(self) -> Any:
        # late: importing an operation must not import triton
        return importlib.import_module(f"apex.kernels.{self._kernel_file}")

    def _computed(self, implementation: Any, args: Sequence[Any]) -> Any:
        if implementation is None or args[0].numel() == 0:
            return self._by_definition_alone(args)
        return _call(implementation.forward, args[0], *self._dense(args[: self._count]))

    def _by_definition_alone(self, args: Sequence[Any]) -> Any:
        """What an operator returns where no kernel runs; its backward computes a forward again."""
        y, *more = _as_tuple(self._allocate(*args))
        with torch.no_grad():
            y.copy_(self.definition(*args[: self._count]))
        return (y, *(m.fill_(math.nan) for m in more)) if more else y

    def _allocate(self, *args: Any) -> Any:
        source = self._kernels() if self.pieces is None else self.pieces
        return source.allocate(*self._dense(args[: self._count]))

    def _dense(self, args: Sequence[Any]) -> list[Any]:
        """Arguments as kernels read them: no ``z.conj().imag``, whose sign is not in memory yet."""
        dense = [a.resolve_neg() if isinstance(a, torch.Tensor) else a for a in args]
        if not self.contiguous:
            return dense
        return [a.contiguous() if isinstance(a, torch.Tensor) else a for a in dense]

    # -- autograd ----------------------------------------------------------------------------------

    def save_and_run(self, ctx: Any, *args: Any) -> Any:
        """Forward of an ``autograd.Function``: compute ``y`` and save what its backward needs."""
        if _runtime.recorded():
            output = self.operator(*args)
        else:
            ctx.implementation = self.implementation(args[0])  # that of the backward, too
            output = self._computed(ctx.implementation, args)
        outputs = _as_tuple(output)
        self._save(ctx, args, outputs)
        return outputs[0]

    def _save_for_operator(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        outputs = _as_tuple(output)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        self._save(ctx, inputs, outputs)

    def _save(self, ctx: Any, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        known = dict(zip(self.names, inputs, strict=True))
        ctx.constants = {name: known[name] for name in self.constants}
        known |= zip(self.results, outputs, strict=True)
        ctx.save_for_backward(*[known[name] for name in self.saves])

    def gradients(
        self, ctx: Any, dy: torch.Tensor | None, *_: Any, needs: Sequence[bool] | None = None
    ) -> Any:
        """Backward of an ``autograd.Function``: a gradient, or None, for each argument.

        Args:
            ctx: Where :meth:`save_and_run` saved what is needed.
            dy: The gradient of ``y``.
            needs: Which gradients are wanted, for the first arguments at least.
        """
        if dy is None:  # only another result was used
            return (None,) * len(self.names)
        needed = dict.fromkeys(self.names, False)
        given = (needs or ctx.needs_input_grad)[: len(self.tensors)]
        # Two slices: in Dynamo of torch 2.9 zip(strict=False) is strict.
        needed |= zip(self.tensors[: len(given)], given, strict=True)
        saved = dict(zip(self.saves, ctx.saved_tensors, strict=True)) | ctx.constants
        wanted = [name for name in self.tensors if needed[name]]
        with _runtime.without_autocast(dy.device.type):
            again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            if again or not set(wanted) <= set(self.grads):
                found = self._definition_gradients(dy, saved, wanted)
            else:
                each = [needed[name] for name in self.grads]
                if _runtime.recorded() or _runtime.batched(dy):
                    run = self.backward_operator
                else:
                    run = functools.partial(self._run_backward, ctx=ctx)
                each_gradient = _as_tuple(run(dy, each, *saved.values()))
                found = dict(zip(self.grads, each_gradient, strict=True))
        return tuple(found[name] if needed[name] else None for name in self.names)

    def _run_backward(
        self, dy: torch.Tensor, needs: list[bool], *rest: Any, ctx: Any = None
    ) -> Any:
        saved = dict(zip([*self.saves, *self.constants], rest, strict=True))
        if dy.numel() == 0:
            empty = _as_tuple(self._empty_gradients(dy, needs, *rest))
            return _as_result([gradient.zero_() for gradient in empty])
        first = saved[self.saves[0]]
        implementation = getattr(ctx, "implementation", None) or self.implementation(first)
        if implementation is None or first.numel() == 0:
            wanted = [name for name, need in zip(self.grads, needs, strict=True) if need]
            # A dispatch mode runs operators without autograd. No gradients of these gradients.
            key = torch._C.DispatchKey.AutogradFunctionality
            with torch.no_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):
                by_name = self._definition_gradients(dy, saved, wanted)
            found = [by_name.get(name) for name in self.grads]
        else:
            dense = dict(zip(saved, self._dense([*saved.values()]), strict=True))
            found = _call(implementation.backward, first, *self._dense([dy]), needs, **dense)
        # What is not needed may have been computed on the way: the sums of weight and bias are one.
        kept = [grad if need else None for grad, need in zip(found, needs, strict=True)]
        return _as_result([dy.new_empty(0) if grad is None else grad for grad in kept])

    def _empty_gradients(self, dy: torch.Tensor, needs: list[bool], *rest: Any) -> Any:
        saved = dict(zip([*self.saves, *self.constants], rest, strict=True))
        found = []
        for name, need in zip(self.grads, needs, strict=True):
            if not need or (name in saved and saved[name] is None):
                found.append(dy.new_empty(0))
            elif name not in saved:
                found.append(dy.new_empty(dy.shape, dtype=saved.get(f"{name}_dtype")))
            elif self.contiguous:
                found.append(saved[name].new_empty(saved[name].shape))
            else:
                found.append(torch.empty_like(saved[name]))
        return _as_result(found)

    def _definition_gradients(
        self, dy: torch.Tensor, saved: dict[str, Any], wanted: Sequence[str]
    ) -> dict[str, torch.Tensor | None]:
        if self.gradient is not None:
            return dict(zip(self.grads, self.gradient(dy, **saved), strict=True))
        if not set(self.tensors) <= set(saved):
            missing = ", ".join(name for name in self.tensors if name not in saved)
            raise RuntimeError(
                f"{self.name}: memory_efficient=True keeps no {missing}, so that gradients of "
                "gradients (create_graph=True) cannot be computed; pass memory_efficient=False."
            )
        if not wanted:
            return {}
        create = torch.is_grad_enabled()
        args = [saved[name] for name in self.names]
        with torch.enable_grad():
            # Views: partial derivatives, also where one argument was computed from another.
            views = {n: a.view_as(a) if create else a.detach().requires_grad_()
                     for n, a in zip(self.names, args, strict=True) if n in wanted}  # fmt: skip
            y = self.definition(*[views.get(n, a) for n, a in zip(self.names, args, strict=True)])
        leaves = list(views.values())
        found = torch.autograd.grad(y, leaves, dy, create_graph=create)
        return dict(zip(views, found, strict=True))


def _compiles(x: torch.Tensor) -> bool:
    """Whether a compiled graph may get an operator: on a CPU it always gets the definition."""
    forced = _runtime.forced()
    return forced == "triton" or (x.is_cuda and _runtime.HAS_TRITON and forced is None)


def _call(function: Callable[..., Any], beside: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not beside.is_cuda:
        return function(*args, **kwargs)
    with torch.cuda.device(beside.device):  # Triton launches there
        return function(*args, **kwargs)


def _parsed(schema: str) -> tuple[str, dict[str, str], list[str]]:
    """Name, arguments (name -> type) and results of a schema."""
    name, _, rest = schema.partition("(")
    inputs, _, outputs = rest.partition(") -> ")
    pairs = [argument.split() for argument in inputs.split(",")]
    arguments = {key: kind for kind, key in pairs}
    return name, arguments, [output.split()[1] for output in outputs.strip("()").split(",")]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(f"apex::{name}", fake, lib=_LIBRARY)
    operation = getattr(torch.ops.apex, name).default
    register_vmap(f"apex::{name}", functools.partial(_one_by_one, operation), lib=_LIBRARY)
    return operation


def _one_by_one(
    operation: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[Any, Any]:
    """Rule for vmap, which meets an operator only where it goes over a backward pass."""
    batched = [
        argument.unbind(dim) if isinstance(dim, int) else [argument] * info.batch_size
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]
    found = [operation(*each) for each in zip(*batched, strict=True)]
    if isinstance(found[0], torch.Tensor):
        return torch.stack(found), 0
    outputs = [torch.stack(each) for each in zip(*found, strict=True)]
    return outputs, [0] * len(outputs)


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _as_result(tensors: Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """What an operator returns; not a list, over which ``is_grads_batched`` does not go."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
