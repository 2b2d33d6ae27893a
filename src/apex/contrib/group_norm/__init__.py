"""Group normalization for channels-last images, with an optional SiLU."""

from apex.contrib.group_norm.group_norm import GroupNorm

__all__ = ["GroupNorm"]
