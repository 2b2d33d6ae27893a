"""Layer norms whose parameters say whether their input is split over sequence-parallel ranks."""

from apex._upstream.missing import explain_attributes
from apex.transformer.layers.layer_norm import FastLayerNorm, FusedLayerNorm, MixedFusedLayerNorm

__all__ = ["FastLayerNorm", "FusedLayerNorm", "MixedFusedLayerNorm"]

explain_attributes(__name__)
