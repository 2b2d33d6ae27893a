"""A dispatch mode for a replay: where did a value that is not finite begin?

``Trace`` looks at the arguments of each operation before it runs and at its results afterwards,
and remembers for each storage with a NaN or an infinity where that value began: its *origin*. A
result that is not finite although the arguments were begins a new origin; otherwise it has that of
the argument. So the origin of a gradient in the end is the operation that broke this gradient, and
not just the first one with an odd value. What the program computes does not change.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_modules

from apex._compat import private
from apex._compat.private import tree_map
from apex.debug.operations import MOVES, READS_MASKS, is_masking, name_of
from apex.debug.reasons import reason
from apex.debug.tensors import HALVES, describe, is_bad, local, tensors_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
_APEX = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_")


@dataclass
class Origin:
    """Where a value that is not finite began.

    Attributes:
        kind: ``"operation"``; ``"mask"`` (an infinity that is a number of the program);
            ``"memory"`` (memory that no operation of torch has written); or what brought it in:
            ``"parameter"``, ``"buffer"``, ``"input"``, ``"gradient"`` (of an output), ``"tensor"``
            (made before), ``"collective"``.
        name: The operation with its overload, ``"aten.sqrt.default"``; else the tensor's name.
        values: See :func:`describe`.
        index: Which operation of the replay it was, from 1 on.
        module: Path in the model, ``""`` for the model itself, ``None`` outside of it.
        direction: ``"forward"`` or ``"backward"``.
        line: The line of the forward, ``"file.py:12 in forward: code"``; of a backward that the
            program has written, the line in it.
        node: In backward, autograd's name of the function, ``"SqrtBackward0"``; not where the
            program has written it.
        reason: Why it gave this value, see :func:`apex.debug.reasons.reason`.
        call: Operation, arguments and keyword arguments, as they were before it ran.
    """

    kind: str
    name: str
    values: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    module: str | None = None
    direction: str = "forward"
    line: str = ""
    node: str = ""
    reason: str = ""
    call: tuple[Any, Any, Any] | None = None

    def has_nan(self) -> bool:
        """Whether it is a NaN, and not only infinities."""
        return bool(self.values.get("nan"))

    def counts(self) -> str:
        """How many values were NaN and inf, for a sentence."""
        nan, inf = self.values["nan"], self.values["inf"]
        parts = [f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "inf")) if count]
        elements = self.values["elements"]
        return f"{' and '.join(parts)} of {elements} {'value' if elements == 1 else 'values'}"

    def place(self) -> str:
        """The operation with module, direction and line, for a sentence."""
        text = self.name.removeprefix("aten.").partition(".")[0]
        if self.module is not None:
            text += f" in module {self.module}" if self.module else " in the model's forward"
        if self.node:
            of = f", the backward of {self.line}" if self.line else ""
            return f"{text} (in {self.node}{of})"
        return f"{text} (at {self.line})" if self.line else text


def _is_view(operation: Any) -> bool:
    """Whether all results are views of arguments, and nothing is written."""
    returns = operation._schema.returns
    return bool(returns) and all(
        entry.alias_info is not None and not entry.alias_info.is_write for entry in returns
    )


def written_by(operation: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    found: list[torch.Tensor] = []
    for place, entry in enumerate(operation._schema.arguments):
        if entry.alias_info is not None and entry.alias_info.is_write:
            found += tensors_of(args[place] if place < len(args) else kwargs.get(entry.name))
    return found


class Counting(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        paths: Of modules, by their ``id``.
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
        self._known = {key: names for tensor, names in known if (key := key_of(tensor))}
        self._seen: dict[int, Origin | None] = {}  # what was finite has none
        self._sent: dict[int, Origin] = {}  # by collectives
        self._alive: dict[int, StorageWeakRef] = {}  # so that no other memory has a key of these
        self._modules: list[str | None] = [None]
        self._forward: dict[int, tuple[str | None, str]] = {}  # by autograd's sequence numbers
        self._is_own = False  # whether a backward runs that the program has written
        self.at = ""  # the line of what runs, where the program's frames are not on the stack

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
        self._modules.pop()

    def origin_of(self, tensor: torch.Tensor) -> Origin | None:
        """Where a value of ``tensor`` that is not finite began; ``None`` if all are finite."""
        key = key_of(tensor)
        origin = self._seen.get(key)
        if (origin is None and key in self._seen) or not is_bad(tensor):
            return None
        if origin is None:
            origin = self._sent.get(key) or Origin(*self._known.get(key, ("tensor", "")))
            self._set(tensor, origin)
        origin.values = origin.values or describe(tensor)
        return origin

    def _set(self, tensor: torch.Tensor, origin: Origin | None) -> None:
        if key := self._hold(tensor):
            self._seen[key] = origin

    def _hold(self, tensor: torch.Tensor) -> int:
        if key := key_of(tensor):
            memory = local(tensor).untyped_storage()
            self._alive[key] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        return key

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, between the looks at its arguments and at its results."""
        node = private.current_autograd_node()
        module, line = self._place(node)
        if "c10d" in operation._schema.name:
            return self._collective(operation, args, kwargs)
        written, overwrites = written_by(operation, args, kwargs), name_of(operation) in _OVERWRITES
        unread = {id(kwargs[entry.name]) for entry in operation._schema.arguments if entry.is_out}
        unread |= {id(args[0])} if overwrites else set()
        read = [one for one in tensors_of((args, kwargs)) if id(one) not in unread]
        origins = [origin for one in read if (origin := self.origin_of(one)) is not None]
        if overwrites and (sent := self._sent.get(key_of(args[0]))) is not None:
            origins = [sent if one.kind == "tensor" else one for one in origins]
        before = tree_map(_cloned, (args, kwargs)) if written else (args, kwargs)
        result = operation(*args, **kwargs)
        new = Origin("operation", str(operation), {}, self.count, module, line=line)
        if self._is_backward(node):
            new.direction, new.node = "backward", "" if self._is_own else node.name()
        for tensor in (*tensors_of(result), *written):
            self._look_at(tensor, operation, before, origins, dataclasses.replace(new))
        return result

    def _collective(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective: what it brings may be there later, and replace its inputs."""
        tensors = tensors_of((args, kwargs))
        found = [self.origin_of(tensor) for tensor in tensors]
        mine = next((one for one in found if one is not None and one.kind != "memory"), None)
        for tensor in tensors:
            if key := self._hold(tensor):
                self._sent[key] = mine or Origin("collective", str(operation))
                self._seen.pop(key, None)
        return operation(*args, **kwargs)

    def _is_backward(self, node: Any) -> bool:
        return node is not None and self._modules[-1] is None  # not recomputing a checkpoint

    def _place(self, node: Any) -> tuple[str | None, str]:
        """Module and line that the operation belongs to; in backward those of its forward."""
        self._is_own = False
        if self._is_backward(node):
            here = self._forward.get(node._sequence_nr(), (None, ""))
            if own := _line():  # only a backward written in Python has a frame of the program
                self._is_own, here = True, (here[0], own)
        else:
            here = (self._modules[-1], self.at or _line())
        # The newest node: of this operation, or of the autograd function that it is called in. What
        # follows and has no node, as a mask of dropout, must not take its place.
        self._forward.setdefault(private.get_sequence_nr() - 1, here)
        return here

    def view(self) -> None:
        """Note the place of a view: its backward may compute (a sum for ``expand``)."""
        self._place(private.current_autograd_node())

    def _look_at(
        self,
        tensor: torch.Tensor,
        operation: Any,
        before: tuple[Any, Any],
        origins: list[Origin],
        new: Origin,
    ) -> None:
        """Set the origin of a result: ``new`` if it began here."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return
        if name_of(operation).startswith(("empty", "new_empty")) and not origins:
            new.kind = "memory"
            if self._fill is not None:
                local(tensor).fill_(self._fill)
            self._set(tensor, new)
        elif is_bad(tensor):
            new.values = describe(tensor)
            self._set(tensor, self._choose(new, operation, before, origins, tensor))
        elif not self._is_part_of_bad(tensor):
            self._set(tensor, None)

    def _is_part_of_bad(self, tensor: torch.Tensor) -> bool:
        """Whether only a part of memory was written, of which the rest has an origin."""
        part = local(tensor)
        has_origin = self._seen.get(key_of(part)) is not None
        return has_origin and part.nbytes < part.untyped_storage().nbytes()

    def _choose(
        self,
        new: Origin,
        operation: Any,
        before: tuple[Any, Any],
        origins: list[Origin],
        result: torch.Tensor,
    ) -> Origin:
        """The origin of a result that is not finite: the operation's own, or an argument's."""
        name = name_of(operation)
        real = [one for one in origins if not _may_be_mask(one)]
        if real:  # a gradient that reached an output comes last: a later forward may have made it
            return min(real, key=lambda o: (o.kind == "gradient", not (o.index and o.has_nan())))
        makes_nan = new.has_nan() and name in READS_MASKS and not _has_nan(before)
        if origins and not makes_nan:
            return origins[0]
        if not origins and not new.has_nan() and is_masking(operation, *before):
            new.kind = "mask"
        elif not origins and name in MOVES and not _narrows(new, before):
            new.kind = "memory"
        new.call = (operation, *tree_map(_detached, before))
        new.reason = reason(name, new.node, *before, result)
        return new


def _may_be_mask(origin: Origin) -> bool:
    """Infinities without a NaN in a buffer or an input may be a mask as well."""
    from_outside = origin.kind in ("buffer", "input", "tensor")
    return origin.kind == "mask" or (from_outside and not origin.has_nan())


def _has_nan(arguments: Any) -> bool:
    """Whether a product of infinities, for example, has made a NaN of them already."""
    return any(is_bad(one) and bool(local(one).isnan().any()) for one in tensors_of(arguments))


def _narrows(new: Origin, before: tuple[Any, Any]) -> bool:
    """Whether a copy went to a dtype with a smaller range."""
    largest = torch.finfo(getattr(torch, new.values["dtype"])).max
    wide = [t for t in tensors_of(before) if t.is_floating_point() and t.dtype not in HALVES]
    return any(torch.finfo(tensor.dtype).max > largest for tensor in wide)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def key_of(tensor: torch.Tensor) -> int:
    """What identifies the memory of ``tensor``; 0 for a subclass without memory of its own."""
    try:
        return int(local(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _line() -> str:
    """The innermost line of the program itself; of torch's layers where there is none."""
    frame: Any = sys._getframe(4)  # past this file's own frames
    layer = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            break  # what called the replay
        if not file.startswith((_TORCH, _APEX, "<frozen")) and "torch/_" not in file:
            return show_line(frame.f_code, frame.f_lineno)
        if layer is None and f"torch{os.sep}nn" in file and "module.py" not in file:
            layer = frame
        frame = frame.f_back
    return "" if layer is None else show_line(layer.f_code, layer.f_lineno)


def show_line(code: CodeType, number: int) -> str:
    """A line of a program, as reports show it."""
    file = code.co_filename
    text = linecache.getline(file, number).strip()
    shown = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"{shown}:{number} in {code.co_name}" + (f": {text}" if text else "")
