"""The file that says which modules stay out of which format: `what_if` writes it, amp reads it.

It is JSON::

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

MARK, VERSION = "apex_precision_policy", 1
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


def read(policy: Any) -> dict[str, Any]:
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
            "that apex what-if --save has written, or what is in it; of several models a list."
        )
    if policy.get(MARK) != VERSION:
        raise ValueError(
            f"amp.initialize: {shown} has {MARK}={policy.get(MARK)!r}; this apex reads {VERSION}. "
            "Write it with apex what-if --save, or apex.debug.what_if(...).save(path)."
        )
    formats: Any = policy.get("formats")
    if not isinstance(formats, Mapping) or not all(
        isinstance(one, Mapping) and isinstance(one.get("modules"), Mapping)
        for one in formats.values()
    ):
        raise ValueError(
            f"amp.initialize: {shown} has no 'formats' whose entries have 'modules'. Write it with "
            "apex what-if --save, or apex.debug.what_if(...).save(path)."
        )
    return dict(formats)


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
