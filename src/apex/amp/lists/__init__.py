"""Which functions are cast to what: the lists of the original, mutable as they were.

They are read by ``initialize`` and ``init`` when function casts are switched on. What differs
from the lists as shipped becomes a rule of that training: a name added is cast accordingly, a
name removed is left alone. The unedited lists need no rule, because ``torch.autocast`` and the
kernels of :mod:`apex.amp.casting.dispatcher` implement them.
"""

from typing import Any

from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]

LISTS = (functional_overrides, torch_overrides, tensor_overrides)
_KINDS = {
    "FP16_FUNCS": "half",
    "FP32_FUNCS": "float",
    "CASTS": "promote",
    "SEQUENCE_CASTS": "promote",
}


def listed(module: Any) -> dict[str, str]:
    """The names on the lists of ``module`` as they are now, and how each is cast."""
    return {
        name: kind for attribute, kind in _KINDS.items() for name in getattr(module, attribute, ())
    }
