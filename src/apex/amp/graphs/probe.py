"""What cannot be captured, seen in an eager step, and named: operation, line, what to do.

The last eager call before a capture runs under :class:`Probe`. CUDA would raise in the capture, in
words that do not name the cause, or not at all: it would record the value of a CPU tensor.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apex._compat import private
from apex._compat.private import tree_leaves
from apex.amp.gradients.parameters import addresses
from apex.amp.graphs import names as reached
from apex.amp.graphs.followed import (
    READ,
    Followed,
    Row,
    Values,
    modules_of,
    numbers_of,
    state_to_capture,
    tensors_of,
)
from apex.amp.training import alive, managed, managed_states

_TORCH = os.path.dirname(torch.__file__) + os.sep
_APEX = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# Amp and optimizers write in place what they keep from step to step, or follow it. Modules, and
# what amp casts for them, are the program's.
_KEEP_THEIR_OWN = (
    *(_APEX + name + os.sep for name in ("amp", "optimizers", os.path.join("ops", "lists"))),
    _TORCH + "optim" + os.sep,
)
_OF_THE_PROGRAM = (
    _APEX + os.path.join("amp", "casting") + os.sep,
    _TORCH + os.path.join("nn", "modules") + os.sep,
)
_CHANGES = (
    "it changes {} (a scheduler's step?), and replays run no Python code. Call scheduler.step() "
    "after it"
)
_WRITES = (
    "it writes to an argument. A replay would write to a copy, so clone the argument in the "
    "function, or return the tensor"
)
_REPLACES = (
    "it replaces a buffer or a parameter of a module (self.buffer = ...), and a replay reads the "
    "old one. Write to it in place (self.buffer.copy_(...))"
)
_BY_INDEX = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_OF_THE_HOST = (
    "reads a CPU tensor, whose value each replay would repeat. Create the tensor on the GPU before "
    "the call, or pass it as an argument on the GPU"
)


class Probe(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for what a capture on ``device`` would not take, and a replay not do.

    What apex does itself is left out: in a capture it does something else, or raises by itself.
    ``arguments`` are the tensors that the function is given.

    Attributes:
        found: The first such thing, and what to do instead.
        chosen: Names of lists of which the function read one of several tensors, by what nothing
            tells.
    """

    def __init__(self, device: torch.device, arguments: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.found, self._adds = device, "", False
        self.chosen: list[str] = []
        elsewhere = [one.device for one in arguments if not self._is_here(one.device)]
        if elsewhere:
            self.found = (
                f"an argument is on {elsewhere[0]}, whose values a replay would not see. Pass "
                f"tensors of {device.type}, and numbers"
            )
        modules = modules_of(alive())
        self._trained = [(one, one.requires_grad) for one in tensors_of(modules)]
        self._values = Values(_unwritten(arguments, modules))
        states = [state.params for state in managed_states()]
        weights = [weight for one in states for weight in (*one.targets, *one.tensors)]
        self._grads = {id(one): one.grad for one in weights if one.grad is not None}
        self._memory = set(addresses(list(self._grads.values())))
        known = [*arguments, *self._grads.values()]
        # Storages that were made in the call, or are an argument or a gradient; of others that it
        # has read, whether they are still there, and the line.
        self._made = {key for one in known if (key := _storage_key(one)) is not None}
        self._read: dict[int, tuple[Any, str]] = {}
        self._starts = set[int]()  # where the tensors begin that it has read: some share a storage

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.found = self.found or self._values.change()
        if not self.found and error[:1] == (None,):
            self.found = self._carried()

    def _carried(self) -> str:
        """Name a tensor from before the call that it has read, and that nobody holds any more."""
        lines = [line for storage, line in self._read.values() if storage.expired()]
        if not lines:
            return ""
        return (
            f"{lines[0]} reads a tensor from the call before, and the call replaces it by another "
            "(a hidden state, an average). A replay reads the old tensor, so write to it in place "
            "(state.copy_(new)), or pass it as an argument and return the new one"
        )

    def followed(self, function: Any, optimizers: Sequence[Any]) -> Followed:
        """What the graph of such calls reads and takes for given; they step these optimizers."""
        states = list(map(state_to_capture, optimizers))
        stepped, read = {state.training for state in states}, self._read.keys()
        trainings, own = [], set[int | None]()
        for training in alive():
            keys = set(map(_storage_key, tensors_of(modules_of([training]))))
            if training in stepped or not read.isdisjoint(keys):
                trainings.append(training)
                own |= keys
        weights = [x for state in states for x in (*state.params.targets, *state.params.tensors)]

        def is_read(one: torch.Tensor) -> bool:
            key = _storage_key(one)
            return key in self._read and key not in own and addresses([one])[0] in self._starts

        named, self.chosen = reached.rows(function, modules_of(trainings), is_read, READ)
        return Followed(
            optimizers,
            trainings,
            [storage for key, (storage, _) in self._read.items() if key not in own],
            named=named,
            clears=not self._adds and any(id(weight) in self._grads for weight in weights),
            toggled={id(one) for one, before in self._trained if one.requires_grad != before},
        )

    def _note(self, func: Any, leaves: Sequence[torch.Tensor]) -> None:
        """Note what is read from before the call, where the graph will be.

        On the host programs may do as they like; torch makes states of generators there unseen.
        """
        for leaf in leaves:
            key = _storage_key(leaf) if self._is_here(leaf.device) else None
            if key in self._read:
                self._starts.update(addresses([leaf]))
            if key is None or key in self._made or key in self._read:
                continue
            frame = _reader(sys._getframe(2))
            if frame is None or func is torch.ops.aten.lift_fresh.default:
                self._made.add(key)
            else:
                storage: Any = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
                self._read[key] = storage, _line(frame, frame.f_lineno)
                self._starts.update(addresses([leaf]))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` run its graphs as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._adds = self._adds or not self._memory.isdisjoint(addresses(leaves))
        if not self.found:
            reason = self._reason(func, args, kwargs, {leaf.device for leaf in leaves})
            frame = _programs_frame(sys._getframe(1)) if reason else None
            if frame is not None:
                self.found = f"{func}, called in {_line(frame, frame.f_lineno)}, {reason}"
        self._note(func, leaves)
        results = func(*args, **kwargs)
        new = [_storage_key(x) for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self._made.update(key for key in new if key is not None and key not in self._read)
        return results

    def _reason(self, func: Any, args: Any, kwargs: Any, devices: set[torch.device]) -> str:
        """Why a capture would not take this call; empty if it does."""
        to = kwargs.get("device")
        if self.device not in devices:
            return _OF_THE_HOST if devices and to is not None and self._is_here(to) else ""
        if torch.Tag.data_dependent_output in func.tags:
            return "waits for the device. Return the tensor, and read it outside the function"
        if func._schema.name in _BY_INDEX:
            if _by_mask(args):
                return (
                    "selects by a mask, so a shape depends on the data. Use torch.where or "
                    "masked_fill"
                )
        elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
            return "returns a shape that depends on the data. Use a mask (torch.where) instead"
        if to is not None and not self._is_here(to):
            return f"copies to {to} and waits. Return the tensor, and copy it outside"
        return "" if all(map(self._is_here, devices)) else _OF_THE_HOST

    def _is_here(self, device: Any) -> bool:
        return torch.device(device).type == self.device.type


def _unwritten(
    arguments: Sequence[torch.Tensor], modules: Sequence[torch.nn.Module]
) -> Iterator[Row]:
    """What the function may not change, with the reasons for names."""
    for read, owners, names in numbers_of(list(managed)):
        yield read, owners, [_CHANGES.format(name) for name in names]
    versions = [one for one in arguments if not one.is_inference()]
    yield attrgetter("_version"), versions, [_WRITES] * len(versions)
    for module in modules:
        for kept in (module._parameters, module._buffers):
            yield kept.get, [*kept], [_REPLACES] * len(kept)


def _by_mask(args: Any) -> bool:
    """Whether elements are taken, or written, where a mask is true; one value needs no shape."""
    masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
    is_one_value = len(args) > 2 and args[2].numel() == 1 and len(args[1]) == 1
    return bool(masks) and not is_one_value


def _programs_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside of torch; ``None`` if apex has called torch there."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(_APEX) else frame


def _reader(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the program; ``None`` if amp or an optimizer reads what is its own."""
    is_programs = False
    while frame is not None:
        file = frame.f_code.co_filename
        is_programs |= file.startswith(_OF_THE_PROGRAM)
        if not is_programs and file.startswith(_KEEP_THEIR_OWN):
            return None
        if not file.startswith((_TORCH, _APEX)):
            return frame
        frame = frame.f_back
    return None


def _storage_key(tensor: torch.Tensor) -> int | None:
    """What tells storages apart while they live; ``None`` for a tensor without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _line(where: FrameType, number: int) -> str:
    file = where.f_code.co_filename
    return f"{file}:{number} ({linecache.getline(file, number).strip()})"


def describe(error: BaseException) -> str:
    """Name what a capture has failed at: the program's line, and what was raised there.

    CUDA raises once more where the capture ends, without a line of the program.
    """
    first: BaseException | None = error
    while first is not None:
        lines = [
            _line(frame, number)
            for frame, number in traceback.walk_tb(first.__traceback__)
            if not frame.f_code.co_filename.startswith((_TORCH, _APEX))
        ]
        if lines:
            return f"{lines[-1]}: {type(first).__name__}: {str(first).partition(chr(10))[0]}"
        first = first.__context__
    return f"{type(error).__name__}: {error}"
