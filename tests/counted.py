"""Matrix products and bytes of a piece of work, counted where functions are dispatched.

Nothing has to be computed: on meta tensors sizes are those of a GPU, without its memory.
"""

import math

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

    def __init__(self):
        super().__init__()
        self.products, self.peak, self._made = [], 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
    def multiplications(self):
        """Of all products."""
        return sum(map(math.prod, self.products))


def _tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
