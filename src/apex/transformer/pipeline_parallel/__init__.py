"""Training of a model whose layers are split over stages, as in Megatron's programs."""

from apex._upstream.missing import explain_attributes
from apex.transformer.pipeline_parallel.schedules import get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules.common import build_model

__all__ = ["build_model", "get_forward_backward_func"]

explain_attributes(__name__)
