"""The file that shows a fault again: one operation with its inputs.

``save`` crops the inputs to what still shows the fault: the rows (dimension 0) around the first bad
element, where the operation allows that. The file is a dictionary of plain values and tensors, so
``torch.load(weights_only=True)`` reads it and nothing in it is executed. ``load`` takes only
operations of ``torch.ops.aten`` and refuses everything else.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from apex._compat.private import tree_map
from apex.debug.tensors import describe, is_bad, tensors_of
from apex.debug.tracing import written_by
from apex.debug.undisturbed import undisturbed

FORMAT = "apex.debug 1"
LIMIT = 10_000_000  # bytes of inputs
# Not: operations that read files, and those whose indices torch does not check.
_REFUSED = "load|from_file|set_|unsafe_index|unsafe_put|indices|resize|as_strided"
_NAME = re.compile(rf"aten\.(?!\w*(?:{_REFUSED}))[a-z0-9_]{{1,64}}\.[A-Za-z0-9_]{{1,64}}")
_FIELDS: dict[str, type] = {"args": list, "kwargs": dict, "operation": str, "report": dict}
_FIELDS |= {"random": torch.Tensor, "torch": str}
_PLAIN = (type(None), bool, int, float, str, torch.Tensor)
_TAGGED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class FileError(ValueError):
    """Raised for a file that is not one of :meth:`Report.save`, or that is damaged."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: object) -> str:
    """``text`` without control characters, which a file could send to a terminal."""
    return "".join(one if one.isprintable() else " " for one in str(text))


def save(path: Path, call: tuple[Any, Any, Any], report: dict[str, Any]) -> Path:
    """Write ``(operation, args, kwargs)`` and the report's fields; see the module's text."""
    operation, args, kwargs = call
    with undisturbed():  # a replay of an operation with random numbers draws some
        args, kwargs = _crop(operation, *tree_map(_on_cpu, (list(args), dict(kwargs))))
    size = sum(tensor.nbytes for tensor in tensors_of((args, kwargs)))
    if size > LIMIT:
        raise ValueError(
            f"apex.debug: the inputs of {operation} are {size / 1e6:.0f} MB and cannot be cropped "
            f"to {LIMIT / 1e6:.0f}; use a smaller batch"
        )
    entry = {
        "format": FORMAT,
        "operation": str(operation),
        "args": tree_map(_plain, args),
        "kwargs": tree_map(_plain, kwargs),
        "random": torch.get_rng_state(),
        "torch": str(torch.__version__),  # a class of its own, which weights_only refuses
        "report": report,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(entry, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of :func:`save`.

    Raises:
        FileError: It is of something else, or names what is no operation of torch.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch 2.14, about sparse tensors
            entry = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except Exception as error:  # noqa: BLE001  # of pickle, zip or torch
        first = str(error).strip().splitlines()[:1]
        raise FileError(f"{path}: not a file of apex.debug ({' '.join(first)[:120]})") from None
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        raise FileError(f"{path}: not a file of {FORMAT}")
    for name, kind in _FIELDS.items():
        if not isinstance(entry.get(name), kind):
            raise FileError(f"{path}: its field {name!r} is missing or is not a {kind.__name__}")
    if not _NAME.fullmatch(entry["operation"]) or _find(entry["operation"]) is None:
        raise FileError(f"{path}: {entry['operation']!r} is not an operation of torch.ops.aten")
    return entry


def run(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the operation of a loaded file; describe each result, see :func:`.tensors.describe`."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(entry["random"])
            args, kwargs = tree_map(_back, (entry["args"], entry["kwargs"]))
            return [describe(one) for one in _results(_find(entry["operation"]), args, kwargs)]
    except Exception as error:  # noqa: BLE001  # of any operation
        first = " ".join(str(error).strip().splitlines()[:1])
        raise FileError(f"{entry['operation']} cannot be run on a CPU: {first}") from None


def script(path: str | os.PathLike[str]) -> str:
    """A program of ten lines that shows the fault without apex."""
    return f"""\
import torch

saved = torch.load({str(path)!r}, weights_only=True)
plain = lambda x: getattr(torch, x[1:].split(".")[-1]) if str(x).startswith("!torch.") else x
args, kwargs = torch.utils._pytree.tree_map(plain, (saved["args"], saved["kwargs"]))
_, name, overload = saved["operation"].split(".")
torch.set_rng_state(saved["random"])
result = getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)
for tensor in torch.utils._pytree.tree_leaves([result, args]):
    print(tensor)
"""


def _find(name: str) -> Any:
    _, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    return found if isinstance(found, type(torch.ops.aten.add.Tensor)) else None


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return getattr(leaf, "_local_tensor", leaf).detach().to("cpu", copy=True)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _plain(leaf: Any) -> Any:
    """What ``weights_only`` can load; dtypes and their like become text such as "!torch.half"."""
    if isinstance(leaf, _TAGGED):
        return f"!torch.{str(leaf).removeprefix('torch.')}"
    return leaf if isinstance(leaf, _PLAIN) else str(leaf)


def _back(leaf: Any) -> Any:
    if isinstance(leaf, str) and leaf.startswith("!torch."):
        name = leaf.removeprefix("!torch.")
        value = torch.device("cpu") if name == "cpu" else getattr(torch, name, None)
        if not isinstance(value, _TAGGED):
            raise TypeError(f"{leaf!r} is not a dtype")
        return value
    return leaf


def _results(operation: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """All floating results, with the arguments that the operation writes to: copies of these."""
    args, kwargs = tree_map(_copy, (args, kwargs))
    result = operation(*args, **kwargs)
    leaves = tensors_of((result, written_by(operation, args, kwargs)))
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _bad_result(operation: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The first result that is not finite; ``None`` too where the arguments do not fit."""
    try:
        return next((one for one in _results(operation, args, kwargs) if is_bad(one)), None)
    except (RuntimeError, TypeError, IndexError):
        return None


def _crop(operation: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Keep only the row with the first bad element, in all tensors with as many rows as a result.

    Left as they are where the operation does not show the fault any more.
    """
    bad = _bad_result(operation, args, kwargs)
    if bad is None or not bad.dim():
        return args, kwargs
    row = describe(bad)["first"][0]
    tensors = [one for one in tensors_of((args, kwargs)) if one.shape[:1] == bad.shape[:1]]
    for chosen in (tensors, tensors[:1], tensors[1:]):
        ids = set(map(id, chosen))

        def cut(leaf: Any, ids: set[int] = ids) -> Any:
            return leaf[row : row + 1].clone() if id(leaf) in ids else leaf

        cropped = tree_map(cut, (args, kwargs))
        if ids and _bad_result(operation, *cropped) is not None:
            return cropped[0], cropped[1]
    return args, kwargs
