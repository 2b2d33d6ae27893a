"""``amp.initialize``: from level and overrides to a training.

Everything is checked before anything is changed. What it makes belongs to the models and
optimizers passed in; ``_amp_state`` shows the newest for old readers. Only the casts outside of
models belong to the thread, because a loss computed there is to be cast too.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import torch

from apex._compat import private
from apex.amp import checks, distributed_checkpoint
from apex.amp.casting import cpu_float16, dispatcher, kept_modules, rules, switches
from apex.amp.casting import models as modules
from apex.amp.checkpoint import load_state_dict, state_dict
from apex.amp.gradients import collectives
from apex.amp.gradients.masters import Values, table
from apex.amp.gradients.step_checks import share_memory
from apex.amp.levels import HALF_TYPES, O0, O1, O2, O3, O4, O5, Properties, opt_levels
from apex.amp.newest import newest
from apex.amp.optimizer import OptimizerState, state_of
from apex.amp.scale import check
from apex.amp.training import Training, alive, disabled, managed, managed_states

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "Properties",
    "initialize",
    "load_state_dict",
    "opt_levels",
    "reset",
    "state_dict",
]

lock = threading.RLock()  # one initialize or reset at a time: they change tables of the process

_Models = TypeVar("_Models")  # a module, or a list of them
_Optimizers = TypeVar("_Optimizers")


class _Options(TypedDict, total=False):
    """Options of :func:`initialize` that are passed by keyword, for type checkers."""

    cast_model_type: torch.dtype | bool | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | str | None
    master_weights: bool | None
    loss_scale: str | float | None
    cast_model_outputs: torch.dtype | None
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    max_skipped_steps: int
    fused_step: bool
    debug: bool
    process_group: torch.distributed.ProcessGroup | None
    policy: Any


@overload
def initialize(
    models: _Models,
    optimizers: None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    **options: Unpack[_Options],
) -> _Models: ...


@overload
def initialize(
    models: _Models,
    optimizers: _Optimizers,
    enabled: bool = True,
    opt_level: str = "O1",
    **options: Unpack[_Options],
) -> tuple[_Models, _Optimizers]: ...


def initialize(  # noqa: PLR0913  # the contract's own arguments, and torch's for the scaler
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: str | float | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    max_skipped_steps: int = 50,
    fused_step: bool = False,
    debug: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
    policy: Any = None,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place.

    Args:
        models: A module, or a list of modules, in float32, on any device.
        optimizers: An optimizer, a list or tuple of them, or ``None``.
        enabled: ``False`` makes every other call of amp a pass-through for these models and
            optimizers. Models and optimizers that were initialized before become plain torch
            again, as after :func:`reset`.
        opt_level: ``"O0"`` to ``"O5"``. The level sets the defaults of the next five options. Begin
            with ``"O4"`` where bfloat16 is fast (NVIDIA GPUs from Ampere on), else with ``"O1"``.
        cast_model_type: dtype to cast weights and inputs to; ``False`` for no cast.
        patch_torch_functions: Whether to cast functions by list (O1, O4 only).
        keep_batchnorm_fp32: Whether batchnorm stays float32 in a model that is cast.
        master_weights: Whether the optimizer steps float32 masters of 16-bit weights.
        loss_scale: A number, or ``"dynamic"``.
        cast_model_outputs: dtype of the models' outputs. By default float32 at O0, O2, O3 and O5,
            and whatever the model returns at O1 and O4. A float64 model at O0 is not cast.
        num_losses: Number of loss scalers; ``scale_loss(..., loss_id=...)`` selects one.
        verbosity: 0 logs nothing, 1 logs options and overflows, 2 logs each cast as well.
        min_loss_scale: Lower limit of a dynamic scale.
        max_loss_scale: Upper limit of a dynamic scale; ``None`` for no limit.
        init_scale: First value of a dynamic scale.
        growth_factor: Factor by which a dynamic scale grows.
        backoff_factor: Factor by which an overflow multiplies a dynamic scale.
        growth_interval: Number of steps without an overflow after which the scale grows.
        max_skipped_steps: Number of skipped steps in a row after which ``step`` raises.
        fused_step: Leave gradients scaled until ``step``, which then reads each of them one time
            fewer. Needs an optimizer of :mod:`apex.optimizers`. Until the step ``param.grad`` is
            scaled. Clip with ``amp.clip_grad_norm_``, and read gradients through
            ``amp.master_params(optimizer)``. The step frees the gradients.
        debug: Put a :func:`apex.debug.watch` on models and optimizers, which explains the first
            step that is not finite. ``apex.debug.watch_of(optimizer)`` returns this watch.
        process_group: The ranks that hold parts of one model, for model parallelism. An overflow
            on one rank skips the step on all of them. Each ``step`` all-reduces one number, and a
            GPU does not make the host wait for it. All ranks must enter ``scale_loss`` and call
            ``step`` and ``zero_grad`` equally often and in the same order, even without gradients.
            With ``None`` each rank decides alone, except for the ranks of a DTensor's mesh.
        policy: The path of a file that ``apex what-if --save`` wrote, or its contents. At O1, O2,
            O4 and O5 the modules listed for the level's 16-bit type keep float32 weights and
            products. For several models pass a list, with ``None`` for a model without a policy.
            :func:`state_dict` saves the policy, and :func:`load_state_dict` rejects a state that
            was saved under another policy.

    Returns:
        ``models`` if ``optimizers`` is ``None``, else ``(models, optimizers)``. They are the same
        objects that you passed.

    Raises:
        RuntimeError: The level is unknown, or an option or a parameter's dtype does not fit it; a
            model that the level would cast is wrapped in torch's ``DistributedDataParallel`` or
            sharded by FSDP2; or you called this under ``torch.inference_mode``, or inside a
            ``torch.autocast`` block whose end would undo it.
        TypeError: ``models``, ``optimizers``, ``enabled``, ``process_group`` or ``policy`` has the
            wrong type.
        ValueError: A number is out of range, an optimizer's groups contain a weight twice, an
            optimizer holds the weights of another copy of the model, or the policy was made for
            another model.

    An argument that raises an error changes nothing. If memory runs out during the call, or a
    method of the model raises, models and optimizers become plain torch again. They keep their
    values, which O3 may have rounded.
    """
    private.need("amp.initialize")
    if not hasattr(verbosity, "__int__"):
        raise TypeError(f"amp.initialize: verbosity was {verbosity!r}; it must be 0, 1 or 2.")
    flag: object = enabled
    if isinstance(flag, str):  # initialize(model, optimizer, "O2")
        raise TypeError(
            f"amp.initialize: enabled, the third argument, was {flag!r}; it must be True or "
            "False. Pass the level by its name: opt_level=..."
        )
    if not enabled:
        return _disable(models, optimizers, verbosity)
    properties = checks.options(
        opt_level,
        {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        },
        verbosity > 0,
    )
    check("num_losses", num_losses, lambda x: type(x) is int and x >= 1, "an integer above 0")
    check("max_skipped_steps", max_skipped_steps, lambda x: x >= 1, "at least 1")
    if cast_model_outputs is not None and not isinstance(cast_model_outputs, torch.dtype):
        raise TypeError(
            f"amp.initialize: cast_model_outputs was {cast_model_outputs!r}; it must be a dtype "
            "such as torch.float32, or None."
        )
    checks.refuse_inference_mode()
    switches.refuse_users_block("amp.initialize", switches_on=properties.casts_functions)
    optimizer_list = checks.optimizer_list(optimizers)
    if fused_step:
        checks.refuse_unfused(optimizer_list)
    model_list = [checks.unwrapped(model, properties) for model in checks.model_list(models)]
    checks.refuse_copies(model_list, optimizer_list)
    kept = kept_modules.read(policy, model_list, properties, verbose=verbosity > 0)
    with lock:  # models of other threads are listed
        modules.refuse_shared(model_list, kept)
    checks.check_dtypes(model_list, properties)
    checks.refuse_sharded(model_list, properties, process_group)
    process_group = checks.group_of_several("amp.initialize", process_group)
    scalers = [
        newest.scaler_type(
            properties.loss_scale,
            init_scale=init_scale,
            scale_window=growth_interval,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
        )
        for _ in range(num_losses)
    ]

    training = Training(
        properties,
        scalers,
        verbosity=int(verbosity),
        max_skipped_steps=max_skipped_steps,
        casts_functions=properties.casts_functions,
        fused_step=fused_step,
        process_group=process_group,
        policy=kept_modules.saved(kept),
    )
    params = [param for model in model_list for param in model.parameters()]
    casts = _build(training, model_list, kept, params, optimizer_list, cast_model_outputs)
    known, devices = switches.device_types(), {param.device.type for param in params}
    if properties.casts_anything:
        cpu_float16.begin(properties.half_dtype, devices or known)
    if casts is None:
        switches.disable_for_thread()
    else:
        on = tuple(device for device in known if device in devices) or known
        switches.enable_for_thread(casts, on)
        newest.casts = casts
        vars(newest).pop("handle", None)  # of the casts before
    newest.show([training])
    vars(newest).update(
        verbosity=verbosity,
        opt_properties=properties,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
    )
    if debug and optimizer_list:
        from apex.debug.entry import watch

        watch(model_list, optimizer_list, process_group=process_group)
    return models if optimizers is None else (models, optimizers)


def _build(
    training: Training,
    models: list[torch.nn.Module],
    kept: list[kept_modules.Kept],
    params: list[torch.nn.Parameter],
    optimizers: list[Any],
    cast_model_outputs: torch.dtype | None,
) -> switches.Casts | None:
    """Change models and optimizers. All that can be refused has been, but for registrations.

    Returns the level's function casts, to be switched on; ``None`` if it has none.
    """
    properties = training.properties
    casts = None
    with lock:
        if properties.casts_functions:
            log = training.verbosity == 2
            casts = rules.casts_for(properties.half_dtype, rules.registered(), verbose=log)
            training.casts = weakref.ref(casts)
        _supersede(params, optimizers, properties)
        _release(models, optimizers)
        if properties.cast_model_type in HALF_TYPES:
            rules.patch_matrix_exp()
        full: Values = {}
        if properties.master_weights:
            distributed_checkpoint.install()
            collectives.install()
            tensors = [*params, *[one for model in models for one in model.buffers()]]
            # .data: a detached tensor would count what is written to the weight
            full = {one: one.data for one in tensors if one.dtype == torch.float32}
        had_views = [share_memory(optimizer, params) for optimizer in optimizers]
        try:
            for model, own in zip(models, kept, strict=True):
                modules.prepare(model, properties, casts, cast_model_outputs, own)
            training.add_models(models, [modules.record_of(model) for model in models])
            for optimizer, had in zip(optimizers, had_views, strict=True):
                use_masters = bool(properties.master_weights)
                OptimizerState(optimizer, training, use_masters, full, had_views=had)
            for optimizer in optimizers:
                _retype_state(optimizer, _halves_of(optimizer))
        except BaseException:  # such as out of memory
            _put_back(models, optimizers, full)
            raise
    return casts


def _put_back(
    models: list[torch.nn.Module], optimizers: list[Any], full: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """Make plain torch again of what an error has left half changed.

    ``full`` has values from before, but those that masters are copies of.
    """
    for optimizer in optimizers:
        if state_of(optimizer) is not None:
            continue
        for params in [group["params"] for group in optimizer.param_groups]:
            params[:] = map(checks.weight_of, params)
        for param in list(optimizer.state):
            optimizer.state[checks.weight_of(param)] = optimizer.state.pop(param)
    for tensor in {*full, *[one for model in models for one in model.parameters()]}:
        master = table.pop(tensor)
        value = full.get(tensor) if master is None else full.get(tensor, master.tensor.detach())
        if value is not None:
            grad = tensor.grad if master is None or tensor.grad is not None else master.tensor.grad
            tensor.grad = None
            tensor.data = value
            tensor.grad = None if grad is None else grad.to(value.dtype)
    _release(models, optimizers)


def _supersede(
    params: Sequence[torch.Tensor], optimizers: Sequence[Any], properties: Properties
) -> None:
    """Mark optimizers that are not passed again with their models, where masters are involved."""
    given = set(map(id, optimizers))
    for other in _optimizers_with(params):
        record = state_of(other)
        if record is not None and id(other) not in given:
            record.superseded |= record.use_masters or bool(properties.master_weights)


@torch.inference_mode(False)  # else weights that were given back could not be trained
def _release(models: Iterable[Any], optimizers: Sequence[Any]) -> None:
    """Make plain torch again of what amp has changed; leave anything else alone."""
    listed = [model for model in models if isinstance(model, torch.nn.Module)]
    others = _optimizers_with([param for model in listed for param in model.parameters()])
    stepped = [(o, _halves_of(o)) for o in (*optimizers, *others)]
    for optimizer in optimizers:
        record = state_of(optimizer)
        if record is not None:
            record.detach()
    for model in listed:
        modules.undo(model)
    for optimizer, weights in stepped:
        _retype_state(optimizer, weights)


def _optimizers_with(weights: Iterable[torch.Tensor]) -> list[Any]:
    """The managed optimizers that step one of ``weights``."""
    ids = set(map(id, weights))
    found = [state for state in managed_states() if not state.params.ids.isdisjoint(ids)]
    return [one for state in found if (one := state.optimizer()) is not None]


def _halves_of(optimizer: Any) -> list[torch.Tensor]:
    """The weights that amp has cast to 16 bits and ``optimizer`` steps itself, without masters."""
    record = state_of(optimizer)
    if record is None or record.training.properties.cast_model_type not in HALF_TYPES:
        return []
    return [param for param in record.params.in_groups() if param.dtype in HALF_TYPES]


def _retype_state(optimizer: Any, params: Iterable[Any]) -> None:
    """Bring the state of ``params`` to the dtype that they have now, be it wider or narrower.

    Numbers that an optimizer keeps beside its tensors, a step count among them, stay as they are.
    Those of :mod:`apex.optimizers` say themselves which dtype a moment has.
    """
    inner = getattr(optimizer, "optim", optimizer)  # LARC's
    slots, slot_dtype = getattr(inner, "slots", ()), getattr(inner, "_slot_dtype", None)
    for param in params:
        entries = optimizer.state.get(param)
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if slot_dtype is not None:
                if name in slots:
                    entries[name] = _retyped(value, slot_dtype(name, param))
            elif isinstance(value, list):  # L-BFGS keeps its history so
                entries[name] = [_retyped(item, param.dtype) for item in value]
            elif isinstance(value, torch.Tensor) and value.dim() > 0:
                entries[name] = _retyped(value, param.dtype)


def _retyped(value: Any, dtype: torch.dtype) -> Any:
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def _disable(models: Any, optimizers: Any, verbosity: int) -> Any:
    switches.refuse_users_block("amp.initialize", switches_on=False)
    switches.disable_for_thread()
    newest.verbosity = verbosity
    newest.opt_properties = Properties()
    listed = [x if isinstance(x, (list, tuple)) else [x] for x in (models, optimizers)]
    with lock:
        _release(map(checks.inner, listed[0]), listed[1])
        for optimizer in listed[1]:
            with contextlib.suppress(TypeError):  # anything may be passed here
                disabled.add(optimizer)
        training = getattr(newest, "training", None)
        if training is not None and training.is_over():
            newest.show(alive())
    return models if optimizers is None else (models, optimizers)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Give back at the end what ``initialize`` changes apart from models and optimizers.

    For `apex.debug.what_if`, which initialises copies of a model that is to stay plain torch. That
    is this thread's autocast state, what ``_amp_state`` shows, and functions and kernels of the
    process. Inside, no casts are on before the first ``initialize``. Kernels and wrapped functions
    stay if there were any before, because another training may use them.
    """
    thread, shown = {**vars(switches.thread)}, {**vars(newest)}
    had_kernels, had_wrappers = dispatcher.installed(), rules.wraps()
    vars(switches.thread).clear()
    switches.thread.__init__()  # type: ignore[misc]  # as in a new thread
    try:
        with cpu_float16.left_out():  # its kernels would stay
            yield
    finally:
        switches.disable_for_thread()
        vars(switches.thread).clear()
        vars(switches.thread).update(thread)
        vars(newest).clear()
        vars(newest).update(shown)
        if not had_kernels:
            dispatcher.uninstall()
        if not had_wrappers:
            rules.restore()


def reset() -> None:
    """Undo everything amp has done in this process.

    Models get their float32 weights back and lose amp's hooks. Optimizers get their methods and
    parameters back. ``reset`` switches off this thread's casts, removes function wrappers and drops
    pending registrations. Weights and optimizer state keep their values.

    Raises:
        RuntimeError: Casts are on (O1, O4, ``init``), and you called this inside a block of
            ``torch.autocast`` or ``torch.inference_mode`` whose end would switch them on again.
    """
    switches.refuse_users_block("amp.reset", switches_on=False)
    switches.disable_for_thread()
    with lock:
        _release(list(modules.prepared), list(managed))
        rules.restore()
        dispatcher.uninstall()
        cpu_float16.switch(on=False)
        distributed_checkpoint.uninstall()
        collectives.uninstall()
    disabled.clear()
    for registry in rules.REGISTRIES:
        registry.clear()
    newest.forget()
    newest.verbosity = 1
