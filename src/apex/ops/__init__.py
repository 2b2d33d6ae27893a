"""Operations: definition, choice of path and autograd, one file for each."""

from apex.ops._batch_invariance import batch_invariant
from apex.ops._thresholds import prefer

__all__ = ["batch_invariant", "prefer"]
