"""LARC: the formula, what it wraps, what it leaves behind."""

import copy
import pickle

import pytest
import torch

import apex.parallel
from apex.ops import _runtime
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import LARC
from tests.optimizers import common
from tests.optimizers.common import (
    EVERY,
    PATHS,
    check_closure,
    give_grads,
    parameters,
    same,
    stepped_on_expanded_gradients,
    train,
    values,
)
from tests.tolerance import assert_one_rounding, each

SMALL = ((7,), (33, 5))


def sgd(params, lr=0.1, **options):
    return torch.optim.SGD(params, lr=lr, **options)


def exact_gradient(param, grad, lr, decay, clip, trust=0.02, eps=1e-8):
    p, g = param.norm(), grad.norm()
    if p == 0 or g == 0:
        return grad
    rate = trust * p / (g + decay * p + eps)
    if clip:
        rate = min(rate / lr, torch.ones(()).double())
    return (grad + decay * param) * rate


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "clip"),
    [(torch.float16, True), (torch.bfloat16, True), (torch.float32, True), (torch.float32, False)],
)
def test_formula(path, dtype, clip):
    """Of four groups, each with its own learning rate and weight decay."""
    params = parameters(dtype, SMALL * 2)
    numbers = [(1e-3, 0.0), (10.0, 0.5), (1e-3, 0.5), (10.0, 0.0)]
    groups = [
        {"params": [param], "lr": lr, "weight_decay": decay}
        for param, (lr, decay) in zip(params, numbers, strict=True)
    ]
    optimizer = LARC(sgd(groups), clip=clip)
    give_grads(params, 0)
    wanted = [
        exact_gradient(param.detach().double(), param.grad.double(), *number, clip)
        for param, number in zip(params, numbers, strict=True)
    ]
    common.take_step(path, optimizer)
    grads = [param.grad for param in params]
    each(assert_one_rounding, grads, wanted, interpreted=path == "triton")


def test_an_example_by_hand():
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    param.grad = torch.tensor([0.6, 0.8])
    LARC(sgd([param], weight_decay=0.5)).step()
    assert_one_rounding(param.detach(), torch.tensor([2.94, 3.92], dtype=torch.float64))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("zero", ["param", "grad"])
def test_a_norm_of_zero(path, zero):
    """As in the original: the gradient is left, and there is no weight decay in this step."""
    params = parameters(shapes=SMALL)
    optimizer = LARC(sgd(params, weight_decay=0.5))
    give_grads(params, 0)
    (params[0].data if zero == "param" else params[0].grad).zero_()
    expected = params[0].detach() - 0.1 * params[0].grad
    common.take_step(path, optimizer)
    assert torch.equal(params[0].detach(), expected)


def test_norms_of_16_bit_weights_are_float32():
    """In the weight's own dtype 300 squared and summed is inf, and the rate nan."""
    param = torch.nn.Parameter(torch.full((9,), 300.0, dtype=torch.float16))
    param.grad = torch.full_like(param, 300.0)
    LARC(sgd([param])).step()
    assert_one_rounding(param.grad, torch.full((9,), 60.0, dtype=torch.float64))


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),  # has no weight decay
    # Not FusedMuon: what it makes of a matrix does not depend on the gradient's scale.
    **{name: make for name, make in EVERY.items() if name != "FusedMuon"},
    "FusedAdam, lr in a tensor": lambda params: FusedAdam(params, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_wraps_any_optimizer(make):
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, plain = LARC(make(params)), make(twins)
    options = plain.param_groups[0]
    decay = options.pop("weight_decay", None)
    if decay is not None:
        options["weight_decay"] = 0.0
    for number in range(3):
        give_grads(params, number)
        for param, twin in zip(params, twins, strict=True):
            wide = param.detach().double(), param.grad.double()
            twin.grad = exact_gradient(*wide, float(options["lr"]), decay or 0.0, True).float()
        optimizer.step()
        plain.step()
        common.assert_rounded(params, twins)
        common.copy_into(twins, params)
    assert optimizer.param_groups[0].get("weight_decay") == decay
    assert optimizer.state is optimizer.optim.state
    saved = optimizer.state_dict()
    assert saved.keys() == {"state", "param_groups"}
    assert saved["param_groups"][0].keys() == plain.state_dict()["param_groups"][0].keys() | (
        set() if decay is None else {"weight_decay"}
    )
    others = parameters(shapes=SMALL)
    common.copy_into(others, params)
    resumed = LARC(make(others))
    resumed.load_state_dict(copy.deepcopy(saved))
    assert same(train(resumed, others, (3,)), train(optimizer, params, (3,)))


def test_weight_decay_comes_back_after_an_error():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            assert self.param_groups[0]["weight_decay"] == 0
            raise RuntimeError("broken")

    params = parameters(shapes=SMALL)
    optimizer = LARC(Broken(params, lr=0.1, weight_decay=0.5))
    give_grads(params, 0)
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_groups_forward():
    first, second = parameters(shapes=SMALL)
    optimizer = LARC(sgd([first]))
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert [group["lr"] for group in optimizer.optim.param_groups] == [0.1, 0.5]
    give_grads([first, second], 0)
    optimizer.zero_grad(set_to_none=True)
    assert first.grad is None
    assert second.grad is None
    optimizer.step()
    assert repr(optimizer) == repr(optimizer.optim)
    optimizer.param_groups = optimizer.param_groups[:1]
    assert len(optimizer.optim.param_groups) == 1


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    ],
)
def test_schedulers(schedule):
    """They refused the original's."""
    params = parameters(shapes=SMALL)
    optimizer = LARC(sgd(params, momentum=0.9))
    scheduler = schedule(optimizer)
    start = optimizer.param_groups[0]["lr"]
    for number in range(2):
        give_grads(params, number)
        optimizer.step()
        scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] != start


def test_copies():
    params = parameters(shapes=SMALL)
    optimizer = LARC(sgd(params, momentum=0.9), trust_coefficient=0.1, clip=False, eps=1e-3)
    train(optimizer, params, range(1))
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = train(optimizer, params, range(1, 3))
    for copied in copies:
        assert (copied.trust_coefficient, copied.clip, copied.eps) == (0.1, False, 1e-3)
        assert same(train(copied, copied.param_groups[0]["params"], range(1, 3)), expected)


def test_closures_and_hooks():
    params = parameters(shapes=SMALL)
    check_closure(LARC(sgd(params)), params)


def test_nothing_waits_for_the_device():
    params = [torch.nn.Parameter(torch.empty(5, device="meta"))]
    optimizer = LARC(FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1))
    for _ in range(2):
        params[0].grad = torch.empty_like(params[0])
        optimizer.step()


def test_grad_scaler():
    """It unscales first, as LARC needs."""
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, plain = LARC(FusedSGD(params, lr=0.1)), LARC(FusedSGD(twins, lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    give_grads(params, 0, scale=256.0)
    give_grads(twins, 0)
    scaler.step(optimizer)
    plain.step()
    assert same(values(params), values(twins))


def trained(level, wrap_after, inner):
    made = inner if wrap_after else (lambda params: LARC(inner(params)))
    wrap = LARC if wrap_after else (lambda optimizer: optimizer)
    losses, masters, optimizer = common.trained_under_amp(made, level, wrap)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return losses, masters


@pytest.mark.parametrize("inner", [OPTIMIZERS["SGD"], OPTIMIZERS["FusedSGD"]])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_under_amp(level, inner):
    """Wrapped before or after initialize, it is the same training."""
    before, after = (trained(level, wrap_after, inner) for wrap_after in (False, True))
    assert before[0] == after[0]
    assert same(before[1], after[1])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_does_not_go_round_it(level):
    """Ours can step on scaled gradients; through LARC they cannot be scaled."""
    _, before = trained(level, False, OPTIMIZERS["SGD"])
    _, after = trained(level, False, lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1))
    for actual, exact in zip(after, before, strict=True):
        torch.testing.assert_close(actual, exact)


def test_the_names_it_is_reached_by():
    from apex.parallel.LARC import LARC as by_module

    assert by_module is LARC
    assert apex.parallel.LARC.LARC is LARC  # `apex.parallel.LARC` was the module


def test_the_first_signature():
    optimizer = LARC(sgd(parameters()), trust_coefficient=0.1, epsilon=1e-3)
    assert (optimizer.eps, optimizer.clip) == (1e-3, False)
    with pytest.raises(TypeError, match="optimizer was 3; it must be an optimizer"):
        LARC(3)
    with pytest.raises(TypeError, match="third argument was epsilon"):
        LARC(sgd(parameters()), 0.02, 1e-8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_gradients_are_refused():
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    param = torch.nn.Parameter(jagged)
    param.grad = param.detach().clone()
    with pytest.raises(TypeError, match="LARC: gradient 0 is a nested tensor"):
        LARC(sgd([param])).step()


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_other_gradients_are_refused(kind):
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64 if kind == "complex" else None))
    param.grad = torch.ones_like(param).to_sparse() if kind == "sparse" else torch.ones_like(param)
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match="sparse or complex"):
        LARC(sgd([param], weight_decay=0.1)).step()
    assert torch.equal(before, param.detach())


@pytest.mark.parametrize("path", PATHS)
def test_expanded_gradients_are_left_alone(path):
    """Their elements share memory, so nothing can be written there."""
    assert same(*stepped_on_expanded_gradients(lambda params: LARC(sgd(params)), path))


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_repeats_bit_for_bit(path):
    results = []
    for _ in range(2):
        params = parameters(shapes=SMALL)
        results.append(train(LARC(sgd(params, weight_decay=0.1)), params, range(2), path))
    assert same(*results)
    assert _runtime.forced() is None
