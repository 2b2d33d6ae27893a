"""Build a differentiable operation on tensors from a schema, a definition and a kernel file.

An operation computes the same on every path; :meth:`op.__call__` chooses one:

* **definition**: PyTorch functions, which every device, dtype, derivative and transform knows;
* **kernel**: the Triton kernels of ``kernels/<name>.py``, on a GPU, in an ``autograd.Function``;
* **pieces**: PyTorch functions for a part of the rows at a time, in the same ``autograd.Function``:
  for a CPU, and for operations that need a backward of their own everywhere;
* **operator**: ``torch.ops.apex.<name>``, one node of a compiled graph, which runs the kernel. With
  gradients that is the same ``autograd.Function``, around the operator below autograd. An eager
  call goes without it: the dispatcher costs 14 us a call, an ``autograd.Function`` 1 us. The
  compiler cannot fuse it with its neighbours: see ``compiles_to_operator``.

From the schema follow the operator and its backward, their functions for fake tensors, what is
saved, gradients of gradients (of the definition), vmap over a backward, and the autocast rule.
``benchmarks/op_host_time.py`` times an eager call: names become positions once, when it is built.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.library import Library, register_fake, register_vmap

from apex._compat import private
from apex.ops import _batch_invariance, _runtime
from apex.ops._check import ArgumentError
from apex.ops._thresholds import Threshold, threshold

UNSURE = object()  #: What ``op.choose`` says where more than one tensor has to be looked at.
# What torch's functions raise where arguments do not fit together.
_REFUSALS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
# Each call asks for them: a name of this module takes 30 ns less than an attribute of a package.
_compiler, _forward_ad = private.compiler, private.forward_ad
_autocasts = private.is_any_autocast_enabled
_is_transformed = private.are_functorch_transforms_active
_is_wrapped = private.is_functorch_wrapped_tensor
_is_batched = private.is_legacy_batchedtensor
_dispatch_modes = private.len_torch_dispatch_stack
_forced = _runtime._forced
_LIBRARY = Library("apex", "FRAGMENT")  # type: ignore[no-untyped-call]


class op:  # lower case, like torch.autocast: used as a function
    """A function of the arguments in a schema, differentiable as often as its definition is.

    A kernel file, and ``pieces``, offer::

        forward(*args) -> (y, *more)           the results; y alone is no tuple
        backward(dy, needs, **saved) -> [...]  gradients in the order of grads; None where the
                                               tensor is absent, anything where needs is False.
                                               saved: the tensors in saves and all arguments that
                                               are no tensors

    :mod:`apex.ops._thresholds` says from how many elements on an eager call takes the kernel.

    A schema, a definition and ``grads`` make an operation that has a kernel. Of the other eleven
    options the ones about the backward (``saves``, ``gradient``, ``allocate``) belong together,
    those about the path (``kernel``, ``pieces``, ``takes``, ``compiles_to_operator``), and those of
    :meth:`usual` (``torchs``, ``fitting``).

    Args:
        schema: ``name(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor more)``, without
            defaults: arguments, the result, and what the forward computes for the backward besides.
            Tensors are the first arguments.
        definition: ``definition(*args) -> y`` in PyTorch functions; rounds to 16 bits once.
        grads: Names of the tensors that the kernel computes gradients for.
        kernel: Name of the kernel file, if it is not the operation's.
        saves: Names of the tensors that are saved for the backward; by default all arguments and
            all results but ``y``. The gradient of an argument that is not among them is like ``y``;
            where its dtype may differ, an argument ``<name>_dtype`` says it.
        gradient: ``gradient(dy, **saved) -> [...]`` in the order of ``grads``: defines the backward
            and gradients of gradients of operations that save less than their arguments. No
            argument outside of ``grads`` may require a gradient then.
        allocate: ``allocate(*args) -> (y, *more)``, uninitialized: of operations with results
            besides ``y``.
        pieces: Forward and backward where no kernel runs: on a CPU for a first argument of more
            than ``above`` elements, if there is no ``serves(*args)`` that is False; and for all
            that need them (see ``saves``). Without ``above`` for all calls, and no kernel is there.
            Operators with several results compute by them, too. ``eager`` are others for eager
            calls, whose results besides ``y`` the backward does not read.
        autocast: Under ``torch.autocast`` cast tensors to its dtype (``"half"``) or not at all
            (``"leave"``). float64 is never cast.
        contiguous: Whether tensors are made contiguous for the kernel; else it is given any.
        takes: Whether the kernel takes the first argument as it lies in memory, and from how many
            elements on this has to be asked: ``(function, least)``.
        compiles_to_operator: Whether ``torch.compile`` for a GPU gets the operator and not the
            definition, which it fuses with what is around. docs/kernels.md has their bytes.
        torchs: ``torchs(*given) -> y``, for few elements: torch's functions alone, which refuse
            what does not fit together; ``None`` where others are needed. ``given`` are the
            arguments of a call, in the operation's order but maybe not all.
        fitting: ``fitting(*given) -> args``: all arguments of the operation, if what is given fits
            together as it is; else ``None``. Tensors are known to be plain, on one device, and the
            first to have elements of float32 or 16 bits. It is quick, and may refuse what is rare.
    """

    def __init__(  # noqa: PLR0913 - all but three have a default
        self,
        schema: str,
        definition: Callable[..., torch.Tensor],
        *,
        grads: Sequence[str],
        kernel: str = "",
        saves: Sequence[str] | None = None,
        gradient: Callable[..., Sequence[torch.Tensor | None]] | None = None,
        allocate: Callable[..., Any] | None = None,
        pieces: Any = None,
        autocast: Literal["half", "leave"] = "leave",
        contiguous: bool = True,
        takes: tuple[Callable[[torch.Tensor], bool], int] = (lambda x: True, sys.maxsize),
        compiles_to_operator: Callable[..., bool] = lambda *args: True,
        torchs: Callable[..., torch.Tensor | None] = lambda *given: None,
        fitting: Callable[..., Sequence[Any] | None] = lambda *given: None,
    ) -> None:
        self.schema, self.torchs, self.fitting = schema, torchs, fitting
        self.name, arguments, self.results = _parsed(schema)
        #: The operation under `batch_invariant`, if that covers it and has been on; see `_by_row`.
        self.by_row: op | None = None
        self.definition, self.gradient, self.pieces = definition, gradient, pieces
        self._eager = getattr(pieces, "eager", pieces)
        self.allocate = allocate
        self.grads, self.autocast, self.contiguous = grads, autocast, contiguous
        self.takes, self._asks_from = takes
        self.compiles_to_operator = compiles_to_operator
        self.names = list(arguments)
        self.tensors = [name for name, kind in arguments.items() if kind.startswith("Tensor")]
        self._count, self.constants = len(self.tensors), self.names[len(self.tensors) :]
        self.saves = list(saves or [*self.tensors, *self.results[1:]])
        # Pieces that say from which size on they serve (``above``) stand beside a kernel; others
        # replace it.
        always = pieces is not None and not hasattr(pieces, "above")
        self._kernel_file = "" if always else f"apex.kernels.{kernel or self.name}"
        #: Whether every call needs the kernel or pieces: autograd saves what the definition reads,
        #: so an operation that is not to save a tensor with a gradient never takes the definition.
        self.own_backward = always or (gradient is None and not set(grads) <= set(self.saves))
        # Whether pieces are faster than the definition, which may depend on all arguments.
        serves = None if self.own_backward else getattr(pieces, "serves", None)
        self._serves = serves or (lambda *args: True)
        always_ours = Threshold(1, 1) if self.own_backward else None
        self.threshold = always_ours or threshold(self.name) or Threshold(sys.maxsize, sys.maxsize)
        # ``above`` of it: elements up to which the definition computes what is not on CUDA.
        self._elsewhere = pieces
        if pieces is None or self.own_backward:
            self._elsewhere = SimpleNamespace(above=0 if self.own_backward else sys.maxsize)
        self._find_positions()
        self._define_operators(schema, arguments)
        # One function for eager calls and for the operator: what computes is an argument of it.
        # `apply` takes the tensors, and one argument that holds what computes and all constants.
        methods = {
            "forward": staticmethod(self._forward),
            "backward": staticmethod(self._backward),
        }
        self._function: Any = type(self.name, (torch.autograd.Function,), methods)
        #: ``compute(*tensors, (implementation, *constants))``, after `choose`: the function's
        #: ``apply`` without transforms, which torch's own looks for in a frame of Python for each
        #: argument.
        function: Any = torch.autograd.Function
        self.compute: Callable[..., torch.Tensor] = super(function, self._function).apply  # type: ignore[misc]
        #: ``usual(*given)``, what public functions ask first: ``y``, if nothing is unusual. With
        #: ``None`` they check their arguments one by one, which finds the words for what does not
        #: fit together, and call the operation with those that do.
        self.usual: Callable[..., torch.Tensor | None] = self._chooser(
            _REFUSALS, torchs, self._if_usual, lambda *_: None
        )
        #: ``choose(x)``: what computes an eager call whose first argument is ``x``: kernels or
        #: pieces, which `compute` takes; ``None``: the definition; `UNSURE`: ask the operation.
        self.choose: Callable[[Any], Any] = self._chooser(
            (), lambda x: None, lambda found, x: found, lambda x: UNSURE
        )
        self._computed = self._chooser(
            (), lambda *args: self.definition(*args), self._large, self._unusual
        )

    def _find_positions(self) -> None:
        """Turn names into positions among the arguments and, behind them, the results."""
        assert self.names == [*self.tensors, *self.constants], f"{self.name}: tensors come first"
        self._at_tensors = [*range(len(self.tensors))]  # a list, which torch.compile can trace
        self._at_grads = [self.names.index(name) for name in self.grads]
        count = len(self.grads)
        assert self._at_grads == self._at_tensors[:count], f"{self.name}: grads come first"
        self._at_others = self._at_tensors[count:]
        #: What a backward returns behind the gradients: for other tensors and for the constants.
        self._no_gradients = (None,) * (len(self._at_others) + 1)
        known = [*self.tensors, *self.results]
        self._to_save = _items([known.index(name) for name in self.saves])
        self._needs = _items(self._at_grads)
        #: Names of what a backward is given, in this order: tensors, then constants.
        self._saved = [*self.saves, *self.constants]

    def _define_operators(self, schema: str, arguments: dict[str, str]) -> None:
        """Define ``apex::name`` and ``apex::name_backward``, its gradient.

        The second takes ``dy``, which gradients are needed, and what is saved; it returns a tensor
        for each of ``grads``, of no elements where none is needed.
        """
        kinds = {**dict.fromkeys(self.results, "Tensor"), **arguments}
        saved = ", ".join(f"{kinds[name]} {name}" for name in self._saved)
        several = ", ".join(["Tensor"] * len(self.grads))
        found = f"({several})" if len(self.grads) > 1 else "Tensor"
        self.operator = _define(schema, self.run, self._allocate)
        self.backward_operator = _define(
            f"{self.name}_backward(Tensor dy, bool[] needs, {saved}) -> {found}",
            self._run_backward,
            self._empty_gradients,
        )
        _LIBRARY.impl(self.name, self._recorded, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]

    # -- forward -----------------------------------------------------------------------------------

    def _chooser(
        self, refusals: tuple[type[Exception], ...], few: Callable[..., Any],
        large: Callable[..., Any], unusual: Callable[..., Any],
    ) -> Callable[..., Any]:  # fmt: skip
        """Make a function that chooses the path of an eager call: what every call asks first.

        It returns what one of three functions does, so that a choice is one frame of Python:
        ``few(*given)``, or ``None`` after one of the ``refusals``; ``large(implementation,
        *given)``, with kernels, pieces, or ``None`` for the definition; or ``unusual(*given)``,
        under autocast, a transform, the compiler or a mode, which has to look at more than the
        first argument. Of few elements it is ``few`` whatever transforms and modes there are.
        """

        def choose(*given: Any) -> Any:
            x = given[0]
            if (
                _compiler.is_dynamo_compiling()
                or _compiler._is_compiling_flag  # torch.export without Dynamo
                or (_batch_invariance.on and self.by_row is not None)
                or type(x) not in _runtime.TENSOR_TYPES
                or (_autocasts() and _runtime.autocasts(x.device.type))
            ):
                return unusual(*given)
            size = x.numel()
            if type(size) is not int:  # a tensor: jit.trace records sizes
                return unusual(*given)
            is_few = size <= self._elsewhere.above
            if is_few is not (size < self.threshold.least):  # to ask a tensor takes 35 ns
                is_few = is_few is not x.is_cuda
            if is_few and not _forced:
                try:
                    return few(*given)
                except refusals:
                    return None
            if (
                _is_transformed()
                or _is_wrapped(x)  # what is left of a transform
                or _forward_ad._current_level >= 0
                or _dispatch_modes() > 0
            ):
                return unusual(*given)
            known = size and x.dtype in _runtime.DTYPES
            return large(self.implementation(x, eager=True) if known else None, *given)

        return choose

    def implementation(self, x: torch.Tensor, *, eager: bool = False) -> Any:
        """What computes where ``x`` is not small: kernels, pieces; ``None``: the definition.

        Of pieces an eager call asks whether they serve. An operator takes them for results besides
        ``y``, which its backward reads and no definition gives.
        """
        fuses = _forced[-1] == "triton" if _forced else x.is_cuda and _runtime._missing() is None
        if (
            fuses
            and self._kernel_file
            and x.dtype in _runtime.DTYPES
            and (x.numel() < self._asks_from or self.takes(x))
        ):  # late: importing an operation must not import triton
            return sys.modules.get(self._kernel_file) or importlib.import_module(self._kernel_file)
        takes_pieces = (x.is_cpu and not _forced) if eager else self.allocate is not None
        if not (self.own_backward or takes_pieces):
            return None
        return self._eager if eager else self.pieces

    def _if_usual(self, implementation: Any, *given: Any) -> torch.Tensor | None:
        """`usual` of more than few elements."""
        if implementation is None or (implementation is self._eager and not self._serves(*given)):
            try:
                return self.torchs(*given)
            except _REFUSALS:
                return None
        device = given[0].device
        for tensor in given[1 : self._count]:
            if tensor is not None and not (
                type(tensor) in _runtime.TENSOR_TYPES and tensor.device == device
            ):
                return None
        args = self.fitting(*given)
        if args is None:
            return None
        if implementation is self._eager and not torch.is_grad_enabled():
            return _as_tuple(implementation.forward(*self._dense(args)))[0]
        return self.compute(*args[: self._count], (implementation, *args[self._count :]))

    def __call__(self, *args: Any) -> torch.Tensor:
        """Choose a path and compute ``y``."""
        if _batch_invariance.on and self.by_row is not None:
            return self.by_row(*args)
        found: torch.Tensor = self._computed(*args)
        return found

    def _large(self, implementation: Any, *args: Any) -> torch.Tensor:
        if not self._are_plain(args):
            return self._unusual(*args)
        if implementation is None or (implementation is self._eager and not self._serves(*args)):
            return self.definition(*args)
        return self.compute(*args[: self._count], (implementation, *args[self._count :]))

    def _unusual(self, *args: Any) -> torch.Tensor:
        """A call under autocast, a transform, the compiler or a mode, or with unusual tensors."""
        x = args[0]
        if _runtime.autocasts(x.device.type):
            args = self.cast(*args)
            with torch.autocast(x.device.type, enabled=False):
                return self(*args)
        if _runtime.transformed() or not self._are_plain(args):
            return self.definition(*args)
        if torch.compiler.is_compiling():  # whatever the size, which would be a guard
            records = self.own_backward or (
                _runtime.compiles(x) and self.takes(x) and self.compiles_to_operator(*args)
            )
        else:  # a mode, which is to see one operator; of few elements `choose` said so
            implementation = self.implementation(x, eager=True) if x.numel() else None
            records = implementation is not None and (
                implementation is not self._eager or self._serves(*args)
            )
        return _as_tuple(self.operator(*args))[0] if records else self.definition(*args)

    def cast(self, *args: Any) -> tuple[Any, ...]:
        """Cast tensors as autocast does, if it is on for the device of the first."""
        if not isinstance(args[0], torch.Tensor):
            found = type(args[0]).__name__
            raise ArgumentError(f"{self.name}: {self.names[0]} is a {found}; pass a tensor.")
        device_type = args[0].device.type
        if self.autocast == "leave" or not _runtime.autocasts(device_type):
            return args
        dtype = torch.get_autocast_dtype(device_type)
        casts = [isinstance(a, torch.Tensor) and a.dtype in _runtime.DTYPES for a in args]
        return tuple(a.to(dtype) if cast else a for a, cast in zip(args, casts, strict=True))

    def _are_plain(self, args: Sequence[Any]) -> bool:
        """Whether kernels know the tensors: all but subclasses and other floating dtypes."""
        for i in self._at_tensors:
            tensor = args[i]
            if tensor is None:
                continue
            if type(tensor) not in _runtime.TENSOR_TYPES:
                return False
            if tensor.dtype not in _runtime.DTYPES and tensor.is_floating_point():
                return False
        return True

    def _dense(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Tensors as kernels read them; what is no tensor stays as it is.

        Contiguous, and no ``z.conj().imag``, whose sign is not in memory yet.
        """
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and (
                tensor.is_neg() or (self.contiguous and not tensor.is_contiguous())
            ):
                plain = tensor.resolve_neg()
                dense = plain.contiguous() if self.contiguous else plain
                return [*tensors[:i], dense, *self._dense(tensors[i + 1 :])]
        return tensors

    # -- the operator ------------------------------------------------------------------------------

    def run(self, *args: Any) -> Any:
        """Compute ``y`` and what the backward needs, as an operator."""
        implementation = self.implementation(args[0])
        if implementation is not None and args[0].numel():
            return call_on_device(implementation.forward, args[0], *self._dense(args))
        found = self._allocate(*args)
        if self.allocate is None:
            return found
        y, *more = found
        with torch.no_grad():
            y.copy_(self.definition(*args))
        return y, *(m.fill_(math.nan) for m in more)  # the backward computes a forward again

    def _allocate(self, *args: Any) -> Any:
        """What :meth:`run` returns, for fake tensors: the definition's has the kernel's strides."""
        if self.allocate is not None:
            return self.allocate(*self._dense(args))
        with torch.no_grad():
            return self.definition(*self._dense(args)).contiguous()

    def _run_backward(self, dy: torch.Tensor, needs: Sequence[bool], *saved: Any) -> Any:
        implementation = self.implementation(saved[0])
        if not dy.numel():
            empty = _as_tuple(self._empty_gradients(dy, needs, *saved))
            return _as_result([gradient.zero_() for gradient in empty])
        if implementation is not None and saved[0].numel():
            found = self._gradients(implementation, dy, needs, saved)
        else:
            wanted = [name for name, need in zip(self.grads, needs, strict=True) if need]
            # A dispatch mode runs operators without autograd. No gradients of these gradients.
            key = private.DispatchKey.AutogradFunctionality
            with torch.no_grad(), private.SetExcludeDispatchKeyGuard(key, False):
                by_name = self._definition_gradients(dy, saved, wanted)
            found = [by_name.get(name) for name in self.grads]
        # What is not needed may have been computed on the way: the sums of weight and bias are one.
        each = zip(found, needs, strict=True)
        return _as_result([g if need and g is not None else dy.new_empty(0) for g, need in each])

    def _empty_gradients(self, dy: torch.Tensor, needs: Sequence[bool], *rest: Any) -> Any:
        saved = dict(zip(self._saved, rest, strict=True))
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

    def _recorded(self, keys: Any, *args: Any) -> Any:
        """The operator where autograd is on: the function, with the operators below to compute."""
        operators, count = _Operators(self, keys), self._count
        if torch.is_grad_enabled() and private.any_requires_grad(*args):
            y = self._function.apply(*args[:count], (operators, *args[count:]))
            more, operators.more = operators.more, ()  # the graph holds `operators`
            return _as_result([y, *more])
        return operators.forward(*args)

    # -- the function ------------------------------------------------------------------------------

    def _forward(self, ctx: Any, *args: Any) -> Any:
        tensors, ctx.how = args[:-1], args[-1]
        implementation, *constants = ctx.how
        if type(implementation) is _Operators:  # which make tensors dense by themselves
            outputs = implementation.forward(*tensors, *constants)
        else:
            dense = self._dense(tensors)
            outputs = call_on_device(implementation.forward, args[0], *dense, *constants)
        if isinstance(outputs, torch.Tensor):
            ctx.save_for_backward(*self._to_save((*tensors, outputs)))
            return outputs
        y, *more = outputs
        ctx.save_for_backward(*self._to_save((*tensors, y, *more)))
        return y

    def _backward(self, ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """A gradient, or None, for each argument: by what computed the forward, if it can."""
        if _autocasts() and _runtime.autocasts(dy.device.type):
            with torch.autocast(dy.device.type, enabled=False):
                return self._backward(ctx, dy)
        implementation, *constants = ctx.how
        needed, saved = ctx.needs_input_grad, (*ctx.saved_tensors, *constants)
        compiling = _compiler.is_dynamo_compiling() or _compiler._is_compiling_flag
        others = self._at_others and any(map(needed.__getitem__, self._at_others))
        if others or (torch.is_grad_enabled() and not compiling):
            wanted = [name for name, need in zip(self.tensors, needed, strict=False) if need]
            by_name = self._definition_gradients(dy, saved, wanted)
            return *map(by_name.get, self.tensors), None
        needs = self._needs(needed)
        gradients: list[torch.Tensor | None]
        if (
            compiling
            or _dispatch_modes() > 0
            or _is_wrapped(dy)
            or _is_batched(dy)
            or type(implementation) is _Operators
        ):
            gradients = [*_as_tuple(self.backward_operator(dy, needs, *saved))]
        else:
            gradients = [*self._gradients(implementation, dy, needs, saved)]
        if False in needs:  # what is not needed may have been computed on the way
            gradients = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        return *gradients, *self._no_gradients

    def _gradients(
        self, implementation: Any, dy: torch.Tensor, needs: Sequence[bool], saved: Sequence[Any]
    ) -> Any:
        slope, *dense = self._dense((dy, *saved))
        given = dict(zip(self._saved, dense, strict=True))
        return call_on_device(implementation.backward, dy, slope, needs, **given)

    def _definition_gradients(
        self, dy: torch.Tensor, rest: Sequence[Any], wanted: Sequence[str]
    ) -> dict[str, torch.Tensor | None]:
        saved = dict(zip(self._saved, rest, strict=True))
        if self.gradient is not None:
            return dict(zip(self.grads, self.gradient(dy, **saved), strict=True))
        if not set(self.tensors) <= set(saved):
            missing = ", ".join(name for name in self.tensors if name not in saved)
            raise RuntimeError(
                f"{self.name}: with memory_efficient=True {missing} is not saved, which gradients "
                "of gradients (create_graph=True) need; pass memory_efficient=False."
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


class _Operators:
    """What computes an operator's function: the operators themselves, below autograd."""

    def __init__(self, of: op, keys: Any) -> None:
        self.operator, self.keys = of.operator, private.after_autograd_keyset & keys
        self.more: Sequence[torch.Tensor] = ()  #: The results besides ``y``.

    def forward(self, *args: Any) -> Any:
        with private.AutoDispatchBelowAutograd():
            outputs = self.operator.redispatch(self.keys, *args)
        self.more = _as_tuple(outputs)[1:]
        return outputs


# The device that is current, without a frame of Python. A build for CPUs has no such function.
_current_device = private.cuda_getDevice


def call_on_device(
    function: Callable[..., Any], first: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call a launcher while the device of ``first`` is the current one."""
    if not first.is_cuda or first.get_device() == _current_device():
        return function(*args, **kwargs)
    with torch.cuda.device(first.device):  # Triton launches there
        return function(*args, **kwargs)


def _items(positions: list[int]) -> Any:
    """A function that picks the items at some positions of a tuple, as a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    start = positions[0] if positions else 0
    return operator.itemgetter(slice(start, start + len(positions)))


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
