"""Matrix products and bytes of a piece of work, counted where functions are dispatched.

Nothing has to be computed: on meta tensors sizes are those of a GPU, without its memory.
"""

import math
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # where their first matrix is


class Counted(TorchDispatchMode):
    """Counts in a ``with`` block.

    Attributes:
        products: Sizes ``(rows, inner, columns)`` of each product, before them that of its batch.
        peak: Bytes that lived at once, of storages that were made in the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, ...]] = []
        self.peak = 0
        self._made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        at = PRODUCTS.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        if at is not None:
            left, right = args[at : at + 2]
            self.products.append((*left.shape, right.shape[-1]))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return result

    @property
    def multiplications(self) -> int:
        """Of all products."""
        return sum(map(math.prod, self.products))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
