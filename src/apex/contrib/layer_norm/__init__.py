"""Layer norm over the last dimension; NVIDIA's version is for wide rows."""

from apex.contrib.layer_norm.layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
