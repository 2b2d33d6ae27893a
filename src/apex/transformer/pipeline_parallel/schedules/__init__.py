"""Schedules: in which order the micro-batches of a step go forward and backward."""

from collections.abc import Callable
from typing import Any

from apex.transformer._refused import refuse
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_no_pipelining import (
    forward_backward_no_pipelining,
)
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_without_interleaving import (
    forward_backward_pipelining_without_interleaving,
)

__all__ = ["get_forward_backward_func"]


def get_forward_backward_func(
    virtual_pipeline_model_parallel_size: int | None, pipeline_model_parallel_size: int
) -> Callable[..., list[Any]]:
    """Return the schedule for a number of stages.

    Raises:
        NotImplementedError: Each stage has several parts of the model.
    """
    if pipeline_model_parallel_size == 1:
        return forward_backward_no_pipelining
    if virtual_pipeline_model_parallel_size is not None:
        refuse(
            "pipeline_parallel.get_forward_backward_func(virtual_pipeline_model_parallel_size=...)"
        )
    return forward_backward_pipelining_without_interleaving
