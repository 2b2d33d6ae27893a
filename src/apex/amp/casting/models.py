"""A model's weights are cast, and two hooks bracket its forward.

The hooks hold plain values only, so a model with them can be deep-copied, pickled, saved,
replicated by ``nn.DataParallel``, traced and compiled. ``forward`` itself is never replaced.
The first hook casts the inputs and switches the level's casts on for the call. The second, which
also runs when the forward raises, switches them off and casts the outputs.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from apex._compat import private
from apex.amp.casting import kept_modules, switches
from apex.amp.casting.containers import Caster, Walker
from apex.amp.casting.dispatcher import skip_frames
from apex.amp.casting.switches import Casts
from apex.amp.gradients.forwards import ForwardRecord
from apex.amp.gradients.masters import table
from apex.amp.gradients.state_dicts import LoadFloat32, ShowFloat32
from apex.amp.levels import HALF_TYPES, Properties

prepared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # with hooks of amp


def _narrow_double(module: torch.nn.Module, value: Any) -> Any:
    """A float64 input of a model whose weights are narrower than float64, in float32."""
    tensor = value.data if isinstance(value, torch.nn.utils.rnn.PackedSequence) else value
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64:
        return value
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return value.to(torch.float32) if dtypes and torch.float64 not in dtypes else value


class _ModelCasts:
    """The casts of a level: of functions, of a model's inputs and of its outputs."""

    # Of the modules of a policy, until a forward; models that were pickled in 2026 lack it.
    calls: kept_modules.Calls | None = None

    def __init__(
        self,
        model: str,
        casts: Casts | None,
        inputs: torch.dtype | None,
        outputs: torch.dtype | None,
    ) -> None:
        self.model = model  # the name of its class
        self.casts = casts
        self.inputs = None if inputs is None else Caster(inputs, keep_double=False)
        self.outputs = None if outputs is None else Caster(outputs)
        self.forwards = ForwardRecord(inputs in HALF_TYPES)
        self.has_16_bit_weights = False
        self.is_guarded = False


_Level, _Caster = _ModelCasts, Caster  # their names in models that were pickled in 2026


class _NotScriptable(AttributeError, RuntimeError):
    """What ``torch.jit.script`` gets where it asks a hook for its name."""


class _Hook:
    def __init__(self, level: _ModelCasts) -> None:
        self.level = level

    @property
    def __name__(self) -> str:
        raise _NotScriptable(
            "torch.jit.script cannot compile the hooks that amp.initialize puts on a model. Use "
            "torch.jit.trace or torch.compile; or call amp.reset() first, which restores the "
            "float32 weights of the model."
        )


class _Guard(_Hook):
    """Forward pre-hook of torch's layers until their model is called: refuses ``model.forward(x)``.

    The casts are hooks of the model, which such a call bypasses. The model's first forward takes
    the guards off, so that they cost nothing later.
    """

    def __call__(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in args):
            name = self.level.model
            raise RuntimeError(
                f"amp: a {type(layer).__name__} with 16-bit weights got float32 inputs, because "
                f"its {name} was not called as model(x). model.forward(x), another method "
                "(model.encode(x)), an overridden __call__ or a call of a submodule bypasses the "
                "casts. Call model(x), and leave __call__ to nn.Module; or pass the submodules to "
                "amp.initialize ([model.encoder, model.decoder]), or inputs of the weights' "
                "dtype."
            )


class _Enter(_Hook):
    """Forward pre-hook: cast the inputs, then switch the level's function casts on."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        level = self.level
        cast: Callable[[Any], Any] | None = level.inputs
        if cast is None and level.casts is not None:
            cast = functools.partial(_narrow_double, module)
        is_traced = torch.compiler.is_compiling()
        if cast is not None:
            walk = Walker(cast, is_traced=is_traced)
            args = tuple([walk(value) for value in args])
            kwargs = {name: walk(value) for name, value in kwargs.items()}
        frame = None
        if not is_traced:
            if level.has_16_bit_weights:
                _check_still_16_bit(module)
            if level.is_guarded:
                level.is_guarded = False
                for layer in module.modules():
                    _remove_hooks(layer, _Guard)
            frame = sys._getframe(1)
            level.forwards.begin(module)
        elif torch.is_grad_enabled():
            level.forwards.begin_compiled(module)
        devices = () if level.casts is None else _devices(module)
        switches.begin_forward(level, level.casts, devices, frame)
        return args, kwargs


class _Leave(_Hook):
    """Forward hook, called in any case: switch function casts off, then cast the outputs."""

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        is_traced = not switches.end_forward(self.level)
        calls = self.level.calls
        if calls is not None and output is not None:  # None: the forward has raised
            self.level.calls = None
            calls.check()
        if self.level.outputs is not None:
            output = Walker(self.level.outputs, is_traced=is_traced)(output)
        training = None if is_traced else self.level.forwards.training
        if training is not None and (now := training()) is not None and not now.last_pass:
            now.unnoticed.watch(now, output)
        return output


def _first_parameter(
    module: torch.nn.Module, dtypes: tuple[torch.dtype, ...] = ()
) -> torch.nn.Parameter | None:
    """The first parameter of ``module``, of one of ``dtypes`` if any are given.

    In one frame: ``next(module.parameters())`` takes six, at each forward.
    """
    modules = [module]
    while modules:
        one = modules.pop()
        for parameter in one._parameters.values():
            if parameter is not None and (not dtypes or parameter.dtype in dtypes):
                return parameter
        modules.extend([child for child in one._modules.values() if child is not None][::-1])
    return None


def _devices(module: torch.nn.Module) -> tuple[str, ...]:
    known = switches.device_types()
    first = _first_parameter(module)
    return (first.device.type,) if first is not None and first.device.type in known else known


skip_frames(_Enter.__call__, _Leave.__call__)


def _check_still_16_bit(model: torch.nn.Module) -> None:
    if _first_parameter(model, HALF_TYPES) is not None:
        return
    raise RuntimeError(
        f"forward of {type(model).__name__}: none of the weights that amp.initialize cast is "
        "16-bit any more, but amp still casts the inputs. Call amp.reset() instead of "
        "model.float(): it also restores the float32 weights of every model. For another level "
        "call amp.initialize again."
    )


_OUR_HOOKS = (_Hook, ShowFloat32, LoadFloat32, kept_modules.EnterKept, kept_modules.LeaveKept)
_HOOK_TABLES = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


def prepare(
    model: torch.nn.Module,
    properties: Properties,
    casts: Casts | None,
    cast_model_outputs: torch.dtype | None,
    kept: kept_modules.Kept,
) -> None:
    """Bring ``model`` to its level, in place; outputs are float32 unless asked for otherwise.

    ``kept`` has modules that a policy keeps out of the level's 16 bits.
    """
    dtype = properties.cast_model_type or None
    outputs = cast_model_outputs
    if dtype is not None and outputs is None:
        outputs = torch.float32
    if dtype == torch.float32 and any(p.dtype == torch.float64 for p in model.parameters()):
        dtype = outputs = None  # a float64 model at O0 stays what it is
    level = _ModelCasts(type(model).__name__, casts, dtype, outputs)
    prepared.add(model)
    model.register_forward_pre_hook(_Enter(level), prepend=True, with_kwargs=True)
    model.register_forward_hook(_Leave(level), always_call=True)
    stay = kept_modules.weights_stay(model, kept) if kept else set()
    if dtype is not None:
        convert(model, dtype, keep_batchnorm=bool(properties.keep_batchnorm_fp32), stay=stay)
    if kept:
        level.calls = kept_modules.install(model, kept, casts, properties.half_dtype)
    if dtype in HALF_TYPES:
        level.has_16_bit_weights = any(p.dtype in HALF_TYPES for p in model.parameters())
        level.is_guarded, guard = True, _Guard(level)
        for module in model.modules():
            _show_float32(module, guard)


def _show_float32(module: torch.nn.Module, guard: _Guard) -> None:
    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
        return
    tensors = [*module._parameters.values(), *module._buffers.values()]
    if not any(t is not None and t.dtype in HALF_TYPES for t in tensors):
        return
    if type(module).__module__.startswith("torch.nn."):
        module.register_forward_pre_hook(guard)
    if any(isinstance(hook, ShowFloat32) for hook in module._state_dict_hooks.values()):
        return
    module.register_state_dict_post_hook(ShowFloat32())  # type: ignore[no-untyped-call]
    loader = LoadFloat32()
    module.register_load_state_dict_pre_hook(loader.before)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(loader.after)  # type: ignore[no-untyped-call]


@torch.no_grad()
def convert(
    model: torch.nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool, stay: Collection[int] = ()
) -> None:
    """Cast floating parameters and buffers to ``dtype`` in place; float64 buffers stay.

    Parameters and buffers keep their identity. With ``keep_batchnorm`` every batchnorm layer,
    affine or not, is left alone; so are the modules whose ids are in ``stay``.
    """
    for module in model.modules():
        if id(module) in stay or (keep_batchnorm and isinstance(module, private.BatchNorm)):
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64:
                _retype(tensor, dtype)
        _flatten(module)


def _flatten(module: torch.nn.Module) -> None:
    """Put the weights of a recurrent layer, apex.RNN's too, into one piece of memory.

    Else cuDNN warns, and copies them in each forward.
    """
    flatten = getattr(module, "flatten_parameters", None)
    if callable(flatten):
        flatten()


def _retype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype == dtype:
        return
    grad = tensor.grad if tensor.is_leaf else None  # a buffer may be a result, which has none
    tensor.grad = None
    tensor.data = tensor.data.to(dtype)
    tensor.grad = None if grad is None else grad.to(dtype)


def record_of(model: torch.nn.Module) -> ForwardRecord | None:
    """The record of the forwards of ``model``; ``None`` if it has no hooks of amp."""
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _Enter)]
    return hooks[0].level.forwards if hooks else None


def refuse_shared(models: Sequence[torch.nn.Module], kept: Sequence[kept_modules.Kept]) -> None:
    """Refuse that a policy names a module which another model has too, of this or an earlier call.

    Each model would have its weights cast its own way. ``kept`` is what this call's policies name;
    models that are initialized again lose what an earlier call did to them first.

    Raises:
        ValueError: Such a module is named, by this call or by the earlier one.
    """
    again = {id(one) for x in models if record_of(x) is not None for one in x.modules()}
    for model, own in zip(models, kept, strict=True):
        others = [other for other in [*prepared, *models] if own and other is not model]
        elsewhere = {id(one): type(other).__name__ for other in others for one in other.modules()}
        for name, module in kept_modules.named_modules(model):
            hooks = () if id(module) in again else module._forward_pre_hooks.values()
            owners = [x.calls.model for x in hooks if isinstance(x, kept_modules.EnterKept)]
            if not owners and name in own:
                owners = [elsewhere[id(x)] for x in module.modules() if id(x) in elsewhere]
            if owners:
                raise ValueError(
                    f"amp.initialize: a policy names {(name or type(model).__name__)!r} of the "
                    f"{type(model).__name__}, and the {owners[0]} shares it, or a part of it, so "
                    "each would cast the shared weights in its own way. Initialize one model that "
                    "contains both, or leave the module out of the policies."
                )


@torch.no_grad()
def undo(model: torch.nn.Module) -> None:
    """Remove amp's hooks from ``model`` and give its weights their float32 values back."""
    record = record_of(model)
    if record is None:
        return
    for module in model.modules():
        if module is model or record_of(module) is None:
            _remove_hooks(module)
        if not record.is_cast:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in HALF_TYPES:
                master = table.pop(parameter)
                if master is not None:
                    master.refresh(parameter)
                    parameter.grad = None
                    parameter.data = master.tensor.detach().clone()
                else:
                    _retype(parameter, torch.float32)
        for buffer in module._buffers.values():
            if buffer is not None and buffer.dtype in HALF_TYPES:
                buffer.data = buffer.data.float()
        _flatten(module)
    prepared.discard(model)


def _remove_hooks(module: torch.nn.Module, kinds: Any = _OUR_HOOKS) -> None:
    for hooks in [getattr(module, name, {}) for name in _HOOK_TABLES]:
        for key, hook in list(hooks.items()):
            target = getattr(hook, "hook", hook)  # torch wraps load pre-hooks
            if isinstance(getattr(target, "__self__", target), kinds):
                del hooks[key]
                for flags in _HOOK_FLAGS:
                    getattr(module, flags, {}).pop(key, None)
