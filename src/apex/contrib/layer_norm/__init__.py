"""Layer norm over the last dimension, for rows of any width."""

from apex.contrib.layer_norm.layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
