"""Operations: definition, choice of path and autograd, one file for each."""

from apex.ops._thresholds import prefer

__all__ = ["prefer"]
