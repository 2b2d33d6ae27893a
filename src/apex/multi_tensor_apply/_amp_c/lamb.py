"""``amp_C``: steps of LAMB over lists of tensors, whole or in two stages."""

from __future__ import annotations

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
from apex.ops.lists.columns import grouped, taken
from apex.ops.lists.storage import StepOptions
from apex.ops.updates.lamb import Lamb, lamb_, trusted_rates
from apex.ops.updates.lamb_stages import coefficient, stage1_, stage2_


@entry
def multi_tensor_lamb(  # noqa: PLR0913  (the original's)
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: Number,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Number,
    max_grad_norm: Number,
    use_nvlamb_python: bool | None,
    /,
) -> None:
    """``[grad, param, exp_avg, exp_avg_sq]``: one step of :mod:`apex.ops.updates.lamb`.

    Gradients are clipped by ``global_grad_norm`` to ``max_grad_norm``, where 0 means not at all,
    and left holding the term. ``mode`` 0 is an L2 penalty, 1 a decoupled decay. The flag is
    ignored.
    """
    columns = checked("multi_tensor_lamb", tensor_lists, (4,))
    device = columns[0][0].device
    hyper = _lamb(
        device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging,
        use_nvlamb_python, step,
    )  # fmt: skip
    factor = _clip(global_grad_norm, max_grad_norm, device)
    for _, some in grouped(columns):
        lamb_(some, hyper, StepOptions(factor))


@entry
def multi_tensor_lamb_mp(  # noqa: PLR0913  (the original's)
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | torch.Tensor,
    bias_correction: int,
    weight_decay: Number,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Number,
    max_grad_norm: Number,
    use_nvlamb_python: bool | None,
    found_inf: object,
    inv_scale: Number,
    /,
) -> None:
    """As :func:`multi_tensor_lamb`, on scaled gradients; a fifth list gets the rounded weights.

    Gradients are multiplied by ``inv_scale`` too. Norm and ``max_grad_norm`` are those of the
    scaled gradients. Does nothing if the flag is set; ``found_inf`` is ignored.
    """
    columns = checked("multi_tensor_lamb_mp", tensor_lists, (4, 5))
    device = columns[0][0].device
    hyper = _lamb(
        device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging,
        use_nvlamb_python, step,
    )  # fmt: skip
    factor = number(inv_scale, device) * _clip(global_grad_norm, max_grad_norm, device)
    noop = flag_to_read(noop_flag, device)
    for _, some in grouped(columns):
        options = StepOptions(factor, noop, extra=some[4] if len(some) == 5 else None)
        lamb_(some[:4], hyper, options)


def _lamb(
    device: torch.device,
    lr: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: Number,
    mode: int,
    bias_correction: int,
    grad_averaging: int,
    use_nvlamb: bool | None,
    step: int | torch.Tensor,
) -> Lamb:
    return Lamb(
        number(lr, device),
        float(beta1),
        float(beta2),
        float(epsilon),
        number(weight_decay, device),
        adam_w_mode=is_decoupled("multi_tensor_lamb", mode),
        bias_correction=int(bias_correction) == 1,
        grad_averaging=bool(grad_averaging),
        use_nvlamb=bool(use_nvlamb),
        step=step_number(step, device),
    )


def _clip(norm: Number, max_norm: Number, device: torch.device) -> Number:
    return coefficient(number(norm, device), number(max_norm, device))


@entry
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_decay: torch.Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Number,
    max_global_grad_norm: Number,
    /,
) -> None:
    """``[grad, param, exp_avg, exp_avg_sq, update]``: write moments and LAMB's term.

    ``step`` counts from 0. Gradients are clipped as in :func:`multi_tensor_lamb`. The flag is
    ignored.
    """
    columns = checked("multi_tensor_lamb_stage1_cuda", tensor_lists, (5,))
    device = columns[0][0].device
    decays = one_each("per_tensor_decay", per_tensor_decay, columns[0])
    factor = _clip(global_grad_norm, max_global_grad_norm, device)
    for positions, some in grouped(columns):
        stage1_(
            some,
            taken(decays, positions),
            factor=factor,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(epsilon),
            step=step_number(step, device) + 1,
        )


@entry
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: Number,
    weight_decay: Number,
    use_nvlamb_python: bool | None,
    /,
) -> None:
    """``[param, update]``: subtract ``lr`` times the trust ratio times ``update``.

    The ratio is 1 where a norm is 0, and without weight decay unless NVLAMB is asked for. The flag
    is ignored.
    """
    params, updates = checked("multi_tensor_lamb_stage2_cuda", tensor_lists, (2,))
    device = params[0].device
    sizes = one_each("per_tensor_param_norm", per_tensor_param_norm, params)
    terms = one_each("per_tensor_update_norm", per_tensor_update_norm, params)
    adapts = 1.0 if use_nvlamb_python else number(weight_decay, device)
    each_rate = trusted_rates(sizes, terms, number(lr, device), adapts)
    for positions, (some, theirs) in grouped([params, updates]):
        stage2_(some, theirs, taken(each_rate, positions))
