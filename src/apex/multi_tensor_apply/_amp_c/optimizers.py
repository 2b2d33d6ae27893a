"""``amp_C``: steps of SGD, Adam, Adagrad and NovoGrad over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.multi_tensor_apply._amp_c.arguments import (
    Lists,
    Number,
    checked,
    entry,
    flag_to_read,
    is_decoupled,
    number,
    one_each,
    step_number,
)
from apex.multi_tensor_apply._amp_c.scaling import flag_norms
from apex.ops.lists.columns import Column, grouped, joined, taken
from apex.ops.lists.storage import StepOptions
from apex.ops.updates.adagrad import Adagrad, adagrad_
from apex.ops.updates.adam import Adam, adam_
from apex.ops.updates.novograd import NovoGrad, novograd_
from apex.ops.updates.sgd import SGD, sgd_

_16_BITS = (torch.float16, torch.bfloat16)


@entry
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: Number,
    momentum: float,
    dampening: float,
    lr: Number,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: Number,
    /,
) -> None:
    """``[grad, param, buffer]`` and perhaps 16-bit copies: one step of :mod:`apex.ops.updates.sgd`.

    Does nothing if the flag is set. With ``first_run`` the buffer becomes the gradient.

    Raises:
        RuntimeError: Gradients differ in dtype from weights that have no 16-bit copies, or weights
            that have are not float32.
    """
    columns = checked("multi_tensor_sgd", tensor_lists, (3, 4))
    _check_sgd_types(columns)
    device = columns[0][0].device
    hyper = SGD(
        number(lr, device),
        float(momentum),
        float(dampening),
        number(wd, device),
        bool(nesterov),
        bool(wd_after_momentum),
    )
    factor, noop = number(scale, device), flag_to_read(noop_flag, device)
    for positions, some in grouped(columns):
        options = StepOptions(factor, noop, extra=some[3] if len(some) == 4 else None)
        first = torch.ones(len(positions), dtype=torch.float32, device=device)
        taking_part = some[:3] if hyper.momentum else some[:2]
        sgd_(taking_part, hyper, options, first if first_run and hyper.momentum else None)


def _check_sgd_types(columns: Sequence[Column]) -> None:
    for grad, param, *more in zip(*columns, strict=True):
        copies = more[1:]
        known = {grad.dtype, param.dtype} <= {torch.float32, *_16_BITS}
        if not copies:
            fits = known and grad.dtype == param.dtype
        else:
            fits = known and param.dtype == torch.float32 and copies[0].dtype in _16_BITS
        if not fits:
            kinds = ", ".join(str(tensor.dtype) for tensor in (grad, param, *more))
            raise RuntimeError(
                "multi_tensor_sgd only supports some combinations of gradient & weight types: "
                "both of one type, or float32 weights with 16-bit copies in a fourth list. Given: "
                f"{kinds}."
            )


@entry
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: Number,
    /,
) -> None:
    """``[grad, param, exp_avg, exp_avg_sq]``: one step of :mod:`apex.ops.updates.adam`.

    ``mode`` 0 is Adam with an L2 penalty, 1 is AdamW. The flag is ignored.
    """
    columns = checked("multi_tensor_adam", tensor_lists, (4,))
    device = columns[0][0].device
    hyper = _adam(device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, int(step))
    for _, some in grouped(columns):
        adam_(some, hyper)


@entry
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: Number,
    inv_scale: Number,
    /,
) -> None:
    """As :func:`multi_tensor_adam`, with ``lr``, ``step`` and ``inv_scale`` read on the device.

    Gradients are left multiplied by ``inv_scale``. Does nothing if the flag is 1.
    """
    columns = checked("multi_tensor_adam_capturable", tensor_lists, (4,))
    device = columns[0][0].device
    hyper = _adam(device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, step)
    factor, noop = number(inv_scale, device), _is_one(noop_flag, device)
    for _, some in grouped(columns):
        adam_(some, hyper, StepOptions(factor, noop, write_grads=True))


@entry
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: Number,
    inv_scale: Number,
    /,
) -> None:
    """As :func:`multi_tensor_adam_capturable`, with masters in a fifth list.

    The step is taken on the masters; ``param`` gets the new values, rounded.
    """
    columns = checked("multi_tensor_adam_capturable_master", tensor_lists, (5,))
    device = columns[0][0].device
    hyper = _adam(device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, step)
    factor, noop = number(inv_scale, device), _is_one(noop_flag, device)
    for _, (grads, params, exp_avgs, exp_avg_sqs, masters) in grouped(columns):
        options = StepOptions(factor, noop, write_grads=True, extra=params)
        adam_([grads, masters, exp_avgs, exp_avg_sqs], hyper, options)


def _adam(
    device: torch.device,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: Number,
    mode: int,
    bias_correction: int,
    step: int | torch.Tensor,
) -> Adam:
    return Adam(
        number(lr, device),
        float(beta1),
        float(beta2),
        float(epsilon),
        number(weight_decay, device),
        adam_w_mode=is_decoupled("multi_tensor_adam", mode),
        bias_correction=int(bias_correction) == 1,
        step=step_number(step, device),
    )


def _is_one(noop_flag: torch.Tensor, device: torch.device) -> torch.Tensor:
    return (flag_to_read(noop_flag, device) == 1).to(torch.int32)


@entry
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    epsilon: float,
    mode: int,
    weight_decay: Number,
    /,
) -> None:
    """``[grad, param, sum]``: one step of :mod:`apex.ops.updates.adagrad`; the flag is ignored.

    ``mode`` 0 puts the weight decay into the gradient, 1 decouples it.
    """
    columns = checked("multi_tensor_adagrad", tensor_lists, (3,))
    device = columns[0][0].device
    decoupled = is_decoupled("multi_tensor_adagrad", mode)
    hyper = Adagrad(number(lr, device), float(epsilon), number(weight_decay, device), decoupled)
    for _, some in grouped(columns):
        adagrad_(some, hyper)


@entry
def multi_tensor_novograd(  # noqa: PLR0913  (the original's)
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    grad_norms: torch.Tensor,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: Number,
    grad_averaging: int,
    mode: int,
    norm_type: int,
    /,
) -> None:
    """``[grad, param, exp_avg]``: one step of :mod:`apex.ops.updates.novograd`.

    ``grad_norms``, float32 with a number for each tensor, is updated first; ``norm_type`` 0 takes
    largest magnitudes, any other Euclidean norms. ``mode`` 0 puts the weight decay into the moment,
    1 decouples it. Sets the flag if a norm is not finite, and steps all the same.
    """
    columns = checked("multi_tensor_novograd", tensor_lists, (3,))
    device = columns[0][0].device
    norms = one_each("grad_norms", grad_norms, columns[0])
    hyper = NovoGrad(
        number(lr, device),
        float(beta1),
        float(beta2),
        float(epsilon),
        number(weight_decay, device),
        reg_inside_moment=not is_decoupled("multi_tensor_novograd", mode),
        grad_averaging=bool(grad_averaging),
        norm_type=int(norm_type),
        bias_correction=int(bias_correction) == 1,
        step=step_number(step, device),
    )
    parts = []
    for positions, some in grouped(columns):
        mine = taken(norms, positions).clone()
        novograd_(some, mine, hyper)
        parts.append((positions, mine))
    norms = joined(parts)
    grad_norms.copy_(norms.reshape(grad_norms.shape))
    flag_norms(norms, noop_flag)
