"""What a training step computes and moves, counted and not timed.

FLOPs are those of matrix products and convolutions, by torch's own counter. Bytes are those that
each operation has to move if it finds nothing in a cache: every tensor it reads, once, and every
tensor it writes, once. Views and allocations move nothing. What is changed in place counts as
read and written, even if it is only filled; an embedding counts with its whole table; what an
operation writes in between for itself is not seen.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["count"]


def count(step: Callable[[], object]) -> tuple[int, int]:
    """Run one training step and count.

    Args:
        step: Forward, backward and the optimizer's step, not compiled: a compiled graph is one
            operation, or none.

    Returns:
        FLOPs (two for a multiplication with an addition), and bytes moved.

    Example:
        >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
        >>> count(lambda: a @ b)
        (48, 104)
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as flops, _Bytes() as moved:
        step()
    return int(flops.get_total_flops()), moved.total


class _Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, arguments = func._schema.name.removeprefix("aten::"), func._schema.arguments
        if "empty" in name:
            return result
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        out = {a.name for a in arguments if a.is_out}
        if name.startswith("new_") or name.endswith("_like"):  # these take a shape, not numbers
            given = {}
        reads = list(_tensors(value for key, value in given.items() if key not in out))
        writes = list(_tensors(value for key, value in given.items() if key in written))
        memory = {_place(tensor) for tensor in [*reads, *writes]}
        fresh = [tensor for tensor in _tensors([result]) if _place(tensor) not in memory]
        if writes or fresh:
            self.total += sum(map(_bytes, [*_once(reads), *writes, *_once(fresh)]))
        return result


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor))


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _once(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return {id(tensor): tensor for tensor in tensors}.values()


def _bytes(tensor: torch.Tensor) -> int:
    """Size of what is in memory: a dimension that was expanded is there once."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n if step else min(n, 1) for n, step in shape) * tensor.element_size()
