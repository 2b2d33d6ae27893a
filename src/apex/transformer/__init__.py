"""Parts of transformers, under the names that Megatron-style programs import.

NVIDIA's Apex removed the package in January 2026. Here are its layers, functions and the helpers
that need no group of processes; the parallel parts are not here yet.
"""

from apex._missing import explain_attributes
from apex.transformer import amp, functional, utils
from apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType

__all__ = [
    "AttnMaskType",
    "AttnType",
    "LayerType",
    "ModelType",
    "amp",
    "functional",
    "utils",
]

explain_attributes(__name__)
