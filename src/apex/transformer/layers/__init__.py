"""Layer norms with an attribute that marks parameters of sequence-parallel layers."""

from apex._upstream.missing import explain_attributes
from apex.transformer.layers.layer_norm import FastLayerNorm, FusedLayerNorm, MixedFusedLayerNorm

__all__ = ["FastLayerNorm", "FusedLayerNorm", "MixedFusedLayerNorm"]

explain_attributes(__name__)
