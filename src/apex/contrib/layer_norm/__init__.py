"""Layer norm over the last dimension; its wide rows are what NVIDIA wrote it for."""

from apex.contrib.layer_norm.layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
