"""All micro-batches one after the other, on a model that is not divided into stages."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from apex.transformer.pipeline_parallel import utils
from apex.transformer.pipeline_parallel.schedules import common


def forward_backward_no_pipelining(
    forward_step_func: Callable[..., Any],
    batch: Any,
    model: Any,
    *,
    forward_only: bool,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Accumulate the gradients of all micro-batches of a step.

    Args:
        forward_step_func: As for ``schedules.common.forward_step``.
        batch: A list of tensors with all micro-batches, or what the function understands.
        model: One, or a list of one.
        forward_only: Whether to leave the backward out.
        dtype: Of ``torch.autocast``, if float16 or bfloat16.
        grad_scaler: Scales the losses.
        disable_autocast: Whether to leave ``torch.autocast`` alone.
        custom_sync_context_handler: Makes a context for all micro-batches but the last, in which
            gradients are not reduced over ranks; by default the model's ``no_sync``.
        **kwargs: Arguments of the other schedule; without effect.

    Returns:
        What each micro-batch reports.
    """
    model = common.one_model("forward_backward_no_pipelining", model, kwargs)
    default = getattr(model, "no_sync", contextlib.nullcontext)
    kind, count = utils.get_model_type(model), utils.get_num_microbatches()
    reported: list[Any] = []
    with contextlib.ExitStack() as sync:
        sync.enter_context((custom_sync_context_handler or default)())
        for k in range(count):
            if k == count - 1:
                sync.close()
            micro_batch = utils.get_kth_microbatch(batch, k)
            output = common.forward_step(
                forward_step_func, micro_batch, model, None, reported, dtype, disable_autocast
            )
            if not forward_only:
                common.backward_step(None, output, None, kind, grad_scaler=grad_scaler)
    return reported
