"""What fused optimizers refuse, and the words for it.

All checks of a step run before anything changes. They are functions, of an optimizer or of its
name; what subclasses add to is a method of the class that calls one of these.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import required

from apex.ops import _runtime
from apex.ops.lists.placements import is_partial
from apex.ops.lists.quantized import absmax_shape
from apex.ops.lists.tensor_lists import (
    TensorList,
    are_contiguous,
    are_real_and_strided,
    local_parts,
    refuse_nested,
)
from apex.optimizers._eight_bit import absmax_of, check_placement

HALF = (torch.float16, torch.bfloat16)
_AT_LEAST_0 = ("lr", "eps", "weight_decay", "momentum", "max_grad_norm", "step")
_NAMES = {"lr": "learning rate", "eps": "epsilon value"}
_SPELLED = {"learning_rate": "lr"}  # as other libraries spell it
_SHAPE, _DTYPE, _GET_DEVICE = attrgetter("shape"), attrgetter("dtype"), torch.Tensor.get_device


# -- arguments and groups --------------------------------------------------------------------------


def choice(user: str, name: str, given: object, allowed: Iterable[object]) -> None:
    """Raise ``ValueError`` for a value that is not among the allowed ones."""
    if given not in allowed:
        raise ValueError(
            f"{user}: {name} was {given!r}; allowed are {', '.join(map(repr, allowed))}."
        )


def arguments(optimizer: Any) -> dict[str, Any]:
    """The constructor's arguments that hold for all groups; each is an attribute."""
    names: set[str] = set()
    for kind in type(optimizer).__mro__:
        if "__init__" in vars(kind):
            parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
            if "defaults" in parameters:  # a base
                break
            names |= {*parameters}
    names -= {"self", "params", "step", *optimizer.defaults}
    found = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    return found | ({"state": optimizer._state_form} if "state" in found else {})


def keys(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a key that would be expected to change what is computed.

    Programs keep what they like in groups (timm's ``lr_scale``, Megatron's ``wd_mult``, a name).
    torch's ``ZeroRedundancyOptimizer`` puts the constructor's arguments there.
    """
    user = optimizer._name
    numbers, arguments = {*optimizer.defaults, "step"}, optimizer._arguments()
    for key, value in group.items():
        if key in numbers or key in ("params", "param_names"):
            continue
        if key in arguments:
            if value != arguments[key]:
                raise ValueError(
                    f"{user}: a group has {key}={value!r}, and the optimizer "
                    f"{key}={arguments[key]!r}, which applies to all groups. Pass it to the "
                    "constructor; for different values make several optimizers."
                )
        elif key in optimizer._refused_keys:
            if value:
                raise ValueError(
                    f"{user}: a group has {key}={value!r}, which this optimizer does not "
                    "support. Leave it out."
                )
        elif meant := _meant(key, {*numbers, *arguments}):
            raise ValueError(
                f"{user}: a group has the unknown key {key!r}. Write {meant!r}, or rename the key "
                "if it is your own."
            )


def _meant(key: str, known: Collection[str]) -> str | None:
    """What is probably meant by a misspelt key; not what ``no_weight_decay`` contains."""
    written = key.lower()
    near = [name for name in known if abs(len(name) - len(key)) <= 1]
    close = difflib.get_close_matches(_SPELLED.get(written, written), near, n=1, cutoff=0.85)
    return close[0] if close else _SPELLED.get(written)


def complete(optimizer: Any) -> None:
    """Raise ``KeyError`` if a group lacks one of its numbers."""
    wanted = optimizer.defaults.keys()
    for number, group in enumerate(optimizer.param_groups):
        for key in wanted - group.keys() - {"differentiable"}:  # which torch adds in loading
            raise KeyError(
                f"{optimizer._name}: group {number} has no {key!r} any more. Put it back; its "
                f"default is {optimizer.defaults[key]!r}."
            )


def numbers(user: str, group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a number of a group that is out of range."""
    for key in _AT_LEAST_0:
        value = group.get(key, 0.0)
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"{user}: {key} was a tensor of shape {tuple(value.shape)}; it must "
                    "have one element."
                )
            if value.is_meta:
                continue
            value = value.item()
        if value is not required and not (isinstance(value, Real) and float(value) >= 0):
            raise ValueError(
                f"Invalid {_NAMES.get(key, key + ' value')}: {value}. "
                f"{user} needs a number of at least 0."
            )
    given = group.get("betas", (0.0, 0.0))
    betas = tuple(given) if isinstance(given, Iterable) else (given,)
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas}. {user} needs two, 0 <= beta < 1.")
    for number, beta in enumerate(betas):
        if not (isinstance(beta, Real | torch.Tensor) and 0.0 <= float(beta) < 1.0):
            raise ValueError(
                f"Invalid beta parameter at index {number}: {beta}. {user} needs 0 <= beta < 1."
            )


# -- parameters ------------------------------------------------------------------------------------


def tensors_of(user: str, params: Any) -> list[torch.Tensor]:
    """The tensors among parameters (maybe with names); ``TypeError`` if one is nested."""
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    pairs = (isinstance(entry, tuple) and len(entry) == 2 for entry in listed)
    every = [x[1] if is_pair else x for x, is_pair in zip(listed, pairs, strict=True)]
    tensors = [x for x in every if isinstance(x, torch.Tensor)]  # torch's own error says others
    refuse_nested(f"{user}: parameter", tensors)
    return tensors


def params(optimizer: Any, given: Any) -> None:
    """Raise for a tensor (maybe with its name) that cannot be stepped."""
    user = optimizer._name
    for tensor in tensors_of(user, given):
        if tensor.dtype not in (*HALF, torch.float32, torch.float64):
            raise RuntimeError(
                f"{user} only support fp16 and fp32 (and bf16, fp64); a parameter has "
                f"{tensor.dtype}."
            )
        if tensor.is_neg():
            raise RuntimeError(
                f"{user}: a parameter is a negative view (is_neg()), whose memory has the opposite "
                "sign. Make the parameter from `data.resolve_neg()`."
            )
        stored(optimizer, [tensor])
        if optimizer._state_form == "8bit":
            check_placement(user, tensor)
        if is_partial(tensor):
            raise RuntimeError(
                f"{user}: a parameter is a DTensor whose ranks hold terms of a sum (Partial). Call "
                "redistribute(placements=...) first, and make the parameter from the result."
            )


def stored(optimizer: Any, given: Sequence[torch.Tensor]) -> None:
    """Raise ``RuntimeError`` for a parameter that the storage does not keep."""
    if optimizer.storage == "plain":
        return
    if optimizer.storage == "auto":  # refused is what has lost the weight of its low bits
        given = [p for p in given if "low_bits" in optimizer.state.get(p, ())]
    if others := {*map(_DTYPE, given)} - {torch.bfloat16}:
        raise RuntimeError(
            f"{optimizer._name}: storage={optimizer.storage!r} keeps bfloat16 weights; a parameter "
            f"has {others.pop()}. Convert the model with .bfloat16() first; if you converted the "
            "model after making the optimizer, make a new optimizer and load the state of this one "
            "into it."
        )


# -- a step ----------------------------------------------------------------------------------------


def step_arguments(user: str, given: Mapping[str, Any], hint: str) -> None:
    """Raise ``RuntimeError`` if arguments that ``step`` no longer takes were passed."""
    passed = [name for name, value in given.items() if value is not None]
    if passed:
        raise RuntimeError(
            f"{user} has been updated. Simply initialize it identically to "
            f"torch.optim's, and call step() with no arguments; {', '.join(passed)} was passed."
            f"{hint}"
        )


def gradients(user: str, found: Sequence[torch.Tensor]) -> None:
    """Raise ``RuntimeError`` if a gradient is not dense and real."""
    for grad in () if are_real_and_strided([found]) else found:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{user} does not support sparse gradients, please consider SparseAdam "
                "instead (torch.optim.SparseAdam or torch.optim.SGD)."
            )
        if grad.is_complex():
            raise RuntimeError(f"{user} does not support complex gradients.")


def made_in_capture(user: str, name: str) -> None:
    """Raise ``RuntimeError`` if state that is made now would be made anew at each replay."""
    if _runtime.capturing():
        raise RuntimeError(
            f'{user}: a parameter has no "{name}" yet. A CUDA graph captured now would create it '
            "anew at each replay. Make a step before capturing."
        )


def written_in_capture(user: str, name: str | None) -> None:
    """Raise ``RuntimeError`` if state that follows a weight would be reset at each replay."""
    if _runtime.capturing():
        raise RuntimeError(
            f"{user}: the program wrote to a weight after the last step. A CUDA graph captured now "
            f'would reset its "{name}" at each replay. Make a step before capturing.'
        )


def absmax(
    optimizer: Any,
    stepped: Sequence[torch.Tensor],
    columns: Sequence[TensorList],
    slots: Sequence[str],
) -> None:
    """Raise ``RuntimeError`` if what belongs to codes does not fit; as :func:`places`."""
    for slot, column in zip(slots, columns, strict=True):
        if torch.uint8 not in {*map(_DTYPE, column)}:
            continue
        name = absmax_of(slot)
        pairs = [(p, x) for p, x in zip(stepped, column, strict=True) if x.dtype == torch.uint8]
        codes = [x for _, x in pairs]  # instead of what is missing, which then does not fit
        parts = local_parts([optimizer.state[param].get(name, x) for param, x in pairs])
        if not (
            [*map(_SHAPE, parts)] == [*map(absmax_shape, map(_SHAPE, codes))]
            and [*map(_GET_DEVICE, parts)] == [*map(_GET_DEVICE, codes)]
            and {*map(_DTYPE, parts)} == {torch.float32}
            and are_contiguous([parts], [])
        ):
            raise RuntimeError(
                f'{optimizer._name}: the "{name}" of a parameter does not fit its codes. Clear '
                "its entry in optimizer.state, or load the state as it was saved."
            )


def places(
    optimizer: Any,
    stepped: Sequence[torch.Tensor],
    columns: Sequence[Sequence[torch.Tensor]],
    extra: Sequence[torch.Tensor | None] | None,
    slots: Sequence[str],
) -> None:
    """Raise if what is stepped together does not fit, or is on different devices.

    Kernels take addresses: they would write beyond, or into what is not theirs. The number of
    elements is not enough: after ``param.data = param.data.t().contiguous()`` an element would meet
    another one's gradient and state.

    Args:
        optimizer: Whose.
        stepped: The parameters; local parts of distributed ones.
        columns: Gradients, weights and slots.
        extra: What is stored in addition to each weight.
        slots: Names of the slots.

    Raises:
        RuntimeError: Something does not fit; the message names it.
    """
    shapes = [*map(_SHAPE, stepped)]
    devices = [*map(_GET_DEVICE, stepped)] if _runtime.has_accelerator() else []
    names = ["gradient", "master", *slots]
    if extra is not None:
        names.append("state beside it")
        filled = [param if x is None else x for x, param in zip(extra, stepped, strict=True)]
        columns = [*columns, filled]
    for name, column in zip(names, columns, strict=True):
        if column is stepped:
            continue
        shape_of, wanted = optimizer.slot_shapes.get(name), shapes
        if shape_of is not None:
            wanted = [*map(torch.Size, map(shape_of, stepped))]
        fits = [*map(_SHAPE, column)] == wanted
        is_near = not column or column[0].device == stepped[0].device
        if fits and is_near and (not devices or [*map(_GET_DEVICE, column)] == devices):
            continue
        for param, tensor, shape in zip(stepped, column, wanted, strict=True):
            if tensor.device != param.device or tensor.shape != shape:
                raise RuntimeError(
                    f"{optimizer._name}: the {name} of a parameter has shape {tuple(tensor.shape)} "
                    f"on {tensor.device}; this parameter needs {tuple(shape)} on {param.device}. "
                    "Move a model before making its optimizer. After assigning other data to a "
                    "parameter, clear its gradient and its entry in optimizer.state."
                )
