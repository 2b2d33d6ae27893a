"""A dispatch mode for a replay that runs each operation a second time in float32.

It has float32 copies of all 16-bit tensors, and lets autocast, amp and the model go on as before.
It counts operations as :class:`apex.debug.tracing.Trace` does, so the value of one that was traced
can be asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from apex.debug.tensors import HALVES, local
from apex.debug.tracing import Counting, key_of, tensors_of, written_by

__all__ = ["Wide"]


class Wide(Counting):  # type: ignore[no-untyped-call]
    """Runs a program's 16-bit tensors in float32 beside what it computes itself.

    Args:
        index: The operation whose largest result is wanted, see :attr:`largest`.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self._index = index
        self._wide: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self.largest: float | None = None
        self.is_used = False  # whether there was a 16-bit tensor

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor`` is in float32; a view of one that shares memory as ``tensor`` does."""
        tensor = local(tensor)
        if tensor.dtype not in HALVES or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        entry = self._wide.get(storage._cdata)
        self.is_used = True
        if entry is None:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            entry = self._wide[storage._cdata] = (storage, whole.float())
        return entry[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation twice, if it has to do with 16-bit tensors."""
        if "c10d" in operation._schema.name or "fsdp" in operation._schema.name:
            result = operation(*args, **kwargs)  # written later, or by other ranks
            for tensor in tensors_of((args, kwargs, result)):
                self._wide.pop(key_of(tensor) or 0, None)
            return result
        written = written_by(operation, args, kwargs)
        halves = [one for one in written if one.dtype in HALVES]
        wide_args, wide_kwargs = tree_map(self._widen, (args, kwargs))
        if written and not halves:
            return self._note(operation(*wide_args, **wide_kwargs), operation, args, wide_args)
        seeded = torch.Tag.nondeterministic_seeded in operation.tags
        state = torch.get_rng_state() if seeded else None
        wide = operation(*wide_args, **wide_kwargs)
        if state is not None:
            torch.set_rng_state(state)
        kept = {id(one) for one in written if one.dtype not in HALVES}
        clone = lambda leaf: leaf.clone() if id(leaf) in kept else leaf  # noqa: E731
        args, kwargs = tree_map(clone, (args, kwargs))
        result = operation(*args, **kwargs)
        self._note(wide, operation, args, wide_args)
        return self._pair(result, wide, written)

    def _widen(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.widened(leaf)
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALVES else leaf

    def _note(self, wide: Any, operation: Any, args: Any, wide_args: Any) -> Any:
        if self.count == self._index:
            sizes = [t.detach().abs() for t in tensors_of(wide) if t.is_floating_point()]
            finite = [float(t[torch.isfinite(t)].max()) for t in sizes if torch.isfinite(t).any()]
            self.largest = max(finite, default=math.nan)
        if wide is not None and wide_args and wide is wide_args[0]:
            return args[0]  # an in-place operation gives its argument
        return wide

    def _pair(self, result: Any, wide: Any, written: list[torch.Tensor]) -> Any:
        """Remember the float32 results beside 16-bit ones; give others as they are in float32."""
        wides = iter(list(tree_iter(wide)))
        ours = {id(one) for one in written}

        def pair(leaf: Any) -> Any:
            other = next(wides, None)
            if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
                return leaf
            if id(leaf) in ours or leaf.dtype not in HALVES:
                return leaf if id(leaf) in ours else other
            storage = leaf.untyped_storage()
            size = storage.nbytes() // leaf.element_size()
            flat = torch.zeros(size, dtype=torch.float32, device=leaf.device)
            self._wide[storage._cdata] = (storage, flat)
            self.widened(leaf).copy_(other)
            return leaf

        return tree_map(pair, result)
