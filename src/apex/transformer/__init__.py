"""Parts of transformers, with the names that Megatron-style programs import.

NVIDIA's Apex removed the package in January 2026.

* ``parallel_state``: which ranks share a model.
* ``tensor_parallel``: layers that are split over ranks.
* ``pipeline_parallel``: schedules for models whose layers are on different ranks.

Names that apex leaves out on purpose raise ``NotImplementedError``, which says what to use instead.
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
