"""Attention of packed sequences of different lengths."""

from apex.contrib.fmha.fmha import FMHA, FMHAFun

__all__ = ["FMHA", "FMHAFun"]
