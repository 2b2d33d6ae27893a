"""What a transformer's layers and attention are, in Megatron's words."""

import enum


class LayerType(enum.Enum):
    """Side of the model to which a layer belongs: encoder or decoder."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Source of keys and values: the sequence of the queries, or another one."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Kind of attention mask: ``padding`` (you pass a mask) or ``causal`` (hides later keys)."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Kind of model: an encoder or a decoder, or one with both."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
