"""The functions of ``amp_C``: one each, with the numbers that it takes and how many lists.

See the module ``amp_C`` for what is common to them. ``numbers`` names what follows
``(chunk_size, noop_flag, tensor_lists)``; :mod:`apex.multi_tensor_apply.list_arguments` says what
is taken for each name. A function gets all of it as attributes of ``given``.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.multi_tensor_apply.list_arguments import (
    entry,
    flag_to_read,
    flag_to_set,
    list_function,
    numbers_of,
    one_each,
)
from apex.ops.lists.multi_tensor import run
from apex.ops.lists.overlaps import own_copies, write_back
from apex.ops.lists.scale import axpby_, scale_
from apex.ops.lists.storage import DEFAULT_OPTIONS, StepOptions
from apex.ops.lists.tensor_lists import Scalar, grouped, taken
from apex.ops.lists.tensor_norms import norms_of, square_sums
from apex.ops.updates.adagrad import Adagrad, adagrad_
from apex.ops.updates.adam import Adam, adam_, unbiased
from apex.ops.updates.lamb import (
    APPLY,
    TERM,
    ApplyScalars,
    Lamb,
    TermScalars,
    lamb_,
    trusted_rates,
)
from apex.ops.updates.novograd import NovoGrad, novograd_
from apex.ops.updates.sgd import SGD, sgd_

Norms = tuple[torch.Tensor, torch.Tensor]

_16_BITS = (torch.float16, torch.bfloat16)
_ADAM = "lr beta1 beta2 epsilon step mode bias_correction weight_decay"
_LAMB = (
    "lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode "
    "global_grad_norm max_grad_norm use_nvlamb_python"
)


# -- scaling, adding and norms ---------------------------------------------------------------------


@list_function(2, "scale")
def multi_tensor_scale(given: Any) -> None:
    """``[in, out]``: write ``scale * in``, rounded once; ``out`` may be ``in``.

    Sets the flag if an element of ``in`` is not finite. Such elements are written all the same, and
    a finite one that becomes too large for ``out`` is not reported.
    """
    x, out = given.columns
    with flag_to_set(given.noop_flag, given.device) as flag:
        scale_(x, out, given.scale, flag)


@list_function(3, "a b arg_to_check")
def multi_tensor_axpby(given: Any) -> None:
    """``[x, y, out]``: write ``a * x + b * y``, rounded once; ``out`` may be ``x`` or ``y``.

    Sets the flag if an element is not finite: of both inputs for ``arg_to_check`` -1, of ``x`` for
    0, of ``y`` for 1.
    """
    which = given.arg_to_check
    if which not in (-1, 0, 1):
        raise RuntimeError(
            f"multi_tensor_axpby: arg_to_check was {which}; allowed are -1 (both inputs), "
            "0 (x) and 1 (y)."
        )
    x, y, out = given.columns
    with flag_to_set(given.noop_flag, given.device) as flag:
        axpby_(x, y, out, given.a, given.b, flag, checked=(which != 1, which != 0))


@list_function(1, "per_tensor_python")
def multi_tensor_l2norm(given: Any) -> Norms:
    """``[x]``: Euclidean norm of everything, float32 ``(1,)``, and on request of each tensor.

    Sets the flag if the norm is not finite, be it that squares exceed float32.
    """
    return _norms(given, square_sums(given.columns[0]))


@list_function(1, "per_tensor_python")
def multi_tensor_l2norm_mp(given: Any) -> Norms:
    """As :func:`multi_tensor_l2norm`.

    The original leaves the result undefined where the flag is set; here it is the norm.
    """
    return _norms(given, square_sums(given.columns[0]))


@list_function(2, "scale per_tensor_python")
def multi_tensor_l2norm_scale(given: Any) -> Norms:
    """``[in, out]``: write ``scale * in`` and measure ``in``, as :func:`multi_tensor_l2norm`."""
    x, out = given.columns
    return _norms(given, scale_(x, out, given.scale, norms=True))


@list_function(1, "inv_scale per_tensor_python")
def multi_tensor_unscale_l2norm(given: Any) -> Norms:
    """``[x]``: measure ``inv_scale * x``, as :func:`multi_tensor_l2norm`; ``x`` stays."""
    return _norms(given, square_sums(given.columns[0], factor=given.inv_scale))


def _norms(given: Any, sums: torch.Tensor | None) -> Norms:
    assert sums is not None  # asked for
    with flag_to_set(given.noop_flag, sums.device) as flag:
        return norms_of(sums, flag, each=bool(given.per_tensor_python))


def _flag_norms(norms: torch.Tensor, noop_flag: torch.Tensor) -> None:
    """Set the flag if a norm is not finite."""
    with flag_to_set(noop_flag, norms.device) as flag:
        flag.masked_fill_(norms.isfinite().all().logical_not(), 1)


@entry
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
    """Update a dynamic loss scale with hysteresis and its counters, where they are.

    On an overflow, ``found_inf`` above 0, the hysteresis counter goes down. The scale backs off
    once it has reached 0, and at each overflow after that until a step is clean.
    ``growth_interval`` clean steps in a row raise the scale, unless it would become infinite. There
    is no floor.

    Returns:
        ``current_scale``.

    Source: Megatron-LM's dynamic gradient scaler; Micikevicius et al., arXiv:1710.03740, section
    3.2.
    """
    shape = current_scale.shape
    bad = found_inf.reshape(shape) > 0
    left = hysteresis_tracker.reshape(shape) - bad.to(hysteresis_tracker.dtype)
    clean_steps = growth_tracker.reshape(shape) + 1
    grows = ~bad & (clean_steps == int(growth_interval))
    larger = current_scale * float(growth_factor)
    larger = torch.where(grows & larger.isfinite(), larger, current_scale)
    smaller = current_scale * float(backoff_factor)
    current_scale.copy_(torch.where(bad & (left <= 0), smaller, larger))
    growth_tracker.copy_(clean_steps.masked_fill(bad | grows, 0).reshape(growth_tracker.shape))
    left = torch.where(bad, left, torch.full_like(left, int(hysteresis)))
    hysteresis_tracker.copy_(left.reshape(hysteresis_tracker.shape))
    return current_scale


# -- steps of optimizers ---------------------------------------------------------------------------


def _stepped(
    step: Any, kind: Any, given: Any, options: StepOptions = DEFAULT_OPTIONS, *, states: int = 9
) -> None:
    """Step the lists; one behind gradients, weights and ``states`` gets the weights, rounded."""
    numbers = numbers_of(kind, given)
    grads, *others = given.columns
    copies = own_copies(grads) if options.write_grads or step is lamb_ else {}
    mine = [copies.get(number, grad) for number, grad in enumerate(grads)]
    for _, some, dense in grouped([mine, *others]):
        extra = some[2 + states] if len(some) > 2 + states else None
        step(some[: 2 + states], numbers, options._replace(extra=extra, dense=dense))
    if options.write_grads:
        write_back(grads, copies)


@list_function((3, 4), "wd momentum dampening lr nesterov first_run wd_after_momentum scale")
def multi_tensor_sgd(given: Any) -> None:
    """``[grad, param, buffer]`` and perhaps 16-bit copies: one step of :mod:`apex.ops.updates.sgd`.

    Does nothing if the flag is set. With ``first_run`` the buffer becomes the gradient.

    Raises:
        RuntimeError: Gradients differ in dtype from weights that have no 16-bit copies, or weights
            that have are not float32.
    """
    _check_sgd_types(given.columns)
    hyper, noop = numbers_of(SGD, given), flag_to_read(given.noop_flag, given.device)
    for positions, (grads, params, buffers, *more), dense in grouped(given.columns):
        options = StepOptions(given.scale, noop, extra=more[0] if more else None, dense=dense)
        first = torch.ones(len(positions), dtype=torch.float32, device=given.device)
        begins = given.first_run and hyper.momentum
        taking_part = [grads, params, buffers] if hyper.momentum else [grads, params]
        sgd_(taking_part, hyper, options, first if begins else None)


def _check_sgd_types(columns: Any) -> None:
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


@list_function(4, _ADAM)
def multi_tensor_adam(given: Any) -> None:
    """``[grad, param, exp_avg, exp_avg_sq]``: one step of :mod:`apex.ops.updates.adam`.

    ``mode`` 0 is Adam with an L2 penalty, 1 is AdamW. The flag is ignored.
    """
    _stepped(adam_, Adam, given)


@list_function(4, f"{_ADAM} inv_scale")
def multi_tensor_adam_capturable(given: Any) -> None:
    """As :func:`multi_tensor_adam`, with ``lr``, ``step`` and ``inv_scale`` read on the device.

    Gradients are left multiplied by ``inv_scale``. Does nothing if the flag is 1.
    """
    noop = (flag_to_read(given.noop_flag, given.device) == 1).to(torch.int32)
    _stepped(adam_, Adam, given, StepOptions(given.inv_scale, noop, write_grads=True))


@list_function(5, f"{_ADAM} inv_scale")
def multi_tensor_adam_capturable_master(given: Any) -> None:
    """As :func:`multi_tensor_adam_capturable`, with masters in a fifth list.

    The step is taken on the masters; ``param`` gets the new values, rounded.
    """
    grads, params, *moments, masters = given.columns
    given.columns = [grads, masters, *moments, params]
    noop = (flag_to_read(given.noop_flag, given.device) == 1).to(torch.int32)
    _stepped(adam_, Adam, given, StepOptions(given.inv_scale, noop, write_grads=True), states=2)


@list_function(3, "lr epsilon mode weight_decay")
def multi_tensor_adagrad(given: Any) -> None:
    """``[grad, param, sum]``: one step of :mod:`apex.ops.updates.adagrad`; the flag is ignored.

    ``mode`` 0 puts the weight decay into the gradient, 1 decouples it.
    """
    _stepped(adagrad_, Adagrad, given)


@list_function(
    3,
    "grad_norms lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode "
    "norm_type",
)
def multi_tensor_novograd(given: Any) -> None:
    """``[grad, param, exp_avg]``: one step of :mod:`apex.ops.updates.novograd`.

    ``grad_norms``, float32 with a number for each tensor, is updated first; ``norm_type`` 0 takes
    largest magnitudes, any other Euclidean norms. ``mode`` 0 puts the weight decay into the moment,
    1 decouples it. Sets the flag if a norm is not finite, and steps all the same.
    """
    norms = one_each("grad_norms", given.grad_norms, given.columns[0]).clone()
    given.columns.append(norms.unbind())
    _stepped(novograd_, NovoGrad, given)
    given.grad_norms.copy_(norms.reshape(given.grad_norms.shape))
    _flag_norms(norms, given.noop_flag)


def _clipping(norm: Scalar, max_norm: Scalar) -> Scalar:
    """What clips a norm to ``max_norm``, which disables clipping where it is 0; nothing waits."""
    if not isinstance(norm, torch.Tensor) and not isinstance(max_norm, torch.Tensor):
        return max_norm / norm if max_norm and norm > max_norm else 1.0
    if not isinstance(max_norm, torch.Tensor):
        assert isinstance(norm, torch.Tensor)
        return torch.where(norm > max_norm, max_norm / norm, 1.0) if max_norm else 1.0
    return torch.where((max_norm < norm) & (max_norm != 0), max_norm / norm, 1.0)


@list_function(4, _LAMB)
def multi_tensor_lamb(given: Any) -> None:
    """``[grad, param, exp_avg, exp_avg_sq]``: one step of :mod:`apex.ops.updates.lamb`.

    Gradients are clipped by ``global_grad_norm`` to ``max_grad_norm``, where 0 means not at all,
    and left holding the term; those that share memory are left as they are. ``mode`` 0 is an L2
    penalty, 1 a decoupled decay. The flag is ignored.
    """
    clipping = _clipping(given.global_grad_norm, given.max_grad_norm)
    _stepped(lamb_, Lamb, given, StepOptions(clipping))


@list_function((4, 5), f"{_LAMB} found_inf inv_scale")
def multi_tensor_lamb_mp(given: Any) -> None:
    """As :func:`multi_tensor_lamb`, on scaled gradients; a fifth list gets the rounded weights.

    Gradients are multiplied by ``inv_scale`` too. Norm and ``max_grad_norm`` are those of the
    scaled gradients. Does nothing if the flag is set; ``found_inf`` is ignored.
    """
    factor = given.inv_scale * _clipping(given.global_grad_norm, given.max_grad_norm)
    noop = flag_to_read(given.noop_flag, given.device)
    _stepped(lamb_, Lamb, given, StepOptions(factor, noop), states=2)


@list_function(
    5,
    "per_tensor_decay step beta1 beta2 epsilon global_grad_norm max_global_grad_norm",
)
def multi_tensor_lamb_stage1_cuda(given: Any) -> None:
    """``[grad, param, exp_avg, exp_avg_sq, update]``: write moments and LAMB's term.

    ``step`` counts from 0. Gradients are clipped as in :func:`multi_tensor_lamb`. The flag is
    ignored.
    """
    decays = one_each("per_tensor_decay", given.per_tensor_decay, given.columns[0])
    factor = _clipping(given.global_grad_norm, given.max_global_grad_norm)
    beta1, beta2, step = given.beta1, given.beta2, given.step + 1
    for positions, some, dense in grouped(given.columns):
        scalars = TermScalars(
            factor, beta1, 1 - beta1, beta2, 1 - beta2, given.epsilon, unbiased(beta1, step),
            unbiased(beta2, step), 0.0, taken(decays, positions),
        )  # fmt: skip
        run(TERM, some, ((2, 1), (3, 2), (4, 0)), scalars, dense=dense)


@list_function(
    2,
    "per_tensor_param_norm per_tensor_update_norm lr weight_decay use_nvlamb_python",
)
def multi_tensor_lamb_stage2_cuda(given: Any) -> None:
    """``[param, update]``: subtract ``lr`` times the trust ratio times ``update``.

    The ratio is 1 where a norm is 0, and without weight decay unless NVLAMB is asked for. The flag
    is ignored.
    """
    params = given.columns[0]
    sizes = one_each("per_tensor_param_norm", given.per_tensor_param_norm, params)
    terms = one_each("per_tensor_update_norm", given.per_tensor_update_norm, params)
    adapts = 1.0 if given.use_nvlamb_python else given.weight_decay
    each_rate = trusted_rates(sizes, terms, given.lr, adapts)
    for positions, (some, theirs), dense in grouped(given.columns):
        rates = ApplyScalars(taken(each_rate, positions))
        run(APPLY, [theirs, some], ((1, 0),), rates, dense=dense)
