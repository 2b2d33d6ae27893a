"""What ``initialize`` asks of its arguments, before it changes anything."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from apex.amp import _speech
from apex.amp.casting import models as modules
from apex.amp.gradients import forwards
from apex.amp.gradients.masters import has_version, table
from apex.amp.levels import HALF_TYPES, Properties, opt_levels
from apex.amp.newest import newest, warn_or_err


def options(opt_level: str, overrides: dict[str, Any], verbose: bool) -> Properties:
    """The level's options with the overrides that are not ``None``, each checked."""
    level = opt_levels.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        names = ", ".join(f"'{name}'" for name in sorted(opt_levels))
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are {names}. Note that in "
            "`O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    properties = level(Properties())
    lines = [f"Selected optimization level {level.brief}"]
    lines += ["Defaults for this optimization level are:", *_option_lines(properties)]
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    lines += ["Processing user overrides (additional kwargs that are not None)..."]
    lines += ["After processing overrides, optimization options are:", *_option_lines(properties)]
    if verbose:
        _speech.say("\n".join(lines))
    return properties


def _option_lines(properties: Properties) -> list[str]:
    return [f"{name:22} : {value}" for name, value in properties.options.items()]


def optimizer_list(optimizers: Any, call: str = "amp.initialize") -> list[Any]:
    """The optimizers as a list, each checked; ``call`` is who was given them."""
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if optimizers is None:
        return []
    for optimizer in listed:
        name = type(optimizer).__name__
        if name in ("FP16_Optimizer", "OptimWrapper"):
            raise RuntimeError(
                f"{call}: an {name} scales losses itself. Pass the optimizer that it wraps."
            )
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            raise RuntimeError(
                f"{call}: {name} keeps gradients and masters itself. Use it with "
                "apex.amp.GradScaler and torch.autocast, or a model in 16 bits."
            )
        needed = ("param_groups", "state", "step", "zero_grad", "add_param_group", "__dict__")
        if isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in needed):
            raise TypeError(
                f"{call}: optimizers was or held a {name}; it must be a single optimizer or a list "
                "or tuple of optimizers, without __slots__."
            )
        check_groups(optimizer, call=call)
    if len({id(optimizer) for optimizer in listed}) != len(listed):
        raise ValueError(f"{call}: the same optimizer was passed twice in optimizers.")
    return listed


def check_groups(
    optimizer: Any, added: Sequence[dict[str, Any]] = (), call: str = "amp.initialize"
) -> None:
    """Refuse groups that amp cannot step, or that have a weight twice, as itself or its master.

    ``added`` are groups that the optimizer is about to get as well, as ``add_param_group`` takes
    them. ``call`` is who was given them.
    """
    seen: set[int] = set()
    name = type(optimizer).__name__
    for group in (*optimizer.param_groups, *added):
        params = group.get("params") if isinstance(group, dict) else None
        if isinstance(params, torch.Tensor):
            params = [params]
        elif isinstance(params, Iterable) and not isinstance(params, (list, tuple, set)):
            params = group["params"] = list(params)  # a generator is read once
        for item in params if isinstance(params, Iterable) else (None,):
            param = item[-1] if isinstance(item, tuple) else item  # a name beside it
            if not isinstance(param, torch.Tensor):
                raise TypeError(
                    f"{call}: 'params' in a group of the {name} was or held a "
                    f"{type(item).__name__}; a group must be a dict whose 'params' are tensors."
                )
            if not has_version(param):
                raise RuntimeError(
                    f"{call}: a weight of shape {tuple(param.shape)} in the {name} was created in "
                    "torch.inference_mode, so it cannot be trained. Create the model outside of "
                    "it."
                )
            weight = weight_of(param)
            if id(weight) in seen:
                raise ValueError(
                    f"{call}: some parameters appear in more than one parameter group, or twice in "
                    f"one. One is a weight of shape {tuple(param.shape)} of the {name}, or its "
                    "float32 master. Pass each weight once."
                )
            seen.add(id(weight))


def refuse_inference_mode() -> None:
    """Raise under ``torch.inference_mode``: what ``initialize`` makes is to be trained."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "amp.initialize was called under torch.inference_mode(), in which apex cannot create "
            "trainable weights and masters. Call it before that block."
        )


def refuse_unfused(optimizers: Sequence[Any]) -> None:
    """Raise if an optimizer cannot step on scaled gradients, for ``fused_step=True``."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "step_scaled"):
            raise RuntimeError(
                f"amp.initialize: fused_step=True was given with {type(optimizer).__name__}, which "
                "cannot step on scaled gradients. Use an optimizer of apex.optimizers, or leave "
                "fused_step out."
            )


def group_of_several(user: str, group: Any) -> Any:
    """``process_group`` checked; ``None`` for a group of one rank, which decides alone."""
    if group is None:
        return None
    kind: Any = getattr(torch.distributed, "ProcessGroup", ())
    if not isinstance(group, kind):
        raise TypeError(
            f"{user}: process_group was {group!r}; it must be a torch.distributed.ProcessGroup "
            "that contains this rank. Pass the group that torch.distributed.new_group(ranks) "
            "returned on these ranks (on other ranks it returns -100; pass None on those), or "
            "mesh.get_group(name) of a DeviceMesh."
        )
    return group if torch.distributed.get_world_size(group) > 1 else None


def model_list(models: Any) -> list[torch.nn.Module]:
    """The models as a list, each checked."""
    listed = models if isinstance(models, list) else [models]
    for model in listed:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                "amp.initialize: models was or held a TorchScript module, on which amp cannot set "
                "hooks. Pass the module it was made from, and call torch.jit.trace afterwards."
            )
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"amp.initialize: models was or held a {type(model).__name__}; it must be a "
                "torch.nn.Module or a list of them."
            )
    return listed


def unwrapped(model: torch.nn.Module, properties: Properties) -> torch.nn.Module:
    """The module whose forward is to compute at the level, without a parallel wrapper."""
    ddp = getattr(torch.nn.parallel, "DistributedDataParallel", ())
    casts_model = properties.cast_model_type in HALF_TYPES
    if casts_model and any(isinstance(module, ddp) for module in model.modules()):
        raise RuntimeError(
            "amp.initialize: a model, or a part of it, is wrapped in DistributedDataParallel "
            f"already. {properties.opt_level} casts its parameters, and the wrapper would keep the "
            "old ones. Wrap the model after amp.initialize."
        )
    module: torch.nn.Module = inner(model)
    return module


def inner(model: Any) -> Any:
    """What a parallel wrapper holds; anything else itself."""
    parallel = isinstance(model, torch.nn.DataParallel) or forwards.is_wrapper(model)
    return model.module if parallel else model


def refuse_copies(models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> None:
    """Refuse an optimizer of another copy of a model: the model would not train.

    It has none of the models' weights, but tensors of the same shapes as the trainable weights of
    one that no optimizer of the call has. Other tensors, such as a loss's, may well be alone.
    """
    stepped = [
        [weight_of(param) for group in optimizer.param_groups for param in group["params"]]
        for optimizer in optimizers
    ]
    known = {id(param) for model in models for param in model.parameters()}
    ids = {id(weight) for weights in stepped for weight in weights}
    for optimizer, weights in zip(optimizers, stepped, strict=True):
        if not weights or any(id(weight) in known for weight in weights):
            continue
        for model in models:
            own = [p for p in model.parameters() if p.requires_grad]
            if any(map(torch.nn.parameter.is_lazy, own)) or not ids.isdisjoint(map(id, own)):
                continue
            if [p.shape for p in own] == [weight.shape for weight in weights]:
                raise ValueError(
                    f"amp.initialize: the {type(optimizer).__name__} has none of the models' "
                    "weights, although its parameters have the same shapes as those of the "
                    f"{type(model).__name__}. They belong to another copy, or are copied masters. "
                    "Make an optimizer of this model's parameters(), and load the old optimizer's "
                    "state with load_state_dict()."
                )


def weight_of(param: torch.Tensor) -> torch.Tensor:
    """The weight whose master ``param`` is, or itself."""
    weight = None if isinstance(param, torch.nn.Parameter) else table.weight_of(param)
    return param if weight is None else weight


def check_dtypes(models: Sequence[torch.nn.Module], properties: Properties) -> None:
    """Refuse weights that the level cannot use, by name."""
    if newest.allow_incoming_model_not_fp32:
        return
    casts_model = properties.cast_model_type in HALF_TYPES
    for model in models:
        if modules.record_of(model) is not None:  # by an earlier initialize, which is undone first
            continue
        parameters = [("parameter", *item) for item in model.named_parameters()]
        for kind, name, tensor in [*parameters, *(("buffer", *x) for x in model.named_buffers())]:
            if casts_model and torch.nn.parameter.is_lazy(tensor):
                raise RuntimeError(
                    f"amp.initialize: {kind} '{name}' has no shape yet (a lazy module). Run one "
                    "forward before initialize."
                )
            if tensor.dtype in HALF_TYPES and not casts_model:
                warn_or_err(
                    f"amp.initialize: found {kind} '{name}' of {tensor.dtype}; at "
                    f"{properties.opt_level} weights are float32. Remove the .half() or "
                    ".bfloat16() call: amp casts where the level needs it."
                )
            if tensor.dtype == torch.float64 and casts_model and kind == "parameter":
                warn_or_err(
                    f"amp.initialize: found parameter '{name}' of torch.float64; "
                    f"{properties.opt_level} would round it to {properties.cast_model_type}. "
                    "Call .float() on the model first, or use O0, O1 or O4."
                )
        if casts_model and any(p.dtype in HALF_TYPES for p in model.parameters()):
            warnings.warn(
                "amp.initialize: the model is in 16 bits already, so its float32 masters start "
                "from rounded weights. Remove the .half() or .bfloat16() call.",
                stacklevel=4,
            )


def refuse_sharded(
    models: Sequence[torch.nn.Module], properties: Properties, process_group: Any
) -> None:
    """Refuse to cast FSDP2's modules and sharded parameters, which keep records of their dtype.

    FSDP1 is refused with a dynamic scale too, unless ranks agree: its shards are no DTensors.
    """
    # If a program has such modules or parameters, it has imported their classes.
    module_ = sys.modules.get("torch.distributed.fsdp")
    first = getattr(module_, "FullyShardedDataParallel", ())
    casts_model = properties.cast_model_type in HALF_TYPES
    is_alone = properties.loss_scale == "dynamic" and (casts_model or process_group is None)
    if is_alone and any(isinstance(m, first) for model in models for m in model.modules()):
        raise RuntimeError(
            f"amp.initialize: a model is a FullyShardedDataParallel, and at {properties.opt_level} "
            "the loss scale is dynamic. Each rank would see only the overflows of its own shard. "
            "Use O4, or O1 with fully_shard (FSDP2) or "
            "process_group=torch.distributed.group.WORLD."
        )
    if not casts_model:
        return
    fsdp = getattr(module_, "FSDPModule", ())
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for model in models:
        found = [
            (f"module '{name}'" if name else "the model") + " is an FSDPModule"
            for name, module in model.named_modules()
            if isinstance(module, fsdp)
        ]
        found += [
            f"parameter '{name}' is a DTensor"
            for name, parameter in model.named_parameters()
            if isinstance(parameter, sharded)
        ]
        if found:
            dtype = properties.cast_model_type
            scale = ', loss_scale="dynamic"' if dtype == torch.float16 else ""
            raise RuntimeError(
                f"amp.initialize: {found[0]}, and {properties.opt_level} casts parameters, which "
                "sharding does not allow. Use O1 or O4. Or let FSDP2 cast (its shards are float32 "
                f"masters): fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, "
                "reduce_dtype=torch.float32)), then amp.initialize(model, optimizer, "
                f'opt_level="O0"{scale}).'
            )


def refuse_other_state(user: str, given: Any) -> None:
    """Raise ``ValueError`` unless ``given``, a GradScaler's state, is a dict and not amp's."""
    right = "it must be the dict that GradScaler.state_dict() returned"
    if not isinstance(given, Mapping):
        raise ValueError(f"{user} was given a {type(given).__name__}; {right}.")
    if "loss_scaler0" in given:
        raise ValueError(
            f"{user} was given what amp.state_dict() returned; {right}. To continue with the scale "
            "of amp, pass {**scaler.state_dict(), 'scale': saved['loss_scaler0']['loss_scale'], "
            "'_growth_tracker': saved['loss_scaler0']['unskipped']}."
        )
