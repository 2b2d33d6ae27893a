"""Parts of transformers, under the names that Megatron-style programs import.

NVIDIA's Apex removed the package in January 2026. ``parallel_state`` says which ranks share a
model, ``tensor_parallel`` has layers that are spread over ranks, ``pipeline_parallel`` schedules
for models whose layers are on different ranks. What is left out on purpose: ``_refused.REFUSED``.
"""

from apex._upstream.missing import explain_attributes
from apex.transformer import (
    amp,
    functional,
    parallel_state,
    pipeline_parallel,
    tensor_parallel,
    utils,
)
from apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType

__all__ = [
    "AttnMaskType",
    "AttnType",
    "LayerType",
    "ModelType",
    "amp",
    "functional",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
    "utils",
]

explain_attributes(__name__)
