"""A dispatch mode for a replay: where did a value that is not finite begin?

``Trace`` looks at the arguments of each operation before it runs and at its results afterwards,
and remembers for each storage with a NaN or an infinity where that value began: its *origin*. A
result that is not finite although the arguments were begins a new origin; otherwise it has that of
the argument. So the origin of a gradient in the end is the operation that broke this gradient, and
not just the first one with an odd value. What the program computes does not change.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from apex.debug.operations import MOVES, READS_MASKS, is_masking, name_of
from apex.debug.tensors import HALVES, describe, is_bad, local

__all__ = ["Counting", "Origin", "Trace", "key_of", "tensors_of", "written_by"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
_KEPT = 64  # origins of which the arguments are kept, for the file that shows the fault again


@dataclass
class Origin:
    """Where a value that is not finite began.

    Attributes:
        kind: ``"operation"``; ``"mask"`` (an infinity that is a number of the program);
            ``"memory"`` (memory that no operation of torch has written); or what brought it in:
            ``"parameter"``, ``"buffer"``, ``"input"``, ``"gradient"`` (of an output), ``"tensor"``
            (made before), ``"collective"``.
        name: The operation with its overload, ``"aten.sqrt.default"``; else the tensor's name.
        index: Which operation of the replay it was, from 1 on.
        module: Path in the model, ``""`` for the model itself, ``None`` outside of it.
        direction: ``"forward"`` or ``"backward"``.
        line: The line of the forward, ``"file.py:12 in forward: code"``.
        values: See :func:`describe`.
        call: Operation, arguments and keyword arguments, as they were before it ran.
        node: In backward, autograd's name of the function, ``"SqrtBackward0"``.
    """

    kind: str
    name: str
    index: int = 0
    module: str | None = None
    direction: str = "forward"
    line: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    call: tuple[Any, Any, Any] | None = None
    has_nan: bool = False
    node: str = ""


def _is_view(operation: Any) -> bool:
    """Whether all results are views of arguments, and nothing is written."""
    returns = operation._schema.returns
    return bool(returns) and all(
        entry.alias_info is not None and not entry.alias_info.is_write for entry in returns
    )


def written_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    found: list[torch.Tensor] = []
    for place, entry in enumerate(operation._schema.arguments):
        if entry.alias_info is not None and entry.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(entry.name)
            found += tensors_of(value)
    return found


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute, and hands them on to :meth:`compute`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not hasattr(operation, "_schema"):
            return operation(*args, **kwargs)
        if _is_view(operation):
            self.view()
            return operation(*args, **kwargs)
        self.count += 1
        return self.compute(operation, args, kwargs)

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation that is not only a view."""
        raise NotImplementedError

    def view(self) -> None:
        """Called before an operation that makes a view."""


class Trace(Counting):  # type: ignore[no-untyped-call]
    """Finds the origin of each value that is not finite.

    Args:
        paths: Of :func:`module_paths`.
        known: What came from outside, for :attr:`Origin.kind` and :attr:`Origin.name`: pairs of a
            tensor and ``(kind, name)``.
        fill: What to write into memory that ``torch.empty`` gives; ``None`` to leave it.
    """

    def __init__(
        self,
        paths: dict[int, str],
        known: list[tuple[torch.Tensor, tuple[str, str]]],
        fill: float | None = None,
    ) -> None:
        super().__init__()
        self._paths, self._fill = paths, fill
        self._known = {
            key_of(tensor): names for tensor, names in known if key_of(tensor) is not None
        }
        self._seen: dict[int, tuple[StorageWeakRef, Origin | None]] = {}
        self._sent: dict[int, Origin] = {}  # by collectives
        self._alive: list[StorageWeakRef] = []  # so that no other memory has a key of these
        self._modules: list[str | None] = [None]
        self._forward: dict[int, tuple[str | None, str]] = {}  # by autograd's sequence numbers
        self._kept = 0

    @contextmanager
    def running(self) -> Iterator[Trace]:
        """Trace what is called inside, with the paths of the modules."""
        hooks = [
            torch_modules.register_module_forward_pre_hook(self._enter),
            torch_modules.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._modules.append(self._paths.get(id(module), self._modules[-1]))

    def _leave(self, *_: Any) -> None:
        if len(self._modules) > 1:
            self._modules.pop()

    def origin_of(self, tensor: torch.Tensor) -> Origin | None:
        """Where a value of ``tensor`` that is not finite began; ``None`` if all are finite."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        key = key_of(tensor)
        entry = self._seen.get(key) if key is not None else None
        if entry is not None and entry[1] is None:
            return None  # was checked when it was made
        if not is_bad(tensor):
            return None
        if entry is not None and entry[1] is not None:
            return entry[1]
        kind, name = self._known.get(key or 0, ("tensor", ""))
        origin = self._sent.get(key or 0) or Origin(kind, name)
        origin.values = origin.values or describe(tensor)
        self._set(tensor, origin)
        return origin

    def _set(self, tensor: torch.Tensor, origin: Origin | None) -> None:
        key = key_of(tensor)
        if key is not None:
            alive = StorageWeakRef(local(tensor).untyped_storage())  # type: ignore[no-untyped-call]
            self._seen[key] = (alive, origin)

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, between the looks at its arguments and at its results."""
        node = torch._C._current_autograd_node()
        here = self._place(node)
        name, written = name_of(operation), written_by(operation, args, kwargs)
        if "c10d" in operation._schema.name:
            return self._collective(operation, args, kwargs)
        overwrites = name in ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_")
        read = tensors_of((args[1:], kwargs) if overwrites else (args, kwargs))
        outs = [kwargs[entry.name] for entry in operation._schema.arguments if entry.is_out]
        read = [one for one in read if not any(one is out for out in outs)]
        origins = [one for one in map(self.origin_of, read) if one is not None]
        if overwrites and (sent := self._sent.get(key_of(args[0]) or 0)) is not None:
            origins = [sent if one.kind == "tensor" else one for one in origins]
        before = tree_map(_cloned, (args, kwargs)) if written else (args, kwargs)
        result = operation(*args, **kwargs)
        for tensor in (*tensors_of(result), *written):
            self._look_at(tensor, operation, before, origins, here, node)
        return result

    def _collective(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective: what it brings may be there later, and replace its inputs."""
        found = [self.origin_of(tensor) for tensor in tensors_of((args, kwargs))]
        mine = next((one for one in found if one is not None and one.kind != "memory"), None)
        for tensor in tensors_of((args, kwargs)):
            key = key_of(tensor)
            if key is not None:
                self._sent[key] = mine or Origin("collective", str(operation))
                self._alive.append(StorageWeakRef(local(tensor).untyped_storage()))  # type: ignore[no-untyped-call]
                self._seen.pop(key, None)
        return operation(*args, **kwargs)

    def _place(self, node: Any) -> tuple[str | None, str]:
        """Module and line that the operation belongs to; in backward those of its forward."""
        if node is not None and self._modules[-1] is None:  # not recomputing a checkpoint
            here = self._forward.get(node._sequence_nr(), (None, ""))
        else:
            here = (self._modules[-1], _line())
        # The newest node: of this operation, or of the autograd function that it is called in. What
        # follows and has no node, as a mask of dropout, must not take its place.
        self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, here)
        return here

    def view(self) -> None:
        """Note the place of a view: its backward may compute (a sum for ``expand``)."""
        self._place(torch._C._current_autograd_node())

    def _look_at(
        self,
        tensor: torch.Tensor,
        operation: Any,
        before: tuple[Any, Any],
        origins: list[Origin],
        here: tuple[str | None, str],
        node: Any,
    ) -> None:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return
        name = name_of(operation)
        new = Origin(
            "operation",
            str(operation),
            self.count,
            here[0],
            "forward",
            here[1],
        )
        if node is not None and self._modules[-1] is None:  # not recomputing a checkpoint
            new.direction, new.node = "backward", node.name()
        if name.startswith(("empty", "new_empty")) and not origins:
            new.kind = "memory"
            if self._fill is not None:
                local(tensor).fill_(self._fill)
            self._set(tensor, new)
            return
        if not is_bad(tensor):
            if not self._is_part_of_bad(tensor):
                self._set(tensor, None)
            return
        new.values = describe(tensor)
        new.has_nan = bool(new.values["nan"])
        chosen = self._choose(new, operation, before, origins)
        chosen.values = chosen.values or new.values
        self._set(tensor, chosen)

    def _is_part_of_bad(self, tensor: torch.Tensor) -> bool:
        """Whether only a part of memory was written, of which the rest has an origin."""
        key = key_of(tensor)
        if key is None or self._seen.get(key, (None, None))[1] is None:
            return False
        whole = local(tensor).untyped_storage().nbytes()
        return tensor.numel() * tensor.element_size() < whole

    def _choose(
        self, new: Origin, operation: Any, before: tuple[Any, Any], origins: list[Origin]
    ) -> Origin:
        """The origin of a result that is not finite: the operation's own, or an argument's."""
        name = name_of(operation)
        real = [one for one in origins if one.kind != "mask" and not _may_mask(one)]
        masks = [one for one in origins if one not in real]
        if real:  # a gradient that reached an output comes last: a later forward may have made it
            return min(real, key=lambda one: (one.kind == "gradient", not one.has_nan))
        if masks and not (new.has_nan and name in READS_MASKS):
            return masks[0]
        if not masks and not new.has_nan and is_masking(operation, *before):
            new.kind = "mask"
        elif not masks and name in MOVES and not _narrows(new, before):
            new.kind = "memory"
        if self._kept < _KEPT:
            self._kept += 1
            new.call = (operation, *tree_map(_detached, before))
        return new


def _may_mask(origin: Origin) -> bool:
    """Infinities without a NaN in a buffer or an input may be a mask."""
    from_outside = origin.kind in ("buffer", "input", "tensor")
    return from_outside and not origin.values.get("nan") and bool(origin.values.get("inf"))


def _narrows(new: Origin, before: tuple[Any, Any]) -> bool:
    """Whether a copy went to a dtype with a smaller range."""
    largest = torch.finfo(getattr(torch, new.values["dtype"])).max
    wide = [t for t in tensors_of(before) if t.is_floating_point() and t.dtype not in HALVES]
    return any(torch.finfo(tensor.dtype).max > largest for tensor in wide)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def key_of(tensor: torch.Tensor) -> int | None:
    """What identifies the memory of ``tensor``."""
    try:
        return int(local(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return None


def _line() -> str:
    """The innermost line of the program itself; of torch's layers where there is none."""
    frame: Any = sys._getframe(4)  # past this file's own frames
    layer = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            break  # what called the replay
        if not file.startswith((_TORCH, "<frozen")) and "torch/_" not in file:
            return _show(frame)
        if layer is None and f"torch{os.sep}nn" in file and "module.py" not in file:
            layer = frame
        frame = frame.f_back
    return "" if layer is None else _show(layer)


def _show(frame: Any) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, number).strip()
    shown = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"{shown}:{number} in {frame.f_code.co_name}" + (f": {code}" if code else "")
