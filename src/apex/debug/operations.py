"""Which of torch's operations can make a NaN or an infinity, and which infinities are masks.

The module has three sets of names. ``"softmax"`` means every overload of
``torch.ops.aten.softmax``. You can add names of your own operations:
``apex.debug.operations.MASKS.add("my_mask")``.

* ``MOVES``: operations that only move or choose values. If a result is not finite, an argument was
  not finite either, or memory was not initialised.
* ``MASKS``: operations that write a constant infinity into a mask, such as
  ``masked_fill(mask, -inf)``. The infinity is reported only if it turns into a NaN.
* ``READS_MASKS``: operations that return finite numbers for a masked input, such as softmax. If one
  of them returns a NaN, because a whole row is masked, it is reported as the cause.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from apex._compat.private import tree_leaves

__all__ = ["MASKS", "MOVES", "READS_MASKS", "is_masking", "name_of"]

MOVES = {  # views are not looked at
    *("_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy", "copy_", "embedding"),
    *("empty", "empty_like", "empty_strided", "flip", "gather", "index", "index_select"),
    *("lift_fresh", "masked_select", "new_empty", "new_empty_strided", "relu", "relu_", "repeat"),
    *("resize_", "roll", "select_backward", "slice_backward", "stack", "tril", "triu", "zeros"),
    "zeros_like",
}
MASKS = {
    *("add", "add_", "fill", "fill_", "full", "full_like", "index_fill", "index_fill_"),
    *("index_put", "index_put_", "masked_fill", "masked_fill_", "masked_scatter", "new_full"),
    *("scalar_tensor", "scatter", "scatter_", "sub", "where", "lift_fresh", "_to_copy", "copy_"),
}
READS_MASKS = {
    *("_softmax", "_log_softmax", "_safe_softmax", "exp", "logsumexp", "logcumsumexp", "sigmoid"),
    *("softmax", "log_softmax", "tanh", "special_xlog1py", "xlogy", "_masked_softmax"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("kl_div", "mul", "bmm", "_scaled_dot_product_attention_math", "clamp", "clamp_min", "sub"),
}


def name_of(operation: Any) -> str:
    """The name of an overload without namespace and overload: ``"softmax"``."""
    name: str = operation._schema.name
    return name.rpartition("::")[2]


def is_masking(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an infinity in the result comes from a number in the call: a mask."""
    if name_of(operation) not in MASKS:
        return False
    numbers = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)]
    return any(isinstance(number, float) and math.isinf(number) for number in numbers)
