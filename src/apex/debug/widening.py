"""A dispatch mode for a replay that runs each operation a second time in float32.

It has float32 copies of all 16-bit tensors, and lets autocast, amp and the model go on as before.
It counts operations as :class:`apex.debug.tracing.Trace` does, so the value of one that was traced
can be asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from apex._compat.private import tree_leaves, tree_map
from apex.debug.calls import random_states, set_random_states
from apex.debug.tensors import HALVES, is_bad, largest, local, tensors_of
from apex.debug.tracing import Counting, key_of, written_by


class Wide(Counting):  # type: ignore[no-untyped-call]
    """Runs a program's 16-bit tensors in float32 beside what it computes itself.

    Args:
        index: The operation whose result is looked at.

    Attributes:
        largest: The largest finite magnitude that it gives in float32.
        is_finite: Whether all that it gives there is finite; ``None`` if it did not run.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self._wide: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self.largest = math.nan
        self.is_finite: bool | None = None
        self.is_used = False  # whether there was a 16-bit tensor

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor`` is in float32; a view of one that shares memory as ``tensor`` does."""
        tensor = local(tensor)
        if tensor.dtype not in HALVES or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        self.is_used = True
        if storage._cdata not in self._wide:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self._wide[storage._cdata] = (storage, whole.float())
        wide = self._wide[storage._cdata][1]
        return wide.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation in float32, then as it is; what is float32 keeps the first result."""
        if "c10d" in operation._schema.name or "fsdp" in operation._schema.name:
            result = operation(*args, **kwargs)  # written later, or by other ranks
            for tensor in tensors_of((args, kwargs, result)):
                self._wide.pop(key_of(tensor), None)
            return result
        wide_args, wide_kwargs = tree_map(self._widen, (args, kwargs))
        states = random_states()
        wide = operation(*wide_args, **wide_kwargs)
        set_random_states(states)
        if self.count == self._index:
            floating = [t.detach() for t in tensors_of(wide) if t.is_floating_point()]
            finite = [t[t.isfinite()] for t in floating]
            self.largest = max((float(largest(t)) for t in finite if t.numel()), default=math.nan)
            self.is_finite = not any(is_bad(one) for one in floating)
        written = written_by(operation, args, kwargs)
        halves = {id(one) for one in written if one.dtype in HALVES}
        wider = {id(one) for one in written} - halves
        clone = lambda leaf: leaf.clone() if id(leaf) in wider else leaf  # noqa: E731
        args, kwargs = tree_map(clone, (args, kwargs))
        return self._pair(operation(*args, **kwargs), wide, halves)

    def _widen(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.widened(leaf)
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALVES else leaf

    def _pair(self, result: Any, wide: Any, written: set[int]) -> Any:
        """Remember the float32 results beside 16-bit ones; give others as they are in float32."""
        wides = iter(list(tree_leaves(wide)))

        def pair(leaf: Any) -> Any:
            other = next(wides, None)
            if not isinstance(leaf, torch.Tensor) or id(leaf) in written:
                return leaf
            if leaf.dtype not in HALVES:
                return other
            storage = leaf.untyped_storage()
            size = storage.nbytes() // leaf.element_size()
            flat = torch.zeros(size, dtype=torch.float32, device=leaf.device)
            self._wide[storage._cdata] = (storage, flat)
            self.widened(leaf).copy_(other)  # type: ignore[arg-type]
            return leaf

        return tree_map(pair, result)
