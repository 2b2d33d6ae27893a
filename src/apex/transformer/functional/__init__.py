"""Functions of attention layers: softmaxes with scale and mask, rotary position embeddings."""

from apex.transformer.functional.fused_softmax import FusedScaleMaskSoftmax

__all__ = ["FusedScaleMaskSoftmax"]
