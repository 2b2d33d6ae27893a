"""``amp_C``: what compiled Apex offered at the top level for lists of tensors.

Each function is called as ``f(chunk_size, noop_flag, tensor_lists, ...)``, by position only.
``chunk_size`` is taken and not needed. ``noop_flag`` is a one-element tensor; who reads or sets it
is said at each function, and it is only ever set to 1: clearing it is the caller's. The lists are
equally long, and the tensors at one position have the same number of elements; empty ones are
passed over. Every floating dtype is taken, mixed within a list too, on any device. Numbers may be
tensors of one element.

Nothing waits for a device, except for numbers that the original takes from the host and that are
given as tensors on a device: betas, eps, momentum and dampening.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from apex.ops.adagrad import Adagrad, adagrad_
from apex.ops.adam import Adam, adam_
from apex.ops.lamb import Lamb, lamb_
from apex.ops.lamb_stages import coefficient, rates, stage1_, stage2_
from apex.ops.lists import checked, lowered, number, raising
from apex.ops.loss_scale import update_
from apex.ops.multi_tensor import Column, grouped
from apex.ops.norms import square_sums
from apex.ops.novograd import NovoGrad, novograd_
from apex.ops.scale import axpby_, scale_
from apex.ops.sgd import SGD, sgd_
from apex.ops.storage import How

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

Lists = Sequence[Sequence[torch.Tensor]]
Number = float | torch.Tensor
Norms = tuple[torch.Tensor, torch.Tensor]

_16_BITS = (torch.float16, torch.bfloat16)


# -- scaling and norms ---------------------------------------------------------------------------


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: Number, /
) -> None:
    """``[in, out]``: write ``scale * in``, rounded once; ``out`` may be ``in``.

    Sets the flag if an element of ``in`` is not finite. Such elements are written all the same, and
    a finite one that becomes too large for ``out`` is not reported.
    """
    x, out = checked("multi_tensor_scale", tensor_lists, (2,))
    device = x[0].device
    with raising(noop_flag, device) as flag:
        scale_(x, out, number(scale, device), flag)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    a: Number,
    b: Number,
    arg_to_check: int,
    /,
) -> None:
    """``[x, y, out]``: write ``a * x + b * y``, rounded once; ``out`` may be ``x`` or ``y``.

    Sets the flag if an element is not finite: of both inputs for ``arg_to_check`` -1, of ``x`` for
    0, of ``y`` for 1.
    """
    x, y, out = checked("multi_tensor_axpby", tensor_lists, (3,))
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(
            f"multi_tensor_axpby: arg_to_check was {arg_to_check}; allowed are -1 (both inputs), "
            "0 (x) and 1 (y)."
        )
    device = x[0].device
    with raising(noop_flag, device) as flag:
        which = (arg_to_check != 1, arg_to_check != 0)
        axpby_(x, y, out, number(a, device), number(b, device), flag, checked=which)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """``[x]``: Euclidean norm of everything, float32 ``(1,)``, and on request of each tensor.

    Sets the flag if the norm is not finite, be it that squares exceed float32.
    """
    (x,) = checked("multi_tensor_l2norm", tensor_lists, (1,))
    return _norms(square_sums(x), noop_flag, per_tensor_python)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """As :func:`multi_tensor_l2norm`.

    The original leaves the result undefined where the flag is set; here it is the norm.
    """
    (x,) = checked("multi_tensor_l2norm_mp", tensor_lists, (1,))
    return _norms(square_sums(x), noop_flag, per_tensor_python)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    scale: Number,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """``[in, out]``: write ``scale * in`` and measure ``in``, as :func:`multi_tensor_l2norm`."""
    x, out = checked("multi_tensor_l2norm_scale", tensor_lists, (2,))
    sums = scale_(x, out, number(scale, x[0].device), norms=True)
    assert sums is not None  # asked for
    return _norms(sums, noop_flag, per_tensor_python)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: Number,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """``[x]``: measure ``inv_scale * x``, as :func:`multi_tensor_l2norm`; ``x`` stays."""
    (x,) = checked("multi_tensor_unscale_l2norm", tensor_lists, (1,))
    sums = square_sums(x, factor=number(inv_scale, x[0].device))
    return _norms(sums, noop_flag, per_tensor_python)


def _norms(sums: torch.Tensor, noop_flag: torch.Tensor, per_tensor: bool | None) -> Norms:
    norm = sums.sum().sqrt().reshape(1)
    _flag_norms(norm, noop_flag)
    return norm, sums.sqrt() if per_tensor else sums.new_empty(0)


def _flag_norms(norms: torch.Tensor, noop_flag: torch.Tensor) -> None:
    with raising(noop_flag, norms.device) as flag:
        flag.masked_fill_(norms.isfinite().all().logical_not(), 1)


# -- optimizers ----------------------------------------------------------------------------------


@torch.no_grad()
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
    """``[grad, param, buffer]`` and perhaps 16-bit copies: one step of :mod:`apex.ops.sgd`.

    Does nothing if the flag is set. With ``first_run`` the buffer becomes the gradient.

    Raises:
        RuntimeError: Gradients differ in dtype from weights that have no 16-bit copies, or weights
            that have are not float32.
    """
    columns = checked("multi_tensor_sgd", tensor_lists, (3, 4))
    _check_sgd_types(columns)
    device = columns[0][0].device
    numbers = SGD(
        number(lr, device),
        float(momentum),
        float(dampening),
        number(wd, device),
        bool(nesterov),
        bool(wd_after_momentum),
    )
    factor, noop = number(scale, device), lowered(noop_flag, device)
    for positions, some in grouped(columns):
        how = How(factor, noop, extra=some[3] if len(some) == 4 else None)
        first = torch.ones(len(positions), device=device) if first_run else None
        taking_part = some[:3] if numbers.momentum else some[:2]
        sgd_(taking_part, numbers, how, first if numbers.momentum else None)


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


@torch.no_grad()
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
    """``[grad, param, exp_avg, exp_avg_sq]``: one step of :mod:`apex.ops.adam`.

    ``mode`` 0 is Adam with an L2 penalty, 1 is AdamW. The flag is ignored.
    """
    columns = checked("multi_tensor_adam", tensor_lists, (4,))
    device = columns[0][0].device
    numbers = _adam(
        device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, int(step)
    )
    for _, some in grouped(columns):
        adam_(some, numbers)


@torch.no_grad()
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
    numbers = _adam(device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, step)
    factor, noop = number(inv_scale, device), _is_one(noop_flag, device)
    for _, some in grouped(columns):
        adam_(some, numbers, How(factor, noop, write_grads=True))


@torch.no_grad()
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
    numbers = _adam(device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, step)
    factor, noop = number(inv_scale, device), _is_one(noop_flag, device)
    for _, (grads, params, exp_avgs, exp_avg_sqs, masters) in grouped(columns):
        how = How(factor, noop, write_grads=True, extra=params)
        adam_([grads, masters, exp_avgs, exp_avg_sqs], numbers, how)


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
        adam_w_mode=_mode("multi_tensor_adam", mode),
        bias_correction=int(bias_correction) == 1,
        step=_step(step, device),
    )


def _step(step: int | torch.Tensor, device: torch.device) -> int | torch.Tensor:
    if not isinstance(step, torch.Tensor) or step.device.type == "cpu":
        return int(step)
    return step.detach().to(device, non_blocking=True)


def _is_one(noop_flag: torch.Tensor, device: torch.device) -> torch.Tensor:
    return (lowered(noop_flag, device) == 1).to(torch.int32)


def _mode(name: str, mode: int) -> bool:
    if mode not in (0, 1):
        raise RuntimeError(
            f"{name}: mode was {mode}; allowed are 0 (weight decay in the gradient) and 1 "
            "(decoupled)."
        )
    return bool(mode)


@torch.no_grad()
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
    """``[grad, param, sum]``: one step of :mod:`apex.ops.adagrad`; the flag is ignored.

    ``mode`` 0 puts the weight decay into the gradient, 1 decouples it.
    """
    columns = checked("multi_tensor_adagrad", tensor_lists, (3,))
    device = columns[0][0].device
    decoupled = _mode("multi_tensor_adagrad", mode)
    numbers = Adagrad(number(lr, device), float(epsilon), number(weight_decay, device), decoupled)
    for _, some in grouped(columns):
        adagrad_(some, numbers)


@torch.no_grad()
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
    """``[grad, param, exp_avg]``: one step of :mod:`apex.ops.novograd`.

    ``grad_norms``, float32 with a number for each tensor, is updated first; ``norm_type`` 0 takes
    largest magnitudes, any other Euclidean norms. ``mode`` 0 puts the weight decay into the moment,
    1 decouples it. Sets the flag if a norm is not finite, and steps all the same.
    """
    columns = checked("multi_tensor_novograd", tensor_lists, (3,))
    device = columns[0][0].device
    norms = _one_each("grad_norms", grad_norms, columns[0])
    numbers = NovoGrad(
        number(lr, device),
        float(beta1),
        float(beta2),
        float(epsilon),
        number(weight_decay, device),
        reg_inside_moment=not _mode("multi_tensor_novograd", mode),
        grad_averaging=bool(grad_averaging),
        norm_type=int(norm_type),
        bias_correction=int(bias_correction) == 1,
        step=_step(step, device),
    )
    for index, some in _indexed(columns, device):
        mine = norms[index]
        novograd_(some, mine, numbers)
        norms = norms.index_copy(0, index, mine)
    grad_norms.copy_(norms.reshape(grad_norms.shape))
    _flag_norms(norms, noop_flag)


@torch.no_grad()
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
    """``[grad, param, exp_avg, exp_avg_sq]``: one step of :mod:`apex.ops.lamb`.

    Gradients are clipped by ``global_grad_norm`` to ``max_grad_norm``, where 0 means not at all,
    and left holding the term. ``mode`` 0 is an L2 penalty, 1 a decoupled decay. The flag is
    ignored.
    """
    columns = checked("multi_tensor_lamb", tensor_lists, (4,))
    device = columns[0][0].device
    numbers = _lamb(
        device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging,
        use_nvlamb_python, step,
    )  # fmt: skip
    factor = _clip(global_grad_norm, max_grad_norm, device)
    for _, some in grouped(columns):
        lamb_(some, numbers, How(factor))


@torch.no_grad()
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
    numbers = _lamb(
        device, lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction, grad_averaging,
        use_nvlamb_python, step,
    )  # fmt: skip
    factor = number(inv_scale, device) * _clip(global_grad_norm, max_grad_norm, device)
    noop = lowered(noop_flag, device)
    for _, some in grouped(columns):
        how = How(factor, noop, extra=some[4] if len(some) == 5 else None)
        lamb_(some[:4], numbers, how)


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
        adam_w_mode=_mode("multi_tensor_lamb", mode),
        bias_correction=int(bias_correction) == 1,
        grad_averaging=bool(grad_averaging),
        use_nvlamb=bool(use_nvlamb),
        step=_step(step, device),
    )


def _clip(norm: Number, max_norm: Number, device: torch.device) -> Number:
    return coefficient(number(norm, device), number(max_norm, device))


@torch.no_grad()
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
    decays = _one_each("per_tensor_decay", per_tensor_decay, columns[0])
    factor = _clip(global_grad_norm, max_global_grad_norm, device)
    for index, some in _indexed(columns, device):
        stage1_(
            some,
            decays[index],
            factor=factor,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(epsilon),
            step=_step(step, device) + 1,
        )


@torch.no_grad()
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
    sizes = _one_each("per_tensor_param_norm", per_tensor_param_norm, params)
    terms = _one_each("per_tensor_update_norm", per_tensor_update_norm, params)
    adapts = 1.0 if use_nvlamb_python else number(weight_decay, device)
    speeds = rates(sizes, terms, number(lr, device), adapts)
    for index, (some, theirs) in _indexed([params, updates], device):
        stage2_(some, theirs, speeds[index])


def _one_each(name: str, numbers: torch.Tensor, column: Column) -> torch.Tensor:
    if numbers.numel() != len(column):
        raise RuntimeError(f"{name} has {numbers.numel()} elements for {len(column)} tensors.")
    return numbers.detach().to(column[0].device, torch.float32, non_blocking=True).reshape(-1)


def _indexed(
    columns: Sequence[Column], device: torch.device
) -> Iterator[tuple[torch.Tensor, list[list[torch.Tensor]]]]:
    """The groups, each with its positions on the device."""
    for positions, some in grouped(columns):
        yield torch.tensor(positions).to(device, non_blocking=True), some


# -- the loss scale ------------------------------------------------------------------------------


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    /,
) -> torch.Tensor:
    """Update a loss scale and its counters in place, see :mod:`apex.ops.loss_scale`.

    Returns:
        ``current_scale``.
    """
    update_(
        current_scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor=float(growth_factor),
        backoff_factor=float(backoff_factor),
        growth_interval=int(growth_interval),
        hysteresis=int(hysteresis),
    )
    return current_scale
