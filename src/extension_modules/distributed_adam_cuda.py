"""Old name of NVIDIA's Apex: steps of Adam over shards, for its distributed Adam.

A module of compiled Apex; :mod:`apex.contrib.optimizers.distributed_fused_adam` here does not need
it. Arguments are positional only. For ``chunk_size`` and lists see ``amp_C``. ``mode`` 0 is Adam
with an L2 penalty, 1 AdamW. Gradients are multiplied by ``grad_scale``, a number or a one-element
tensor, and left as they are. Nothing happens if the flag is not 0.
"""

from typing import Any

import torch

from apex.multi_tensor_apply.list_arguments import flag_to_read, list_function, numbers_of
from apex.ops.lists.storage import LOW_BITS, StepOptions
from apex.ops.lists.tensor_lists import grouped
from apex.ops.updates.adam import Adam, adam_

__all__ = [
    "multi_tensor_fused_adam",
    "multi_tensor_fused_adam_capturable",
    "multi_tensor_fused_adam_with_param_remainders",
]

_NUMBERS = "grad_scale lr beta1 beta2 epsilon step mode bias_correction weight_decay"


def _step(given: Any) -> None:
    params, *moments, grads, outs = given.columns
    noop, numbers = flag_to_read(given.noop_flag, given.device), numbers_of(Adam, given)
    for _, some, dense in grouped([grads, params, *moments, outs]):
        adam_(some[:4], numbers, StepOptions(given.grad_scale, noop, extra=some[4], dense=dense))


@list_function(5, _NUMBERS)
def multi_tensor_fused_adam(given: Any) -> None:
    """``[param, exp_avg, exp_avg_sq, grad, out]``: one step; ``out`` gets the weights, rounded."""
    _step(given)


@list_function(5, _NUMBERS)
def multi_tensor_fused_adam_capturable(given: Any) -> None:
    """As :func:`multi_tensor_fused_adam`, with ``lr`` and ``step`` read on the device."""
    _step(given)


@list_function(6, _NUMBERS)
def _with_remainders(given: Any) -> None:
    params, lows, *moments, grads, outs = given.columns
    noop, numbers = flag_to_read(given.noop_flag, given.device), numbers_of(Adam, given)
    weights = [param.clone() for param in params]
    lows = [low.view(torch.int16) for low in lows]
    options = StepOptions(given.grad_scale, noop, storage=LOW_BITS)
    for _, some, dense in grouped([grads, weights, *moments, lows]):
        adam_(some[:4], numbers, options._replace(extra=some[4], dense=dense))
    is_taken = noop.reshape(()) == 0
    for out, weight in zip(outs, weights, strict=True):
        out.copy_(torch.where(is_taken, weight, out))


def multi_tensor_fused_adam_with_param_remainders(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]],
    grad_scale: Any, lr: Any, beta1: float, beta2: float, epsilon: float, step: Any, mode: int,
    bias_correction: int, weight_decay: Any, /,
) -> None:  # fmt: skip
    """``[param, remainder, exp_avg, exp_avg_sq, grad, out]``: one step of float32 weights.

    Their upper halves are in ``param``, bfloat16, and the 16 low bits in ``remainder``, int16; see
    :func:`apex.ops.lists.storage.split_bits`. ``out``, bfloat16, gets the new upper halves.
    """
    lists = [*tensor_lists]
    if len(lists) > 1:
        lists[1] = [low.view(torch.bfloat16) for low in lists[1]]  # lists are of floating types
    numbers = grad_scale, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
    _with_remainders(chunk_size, noop_flag, lists, *numbers)
