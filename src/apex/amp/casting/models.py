"""A model's weights are cast, and two hooks bracket its forward.

The hooks hold plain values only, so a model with them can be deep-copied, pickled, saved,
replicated by ``nn.DataParallel``, traced and compiled. ``forward`` itself is never replaced.
The first hook casts the inputs and switches the level's casts on for the call. The second, which
also runs when the forward raises, switches them off and casts the outputs.

A model cast to 16 bits shows float32 in its ``state_dict``: the float32 master where a weight
has one, and loading takes float32 values unrounded into the masters. So the ordinary state dicts
lose nothing.

``masters`` maps each 16-bit weight to its master for as long as the weight lives.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakTensorKeyDictionary

from apex.amp.casting import state as casting
from apex.amp.casting.containers import applier
from apex.amp.casting.dispatcher import skip_frames
from apex.amp.casting.state import Casts
from apex.amp.policy import HALF_TYPES, Properties

masters: Any = WeakTensorKeyDictionary()  # model weight -> Master
_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class Master:
    """The float32 master of a 16-bit weight, and when the two were last made equal.

    Attributes:
        tensor: float32 leaf, same shape and device as the weight.
        version: The weight's ``_version`` when it last equalled the rounded master.
        left: The scaled gradient that a finished pass has left on the weight, to be read.
        left_version: Its ``_version`` then.
        waiting: ids of the optimizers' states that share this master and have yet to step.
    """

    __slots__ = ("left", "left_version", "tensor", "version", "waiting")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version
        self.left: torch.Tensor | None = None
        self.left_version = 0
        self.waiting: set[int] = set()

    def wait_for(self, sharers: set[int] | None) -> None:
        """Keep the gradient until all of ``sharers`` (ids of optimizers' states) have stepped."""
        if sharers is not None:
            self.waiting = set(sharers)

    def has_left(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad`` is what a finished pass has left.

        It may be another tensor of the same bits: when torch's DistributedDataParallel rebuilds
        its buckets (``gradient_as_bucket_view=True``), it moves the gradients that it finds.
        """
        left = self.left
        if grad is None or left is None or grad is left:
            return grad is left
        if left.layout != torch.strided or grad.layout != torch.strided:
            return False
        return torch.equal(grad.view(torch.int16), left.view(torch.int16))

    @torch.no_grad()
    def refresh(self, weight: torch.Tensor) -> None:
        """Take over what somebody else wrote into ``weight`` since.

        Elements that still equal the rounded master keep the master's full precision.
        """
        master = self.tensor
        if master.is_meta:  # made before its weight had memory
            master.data = weight.detach().to(master.dtype)
        elif master.device != weight.device:
            master.data = master.data.to(weight.device)
        same = master.to(weight.dtype) == weight
        master.copy_(torch.where(same, master, weight.to(master.dtype)))
        self.version = weight._version

    @torch.no_grad()
    def take(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Take ``value``, which has just been loaded, rounded, into ``weight``."""
        value = value.to(device=weight.device, dtype=self.tensor.dtype)
        same = value.to(weight.dtype) == weight
        self.tensor.copy_(torch.where(same, value, weight.to(self.tensor.dtype)))
        self.version = weight._version


class _Leftovers(threading.local):
    """What to clear before the next forward in this thread; see ``OptimizerState.drop_left``."""

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()


leftovers = _Leftovers()


class _Caster:
    """Casts floating tensors, and objects that offer ``to``, to a dtype.

    Inputs in float64 (what NumPy makes by default) are narrowed to what the model computes in;
    outputs in float64 are what the model chose to give, and are left alone.
    """

    def __init__(self, dtype: torch.dtype, *, keep_double: bool = False) -> None:
        self.dtype = dtype
        self.kept = (dtype, torch.float64) if keep_double else (dtype,)

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            try:
                return value.to(self.dtype)
            except TypeError:  # its to() takes no dtype: a device, say
                return value
        if value.is_floating_point() and value.dtype not in self.kept:
            return value.to(self.dtype)
        return value


class _NarrowDouble:
    """Casts float64 inputs to float32 for a model whose weights are narrower than float64."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.nn.utils.rnn.PackedSequence):
            is_double = value.data.dtype == torch.float64
        else:
            is_double = isinstance(value, torch.Tensor) and value.dtype == torch.float64
        if not is_double:
            return value
        dtypes = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        return value.to(torch.float32) if dtypes and torch.float64 not in dtypes else value


class _Level:
    """The casts of a level: of functions, of a model's inputs and of its outputs."""

    def __init__(
        self, casts: Casts | None, inputs: torch.dtype | None, outputs: torch.dtype | None
    ) -> None:
        self.casts = casts
        self.inputs = None if inputs is None else _Caster(inputs)
        self.outputs = None if outputs is None else _Caster(outputs, keep_double=True)


class _Enter:
    """Forward pre-hook: cast the inputs, then switch the level's function casts on."""

    def __init__(self, level: _Level) -> None:
        self.level = level

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        level = self.level
        cast: Callable[[Any], Any] | None = level.inputs
        if cast is None and level.casts is not None:
            cast = _NarrowDouble(module)
        if cast is not None:
            args = tuple([applier(value, cast) for value in args])
            kwargs = {name: applier(value, cast) for name, value in kwargs.items()}
        frame = None
        if not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            while leftovers.holders and torch.is_grad_enabled():
                leftovers.holders.pop().drop_left()
        devices = () if level.casts is None else _devices(module)
        casting.begin_forward(level, level.casts, devices, frame)
        return args, kwargs


class _Leave:
    """Forward hook, called in any case: switch function casts off, then cast the outputs."""

    def __init__(self, level: _Level) -> None:
        self.level = level

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        casting.end_forward(self.level)
        if self.level.outputs is None:
            return output
        return applier(output, self.level.outputs)


def _devices(module: torch.nn.Module) -> tuple[str, ...]:
    known = casting.device_types()
    first = next(module.parameters(), None)
    return (first.device.type,) if first is not None and first.device.type in known else known


skip_frames(_Enter.__call__, _Leave.__call__)


class _ShowFloat32:
    """State-dict hook: 16-bit entries of the module itself become float32 copies."""

    def __call__(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        own = {**module._parameters, **module._buffers}
        for name, weight in own.items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.dtype not in HALF_TYPES:
                continue
            if isinstance(value, torch.nn.Parameter):  # keep_vars=True asked for the weight
                continue
            master = masters.get(weight) if weight is not None else None
            if master is None:
                state[prefix + name] = value.float()
            else:
                master.refresh(weight)
                state[prefix + name] = master.tensor.detach().clone()


class _LoadFloat32:
    """Before loading, keep the float32 values at hand; after it, give them to the masters."""

    def __init__(self) -> None:
        self.pending: dict[str, torch.Tensor] = {}

    def __deepcopy__(self, memo: Any) -> _LoadFloat32:
        return _LoadFloat32()

    def __reduce__(self) -> tuple[Any, ...]:
        return _LoadFloat32, ()

    def before(
        self,
        module: torch.nn.Module,
        state: dict[str, Any],
        prefix: str,
        *rest: Any,
    ) -> None:
        """Note the entries of ``state`` that have a master waiting."""
        self.pending = {
            name: state[prefix + name]
            for name, weight in module._parameters.items()
            if weight is not None
            and weight in masters
            and isinstance(state.get(prefix + name), torch.Tensor)
        }

    def after(self, module: torch.nn.Module, incompatible: Any) -> None:
        """Hand each noted value to its master, if it is what was loaded."""
        pending, self.pending = self.pending, {}
        for name, value in pending.items():
            weight = module._parameters[name]
            master = None if weight is None else masters.get(weight)
            if weight is not None and master is not None and value.shape == weight.shape:
                master.take(weight, value)


_OUR_HOOKS = (_Enter, _Leave, _ShowFloat32, _LoadFloat32)
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
HOOK_TABLES = (  # of a module: what hooks are put into
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    *_HOOK_FLAGS,
)


def prepare(
    model: torch.nn.Module,
    properties: Properties,
    casts: Casts | None,
    cast_model_outputs: torch.dtype | None,
) -> None:
    """Bring ``model`` to its level, in place.

    Args:
        model: float32 (or, at a level that casts the model, already 16-bit).
        properties: The options in force.
        casts: The function casts of the level, or ``None``.
        cast_model_outputs: dtype of the outputs; ``None`` means float32 where the model is cast.
    """
    dtype = properties.cast_model_type or None
    outputs = cast_model_outputs
    if dtype is not None and outputs is None:
        outputs = torch.float32
    if dtype == torch.float32 and any(p.dtype == torch.float64 for p in model.parameters()):
        dtype = outputs = None  # a float64 model at O0 stays what it is
    level = _Level(casts, dtype, outputs)
    if dtype is not None:
        convert(model, dtype, keep_batchnorm=bool(properties.keep_batchnorm_fp32))
    if dtype in HALF_TYPES:
        for module in model.modules():
            _show_float32(module)
    model.register_forward_pre_hook(_Enter(level), prepend=True, with_kwargs=True)
    model.register_forward_hook(_Leave(level), always_call=True)
    _models.add(model)


def _show_float32(module: torch.nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
        return
    tensors = [*module._parameters.values(), *module._buffers.values()]
    if not any(t is not None and t.dtype in HALF_TYPES for t in tensors):
        return
    if any(isinstance(hook, _ShowFloat32) for hook in module._state_dict_hooks.values()):
        return
    module.register_state_dict_post_hook(_ShowFloat32())  # type: ignore[no-untyped-call]
    loader = _LoadFloat32()
    module.register_load_state_dict_pre_hook(loader.before)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(loader.after)  # type: ignore[no-untyped-call]


@torch.no_grad()
def convert(model: torch.nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool) -> None:
    """Cast floating parameters and buffers to ``dtype`` in place; float64 buffers stay.

    Parameters and buffers keep their identity. With ``keep_batchnorm`` every batchnorm layer,
    affine or not, is left alone.
    """
    for module in model.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm):
            continue
        for parameter in module._parameters.values():
            if parameter is not None and _is_castable(parameter):
                _retype(parameter, dtype)
        for buffer in module._buffers.values():
            if buffer is not None and _is_castable(buffer):
                buffer.data = buffer.data.to(dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()


def _is_castable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _retype(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    if parameter.dtype == dtype:
        return
    grad, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if grad is not None:
        parameter.grad = grad.to(dtype)


def full_precision(model: torch.nn.Module) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The float32 values of the model's floating parameters, before they are rounded."""
    return {
        parameter: parameter.detach()
        for parameter in model.parameters()
        if parameter.dtype == torch.float32
    }


def is_prepared(model: torch.nn.Module) -> bool:
    """Whether ``model`` has hooks of amp."""
    return any(isinstance(hook, _Enter) for hook in model._forward_pre_hooks.values())


@torch.no_grad()
def undo(model: torch.nn.Module) -> None:
    """Remove amp's hooks from ``model`` and give its weights their float32 values back."""
    levels = [h.level for h in model._forward_pre_hooks.values() if isinstance(h, _Enter)]
    was_cast = any(
        level.inputs is not None and level.inputs.dtype in HALF_TYPES for level in levels
    )
    for module in model.modules():
        if module is model or not is_prepared(module):
            _remove_hooks(module, keep_level=module is not model)
        if not was_cast:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype in HALF_TYPES:
                master = masters.pop(parameter, None)
                if master is not None:
                    master.refresh(parameter)
                    parameter.grad = None
                    parameter.data = master.tensor.detach().clone()
                else:
                    _retype(parameter, torch.float32)
        for buffer in module._buffers.values():
            if buffer is not None and buffer.dtype in HALF_TYPES:
                buffer.data = buffer.data.float()
    _models.discard(model)


def _remove_hooks(module: torch.nn.Module, *, keep_level: bool) -> None:
    for table in HOOK_TABLES:
        hooks = getattr(module, table, {})
        for key, hook in list(hooks.items()):
            target = getattr(hook, "hook", hook)  # torch wraps load pre-hooks
            target = getattr(target, "__self__", target)
            if isinstance(target, _OUR_HOOKS) and not (
                keep_level and isinstance(target, (_Enter, _Leave))
            ):
                del hooks[key]
                for flags in _HOOK_FLAGS:
                    getattr(module, flags, {}).pop(key, None)


def prepared() -> Iterator[torch.nn.Module]:
    """Every model with hooks of amp that still exists."""
    yield from list(_models)


def set_prepared(models: Iterable[torch.nn.Module]) -> None:
    """Have :func:`prepared` yield exactly ``models``."""
    _models.clear()
    _models.update(models)
