"""Subclasses that step by themselves, with the attributes of the original's instances.

fairseq's FusedAdam and others call ``multi_tensor_applier(self.multi_tensor_adam,
self._dummy_overflow_buf, lists, ...)``.
"""

import copy
import pickle

import pytest
import torch

from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from tests.optimizers.common import EVERY, give_grads, parameters, values
from tests.tolerance import THREE_STEPS, assert_close_to_largest, each

SHAPES = ((7,), (33, 5))
LR, DECAY, BETAS, EPS = 0.02, 0.1, (0.9, 0.99), 1e-6


def slots(params, number):
    return [[torch.zeros_like(param) for param in params] for _ in range(number)]


def applied(optimizer, function, lists, *numbers):
    return multi_tensor_applier(function, optimizer._dummy_overflow_buf, lists, *numbers)


def adam(which):
    """The three functions of Adam: ``which`` is what the name ends in."""

    def stepper(optimizer, params):
        moments, masters = slots(params, 2), [param.detach().clone() for param in params]
        lr, one = torch.tensor([LR]), torch.ones(1)

        def step(number, grads):
            function = getattr(optimizer, f"multi_tensor_adam{which}")
            lists, numbers = [grads, params, *moments], (*BETAS, EPS, number, 1, 1, DECAY)
            if which:
                numbers = (*BETAS, EPS, torch.tensor([number], dtype=torch.int32), 1, 1, DECAY, one)
            if "master" in which:
                lists.append(masters)
            applied(optimizer, function, lists, lr if which else LR, *numbers)

        return step

    return stepper


def sgd(optimizer, params):
    (momenta,) = slots(params, 1)

    def step(number, grads):
        numbers = (DECAY, 0.9, 0.0, LR, False, number == 1, False, 1.0)
        applied(optimizer, optimizer.multi_tensor_sgd, [grads, params, momenta], *numbers)

    return step


def adagrad(optimizer, params):
    (sums,) = slots(params, 1)

    def step(number, grads):
        numbers = (LR, EPS, 0, DECAY)
        applied(optimizer, optimizer.multi_tensor_adagrad, [grads, params, sums], *numbers)

    return step


def novograd(optimizer, params):
    (moments,), norms = slots(params, 1), torch.zeros(len(params))

    def step(number, grads):
        lists, numbers = [grads, params, moments], (LR, *BETAS, EPS, number, 1, DECAY, 1, 1, 2)
        applied(optimizer, optimizer.multi_tensor_novograd, lists, norms, *numbers)

    return step


def lamb(optimizer, params):
    """Of FusedMixedPrecisionLamb both functions read the flag, and more numbers are passed."""
    moments, mixed = slots(params, 2), isinstance(optimizer, FusedMixedPrecisionLamb)
    more = (torch.zeros(1), torch.ones(1)) if mixed else ()

    def step(number, grads):
        norm, _ = applied(optimizer, optimizer.multi_tensor_l2norm, [grads], False)
        torch.testing.assert_close(norm[0], torch.nn.utils.get_total_norm(grads))
        numbers = (LR, *BETAS, EPS, number, 1, DECAY, 1, 1, norm, 1.0, False, *more)
        lists = [grads, params, *moments]
        applied(optimizer, optimizer.multi_tensor_lamb, lists, *numbers)

    return step


def made(kind, params):
    numbers = {"lr": LR, "weight_decay": DECAY}
    if kind in (FusedSGD, torch.optim.SGD):
        return kind(params, momentum=0.9, **numbers)
    numbers["eps"] = EPS
    if kind not in (FusedAdagrad, torch.optim.Adagrad):
        numbers["betas"] = BETAS
    if kind is FusedNovoGrad:
        numbers["init_zero"] = True
    return kind(params, **numbers)


CASES = {  # of torch where it has the optimizer
    "adam": (FusedAdam, adam(""), torch.optim.AdamW),
    "adam, capturable": (FusedAdam, adam("_capturable"), torch.optim.AdamW),
    "adam, masters": (FusedAdam, adam("_capturable_master"), torch.optim.AdamW),
    "sgd": (FusedSGD, sgd, torch.optim.SGD),
    "adagrad": (FusedAdagrad, adagrad, torch.optim.Adagrad),
    "novograd": (FusedNovoGrad, novograd, FusedNovoGrad),
    "lamb": (FusedLAMB, lamb, FusedLAMB),
    "mixed precision lamb": (FusedMixedPrecisionLamb, lamb, FusedLAMB),
}


@pytest.mark.parametrize("how", ["made", "copied", "pickled"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_by_the_attributes(name, how):
    kind, stepper, other = CASES[name]
    params, expected = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    optimizer, reference = made(kind, params), made(other, expected)
    if how != "made":
        saved = pickle.loads(pickle.dumps(optimizer)) if how == "pickled" else None
        optimizer = saved or copy.deepcopy(optimizer)
        params = optimizer.param_groups[0]["params"]
    step = stepper(optimizer, [param.detach() for param in params])
    for number in range(1, 4):
        give_grads(params, number)
        give_grads(expected, number)
        step(number, [param.grad for param in params])
        reference.step()
    each(assert_close_to_largest, values(params), values(expected), THREE_STEPS)


@pytest.mark.parametrize("make", [*EVERY.values(), FusedMixedPrecisionLamb])
def test_the_flag_is_one_tensor(make):
    """Programs hand it to a function, and read it afterwards."""
    optimizer = make([{"params": []}, {"params": parameters(shapes=SHAPES)}])
    flag = optimizer._dummy_overflow_buf
    assert (flag.dtype, flag.tolist(), flag.device) == (torch.int32, [0], torch.device("cpu"))
    flag.fill_(1)
    assert optimizer._dummy_overflow_buf is flag
    other = copy.deepcopy(optimizer)
    assert other._dummy_overflow_buf.tolist() == [0]
    other._dummy_overflow_buf = flag  # as a subclass does that was written for the original
    assert other._dummy_overflow_buf is flag
    assert make([torch.empty(2, device="meta")])._dummy_overflow_buf.is_meta


@pytest.mark.parametrize("flag", [0, 1])
def test_masters_are_stepped_and_weights_are_rounded(flag):
    """The fifth list is what is stepped; a flag of 1 skips."""
    halves = [param.detach().half() for param in parameters(shapes=SHAPES)]
    masters = [half.float() + 1e-5 for half in halves]
    wide = [torch.nn.Parameter(master.clone()) for master in masters]
    grads = [torch.full_like(half, 2.0) for half in halves]
    before, moments = [half.clone() for half in halves], slots(masters, 2)
    step, lr = torch.tensor([1], dtype=torch.int32), torch.tensor([LR])
    FusedAdam([torch.ones(1)]).multi_tensor_adam_capturable_master(
        65536, torch.tensor([flag], dtype=torch.int32), [grads, halves, *moments, masters],
        lr, *BETAS, EPS, step, 1, 1, DECAY, torch.tensor([0.5]),
    )  # fmt: skip
    if flag:
        assert all(map(torch.equal, halves, before))
        return
    for param in wide:
        param.grad = torch.ones_like(param)
    made(torch.optim.AdamW, wide).step()
    for half, master, exact in zip(halves, masters, wide, strict=True):
        assert_close_to_largest(master, exact.detach(), THREE_STEPS)
        assert torch.equal(half, master.half())
