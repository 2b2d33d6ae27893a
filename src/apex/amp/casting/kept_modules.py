"""Modules that a policy keeps in float32, inside of a model that computes in 16 bits.

Hooks on the named modules switch the function casts off (O1, O4) and cast what goes in; at O2 and
O5, where their weights are left in float32, what comes out is cast to the 16 bits of what is
around. A name inside of a kept module may put its module back to the level's 16 bits.

The file of a policy, which ``what_if`` writes, is JSON::

    {
      "apex_precision_policy": 1,
      "formats": {
        "float16": {"loss_scale": 8192.0, "modules": {"blocks.7.attn": "float32"}},
        "bfloat16": {"modules": {}},
        "e4m3": {"modules": {"head": "bfloat16"}}
      }
    }

A module is named as in ``model.named_modules()``, without the parts that ``torch.compile`` and
parallel wrappers add. What is inside of it is meant too, except for what has a name of its own: the
innermost name counts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from apex.amp import _speech
from apex.amp.casting import switches
from apex.amp.casting.containers import Caster, Walker
from apex.amp.casting.dispatcher import skip_frames
from apex.amp.casting.switches import Casts
from apex.amp.levels import Properties

Kept = dict[str, torch.dtype]  # a module's name -> what it computes in
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
MARK, VERSION = "apex_precision_policy", 1
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


def read(
    policy: Any, models: Sequence[torch.nn.Module], properties: Properties, *, verbose: bool = False
) -> list[Kept]:
    """What each model's policy keeps at the level, checked; it is logged if ``verbose``.

    Raises:
        RuntimeError: The level has no policy.
        TypeError: ``policy`` is of another type.
        ValueError: It is no policy for these models, or has nothing about the level's 16 bits.
    """
    if policy is None:
        return [{} for _ in models]
    if properties.opt_level not in ("O1", "O2", "O4", "O5") or not properties.casts_anything:
        raise RuntimeError(
            f"amp.initialize: policy has no effect at {properties.opt_level}. Use O1, O2, O4 or O5 "
            "with a 16-bit type, or leave policy out."
        )
    listed = policy if isinstance(policy, (list, tuple)) else [policy]
    if len(listed) != len(models):
        raise ValueError(
            f"amp.initialize: policy had {len(listed)} entries for {len(models)} models. Pass a "
            "list with one entry for each model, and None for a model without a policy."
        )
    sections = [None if one is None else _sections(one) for one in listed]
    kept = [
        {} if formats is None else _of_model(formats, model, properties)
        for formats, model in zip(sections, models, strict=True)
    ]
    if verbose:
        _log(kept, {name for formats in sections for name in formats or ()}, properties)
    return kept


def _sections(policy: Any) -> dict[str, Any]:
    """The sections of a policy, by format.

    Args:
        policy: A path, or what such a file has in it.

    Raises:
        TypeError: It is neither.
        ValueError: It is no policy, or of another version.
    """
    if isinstance(policy, (str, os.PathLike)):
        shown, text = f"policy {os.fspath(policy)!r}", Path(policy).read_text(encoding="utf-8")
        try:
            policy = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"amp.initialize: {shown} is not JSON ({error}).") from None
    else:
        shown = "policy"
    if not isinstance(policy, Mapping):
        raise TypeError(
            f"amp.initialize: {shown} was a {type(policy).__name__}; it must be the path of a file "
            "that apex what-if --save wrote, or its contents. For several models pass a list of "
            "these."
        )
    formats: Any = policy.get("formats")
    fault = ""
    sections = formats.values() if isinstance(formats, Mapping) else [None]
    if policy.get(MARK) != VERSION:
        fault = f"has {MARK}={policy.get(MARK)!r}; this apex reads {VERSION}"
    elif not all(
        isinstance(x, Mapping) and isinstance(x.get("modules"), Mapping) for x in sections
    ):
        fault = "has no 'formats' whose entries have 'modules'"
    if fault:
        raise ValueError(
            f"amp.initialize: {shown} {fault}. Write it with apex what-if --save, or "
            "apex.debug.what_if(...).save(path)."
        )
    return dict(formats)


def saved(kept: Sequence[Kept]) -> list[dict[str, str]] | None:
    """The policies of the models as plain values, for a checkpoint; None if they keep nothing."""
    return [_plain(one) for one in kept] if any(kept) else None


def _plain(kept: Kept) -> dict[str, str]:
    return {name: str(dtype).removeprefix("torch.") for name, dtype in kept.items()}


def _log(kept: Sequence[Kept], formats: set[str], properties: Properties) -> None:
    own = _NAMES[properties.half_dtype]
    names = [f"{name}={dtype}" for one in kept for name, dtype in _plain(one).items()]
    others = ", ".join(sorted(formats - {own}))
    note = f" (unused, because the level computes in {own}: {others})" if others else ""
    _speech.say(f"policy                 : {', '.join(names) or f'all in {own}'}{note}")


def _of_model(formats: dict[str, Any], model: torch.nn.Module, properties: Properties) -> Kept:
    own = _NAMES[properties.half_dtype]
    if own not in formats:
        raise ValueError(
            f"amp.initialize: the policy has no entries for {own}, in which {properties.opt_level} "
            f"computes; it has {', '.join(formats) or 'nothing'}. Run apex what-if with --formats "
            f"{own}."
        )
    known = by_name(model)
    entries: Mapping[str, Any] = formats[own]["modules"]
    unknown = [name for name in entries if not name or name not in known]
    if unknown:
        raise ValueError(
            f"amp.initialize: the policy names {', '.join(map(repr, unknown))}, which the "
            f"{type(model).__name__} does not have. Allowed are the names of named_modules(), "
            "without the model itself. Run apex what-if on this model."
        )
    allowed = {"float32": torch.float32, own: properties.half_dtype}
    for name, value in entries.items():
        parent = name.rpartition(".")[0]
        if isinstance(known[parent], torch.nn.MultiheadAttention):
            raise ValueError(
                f"amp.initialize: the policy names {name!r}, which is never called, because its "
                f"parent reads its weights. Name {parent!r}."
            )
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(
                f"amp.initialize: the policy has {value!r} for {name!r} under {own}; allowed are "
                f"'float32' and '{own}'."
            )
        if isinstance(known[name], torch.jit.ScriptModule):
            raise ValueError(
                f"amp.initialize: the policy names {name!r}, a TorchScript module, on which amp "
                "cannot set hooks. Name a module around it, or pass the module before "
                "torch.jit.script."
            )
        shared = shared_tensor(model, known[name])
        if shared is not None:
            raise ValueError(
                f"amp.initialize: the policy names {name!r}, which shares a weight or a buffer "
                f"with '{shared}', and amp cannot both cast a tensor and keep it in float32. Leave "
                f"{name!r} out of the policy, or name a module that contains both."
            )
    _refuse_two_types(model, {name: allowed[entries[name]] for name in entries})
    return {name: allowed[value] for name, value in entries.items()}


def named_modules(model: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules by all of their names, without what wrappers add; a wrapper before what it wraps."""
    yield name, model
    for part, child in model._modules.items():
        if child is None:
            continue
        is_inner = part == "_orig_mod" or (part == "module" and type(model).__name__ in _WRAPPERS)
        below = name if is_inner else f"{name}.{part}" if name else part
        yield from named_modules(child, below)


def by_name(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The module of each name: a wrapper, not what it wraps."""
    return dict([*named_modules(model)][::-1])


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights and buffers of a module, without those of its parts."""
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def shared_tensor(model: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """The name of a weight or buffer of ``module`` that a part of ``model`` outside has too."""
    inside = {id(one): one for one in module.modules()}
    own = {id(tensor) for one in inside.values() for tensor in own_tensors(one).values()}
    for name, one in named_modules(model):
        for key, tensor in own_tensors(one).items() if id(one) not in inside else ():
            if id(tensor) in own:
                return f"{name}.{key}" if name else key
    return None


def types_of(model: torch.nn.Module, kept: Kept) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Each module by each of its names, and what the innermost name says of it; None if none."""
    for name, module in named_modules(model):
        parts = name.split(".")
        fronts = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        yield name, module, next((kept[one] for one in fronts if one in kept), None)


def _refuse_two_types(model: torch.nn.Module, kept: Kept) -> None:
    """Raise if a module has two names, of which a policy says different things."""
    half = [one for one in kept.values() if one != torch.float32]
    seen: dict[int, tuple[str, Any]] = {}
    for name, module, dtype in types_of(model, kept):
        dtype = None if dtype in half else dtype  # the level's own
        other, before = seen.setdefault(id(module), (name, dtype))
        if before != dtype:
            raise ValueError(
                f"amp.initialize: the policy has different entries for '{other}' and '{name}', "
                "which are the same module. Name both, or neither."
            )


class Calls:
    """Which of the named modules were called; plain values, so that models can be copied."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self.model, self.missing = type(model).__name__, set(names)

    def check(self) -> None:
        """Raise if one was not, after the model's first forward."""
        if self.missing:
            names = ", ".join(map(repr, sorted(self.missing)))
            self.missing = set()
            raise RuntimeError(
                f"amp: the policy names {names}, which the first forward of {self.model} did not "
                "call. A module whose weights its parent reads, or whose forward is called without "
                "its hooks, cannot be kept in float32; name the parent. A module that only some "
                "forwards call cannot be kept in float32 either."
            )


class EnterKept:
    """Forward pre-hook of a named module: cast its inputs, then switch function casts."""

    def __init__(self, name: str, calls: Calls, dtype: torch.dtype, casts: Casts | None) -> None:
        self.name, self.calls = name, calls
        self.dtype = dtype
        self.casts = casts if dtype != torch.float32 else None
        self.switches = casts is not None

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note the call, and return its arguments cast."""
        self.calls.missing.discard(self.name)
        if not self.switches or self.dtype == torch.float32:
            walk = Walker(Caster(self.dtype), is_traced=torch.compiler.is_compiling())
            args = tuple([walk(value) for value in args])
            kwargs = {name: walk(value) for name, value in kwargs.items()}
        if self.switches:
            frame = None if torch.compiler.is_compiling() else sys._getframe(1)
            devices = switches.device_types() if self.casts is not None else ()
            switches.begin_forward(self, self.casts, devices, frame)
        return args, kwargs


class LeaveKept:
    """Forward hook, called in any case: switch back, and cast the outputs to what is around."""

    def __init__(self, enter: EnterKept, around: torch.dtype | None) -> None:
        self.enter, self.around = enter, around

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Return the output, cast."""
        if self.enter.switches:
            switches.end_forward(self.enter)
        if self.around is None:
            return output
        return Walker(Caster(self.around), is_traced=torch.compiler.is_compiling())(output)


skip_frames(EnterKept.__call__, LeaveKept.__call__)


def install(model: torch.nn.Module, kept: Kept, casts: Casts | None, half: torch.dtype) -> Calls:
    """Put hooks on the modules in ``kept``; return what knows whether they were called."""
    calls = Calls(model, list(kept))
    types = {name: dtype for name, _, dtype in types_of(model, kept)}
    modules = by_name(model)
    for name in kept:
        around = types[name.rpartition(".")[0]] or half
        is_plain = casts is not None and around != torch.float32  # there functions cast
        enter = EnterKept(name, calls, kept[name], casts)
        leave = LeaveKept(enter, None if is_plain else around)
        modules[name].register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        modules[name].register_forward_hook(leave, always_call=True)
    return calls


def weights_stay(model: torch.nn.Module, kept: Kept) -> set[int]:
    """The ids of the modules whose weights are not cast to the level's 16 bits."""
    return {id(module) for _, module, dtype in types_of(model, kept) if dtype == torch.float32}
