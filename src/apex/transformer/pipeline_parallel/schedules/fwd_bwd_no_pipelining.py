"""Run all micro-batches one after the other, on a model that is not split into stages."""

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
        forward_step_func: As in ``schedules.common.forward_step``.
        batch: A list of tensors with all micro-batches, or another object that the function
            accepts.
        model: A model, or a list of one model.
        forward_only: Run no backward passes.
        dtype: dtype of ``torch.autocast``, if it is float16 or bfloat16.
        grad_scaler: ``GradScaler`` that scales the losses.
        disable_autocast: Do not switch ``torch.autocast`` on or off.
        custom_sync_context_handler: Function that makes a context for all micro-batches except the
            last one. Gradients are not reduced over ranks in it. The default is the model's
            ``no_sync``.
        **kwargs: Arguments of the other schedule. They have no effect.

    Returns:
        List of the reports of all micro-batches.
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
