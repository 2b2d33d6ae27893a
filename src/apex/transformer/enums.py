"""What a transformer's layers and attention are, in Megatron's words."""

import enum


class LayerType(enum.Enum):
    """Side of the model that a layer belongs to."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Where keys and values come from: the queries' own sequence, or another."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """``padding``: a mask is passed; ``causal``: no position sees a later one."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Whether a model is an encoder or a decoder, or has both."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
