"""Scaling, skipping and accumulation against mixed precision written by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.amp.hand import Hand, batches, net, same
from tests.tolerance import HALF_ACCUMULATION, assert_close_to_largest

LEVELS = ["O0", "O1", "O2", "O4", "O5"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
}


def start(level, make=OPTIMIZERS["sgd"], window=2000, **kwargs):
    model = net()
    hand = Hand(model, make, level, window=window)
    optimizer = make(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, growth_interval=window, **kwargs
    )
    return model, optimizer, hand


def scale():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def poison_at(index, value, where):
    """Write ``value`` into the scaled gradient of parameter ``index``."""

    def poison(model):
        grad = list(model.parameters())[index].grad.flatten()
        list(model.parameters())[index].grad.view(-1)[
            {"first": 0, "middle": grad.numel() // 2, "last": -1}[where]
        ] = value

    return poison


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_training_equals_the_one_written_by_hand(level, make):
    model, optimizer, hand = start(level, make, window=3)
    for x, y in batches(8):
        loss = F.cross_entropy(model(x), y)
        by_hand = hand.loss(x, y)
        assert torch.equal(loss, by_hand)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        hand.zero_grad()
        hand.backward(by_hand)
        hand.step()
        assert same(amp.master_params(optimizer), hand.params)
    if hand.scale:
        assert scale() == hand.scale.value  # which has grown and backed off by then


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_adds_unscaled_gradients(level):
    model, optimizer, hand = start(level, window=2)
    for step in range(3):
        optimizer.zero_grad()
        hand.zero_grad()
        for x, y in batches(4, seed=step):
            with amp.scale_loss(F.cross_entropy(model(x), y) / 4, optimizer) as scaled:
                scaled.backward()
            hand.backward(hand.loss(x, y) / 4)
            assert same(
                [p.grad for p in amp.master_params(optimizer)], [p.grad for p in hand.params]
            )
        optimizer.step()
        hand.step()
        assert same(amp.master_params(optimizer), hand.params)
    if hand.scale:
        assert scale() == hand.scale.value  # the window counts steps, not passes


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("index", [0, 3, 5], ids=["conv", "norm", "linear bias"])
def test_a_poisoned_gradient_skips_exactly_that_step(level, value, where, index, caplog):
    model, optimizer, hand = start(level)
    poison = poison_at(index, value, where)
    for number, (x, y) in enumerate(batches(4)):
        spoil = poison if number == 2 else None
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            if spoil:
                spoil(model)
        hand.zero_grad()
        hand.backward(hand.loss(x, y), spoil)
        before = [p.clone() for p in amp.master_params(optimizer)]
        optimizer.step()
        assert hand.step() == (number == 2)
        assert same(before, amp.master_params(optimizer)) == (number == 2)
        assert same(amp.master_params(optimizer), hand.params)
    assert scale() == hand.scale.value == 2.0**15


def test_finite_gradients_whose_sum_overflows_are_no_overflow():
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
        scaled.backward()
        model.weight.grad.fill_(3e38)
    optimizer.step()
    assert scale() == 2.0**16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_in_one_micro_batch_skips_the_step_once(level):
    model, optimizer, hand = start(level)
    ((x, y),) = batches(1)
    for number in range(3):
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            if number == 1:
                model[0].weight.grad.fill_(math.inf)
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert same(before, model.parameters())
    optimizer.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not same(before, model.parameters())


def two_losses(level, shared_scaler):
    """A net with two heads and an optimizer for each part, and three losses' worth of scalers."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    return amp.initialize(
        models,
        optimizers,
        opt_level=level,
        num_losses=1 if shared_scaler else 2,
        verbosity=0,
        init_scale=2.0**8,  # 2**16 times 1 is inf in float16
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_only_the_optimizers_of_the_overflowing_loss_skip(level):
    (a, b), (opt_a, opt_b) = two_losses(level, shared_scaler=False)
    x = torch.randn(3, 4)
    with amp.scale_loss(a(x).float().sum(), [opt_a], loss_id=0) as scaled:
        scaled.backward()
        a.weight.grad[0, 0] = math.inf
    with amp.scale_loss(b(x).float().sum(), opt_b, loss_id=1) as scaled:
        scaled.backward()
    before = [p.clone() for p in (*a.parameters(), *b.parameters())]
    opt_a.step()
    opt_b.step()
    assert same(before[:2], a.parameters())
    assert not torch.equal(before[2], b.weight)
    saved = amp.state_dict()
    assert saved["loss_scaler0"] == {"loss_scale": 2.0**7, "unskipped": 0}
    assert saved["loss_scaler1"] == {"loss_scale": 2.0**8, "unskipped": 1}


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_one_loss_for_several_optimizers_accumulates_right(level, container):
    (a, b), optimizers = two_losses(level, shared_scaler=True)
    x = torch.randn(3, 4)
    for _ in range(2):
        with amp.scale_loss(b(a(x)).float().sum(), container(optimizers)) as scaled:
            scaled.backward()
    once = [p.grad.clone() for o in optimizers for p in amp.master_params(o)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    with amp.scale_loss(b(a(x)).float().sum(), container(optimizers)) as scaled:
        scaled.backward()
    assert same([2 * p.grad for o in optimizers for p in amp.master_params(o)], once)
    for optimizer in optimizers:
        optimizer.step()
    if level != "O0":
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1  # one pass, two optimizers


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_losses_with_different_scales_feed_one_optimizer(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, num_losses=2, loss_scale="dynamic", verbosity=0
    )
    amp._amp_state.loss_scalers[0]._loss_scale = 16
    amp._amp_state.loss_scalers[1]._loss_scale = 4.0
    x = torch.ones(2, 4)
    for loss_id in (0, 1, 0):
        with amp.scale_loss(model(x).float().sum(), optimizer, loss_id) as scaled:
            scaled.backward()
    weight, bias = (p.grad for p in amp.master_params(optimizer))
    assert torch.equal(weight, torch.full((4, 4), 6.0))
    assert torch.equal(bias, torch.full((4,), 6.0))


@pytest.mark.parametrize("static", [1.0, 8.0])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_static_scale_accumulates_every_parameter(level, static):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=static, verbosity=0
    )
    ((x, y),) = batches(1)
    model.eval()
    seen = []
    for _ in range(2):
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        seen.append([p.grad.clone() for p in amp.master_params(optimizer)])
    assert same([2 * g for g in seen[0]], seen[1])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_passes_equal_undelayed_ones(level):
    got = []
    for delay in (False, True):
        model, optimizer, _ = start(level)
        model.eval()
        for number, (x, y) in enumerate(batches(4)):
            with amp.scale_loss(
                F.cross_entropy(model(x), y), optimizer, delay_unscale=delay and number < 3
            ) as scaled:
                scaled.backward()
        got.append([p.grad for p in amp.master_params(optimizer)])
    for plain, delayed in zip(*got, strict=True):  # at O2 delayed ones add up in half
        assert_close_to_largest(delayed, plain, HALF_ACCUMULATION if level == "O2" else 0.0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_any_mix_of_delayed_and_plain_passes_is_right(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, num_losses=2, loss_scale="dynamic", verbosity=0
    )
    amp._amp_state.loss_scalers[0]._loss_scale = 8
    amp._amp_state.loss_scalers[1]._loss_scale = 2
    x = torch.ones(1, 4)
    before = [p.clone() for p in amp.master_params(optimizer)]
    plan = [(1.0, False, 0), (2.0, True, 0), (4.0, False, 0), (8.0, True, 1), (16.0, True, 0)]
    for factor, delay, loss_id in plan:
        with amp.scale_loss(
            factor * model(x).float().sum(), optimizer, loss_id, delay_unscale=delay
        ) as scaled:
            scaled.backward()
    optimizer.step()  # the last pass was delayed: the step settles it
    for old, new in zip(before, amp.master_params(optimizer), strict=True):
        assert torch.equal(old - 31.0, new)


def test_delay_overflow_check_keeps_the_scale_and_still_skips():
    model, optimizer, _ = start("O1")
    ((x, y),) = batches(1)
    with amp.scale_loss(
        F.cross_entropy(model(x), y), optimizer, delay_overflow_check=True
    ) as scaled:
        scaled.backward()
        model[0].weight.grad.fill_(math.nan)
    assert scale() == 2.0**16
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert same(before, model.parameters())
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    assert scale() == 2.0**15  # the evidence was kept for the next check


def test_the_newest_training_does_not_touch_an_earlier_one():
    model, optimizer, hand = start("O2")
    other = nn.Linear(2, 2)
    amp.initialize(other, torch.optim.SGD(other.parameters(), lr=1.0), opt_level="O0", verbosity=0)
    amp.initialize(nn.Linear(2, 2), enabled=False)
    for x, y in batches(3):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        hand.zero_grad()
        hand.backward(hand.loss(x, y))
        hand.step()
    assert same(amp.master_params(optimizer), hand.params)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_exception_in_the_block_leaves_everything_as_before(level, error):
    model, optimizer, _ = start(level)
    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    grads = [p.grad.clone() for p in amp.master_params(optimizer)]
    on, before = torch.is_autocast_enabled("cpu"), amp.state_dict()
    loss = F.cross_entropy(model(x), y)

    def interrupted():
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            raise error

    with pytest.raises(error):
        interrupted()
    if level in ("O1", "O2"):  # O0 and O3 are plain backward passes
        assert same([p.grad for p in amp.master_params(optimizer)], grads)
    assert torch.is_autocast_enabled("cpu") is on
    assert amp.state_dict() == before
    optimizer.step()


def test_nested_blocks_on_one_optimizer_are_refused():
    model, optimizer, _ = start("O1")
    ((x, y),) = batches(1)
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled:
        with (
            pytest.raises(RuntimeError, match="in an open scale_loss block already"),
            amp.scale_loss(loss, optimizer),
        ):
            pass
        scaled.backward()
    optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_nested_blocks_on_two_optimizers_keep_their_own_scale():
    (a, b), (opt_a, opt_b) = two_losses("O1", shared_scaler=True)
    x = torch.ones(1, 4)
    with amp.scale_loss(3 * a(x).float().sum(), opt_a) as outer:
        with amp.scale_loss(b(x).float().sum(), opt_b) as inner:
            inner.backward()
            b.weight.grad.fill_(math.inf)
        outer.backward()
    assert torch.equal(a.weight.grad, torch.full((4, 4), 3.0))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_one_parameter_in_two_optimizers(level):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    model, (first, second) = amp.initialize(
        model, [first, second], opt_level=level, loss_scale="dynamic", init_scale=8.0, verbosity=0
    )
    before = [p.clone() for p in amp.master_params(first)]
    with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), [first, second]) as scaled:
        scaled.backward()
    first.step()
    second.step()
    for old, new in zip(before, amp.master_params(second), strict=True):
        assert torch.equal(old - 1.0 - 1.0, new)
    with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), first) as scaled:
        scaled.backward()
        model.weight.grad.fill_(math.nan)
    before = [p.clone() for p in amp.master_params(second)]
    second.step()  # was not listed, but would have stepped on nan
    assert same(before, amp.master_params(second))


def test_dead_training_says_who_is_to_blame():
    model, optimizer, _ = start("O1", max_skipped_steps=3)
    ((x, y),) = batches(1)
    for attempt in range(3):
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            model[4].weight.grad[0] = math.nan
        if attempt < 2:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"3 steps in a row.*'4.weight'.*loss itself was finite"):
        optimizer.step()
    x = x * math.inf
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match=r"'0.weight'.*loss itself was not finite"):
        optimizer.step()


def test_scale_never_reaches_zero():
    model, optimizer, _ = start("O1", max_skipped_steps=10**9)
    ((x, y),) = batches(1)
    for _ in range(200):
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            model[0].weight.grad[0] = math.nan
        optimizer.step()
    assert scale() == torch.finfo(torch.float32).tiny


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    before = model.weight.detach().clone()
    for _ in range(2):
        with amp.scale_loss(model(torch.tensor([1, 1, 4])).sum(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    expected = torch.zeros(6, 1)
    expected[1], expected[4] = 4.0, 2.0
    assert torch.equal(before - expected, model.weight.detach())


def test_writes_to_the_state_take_effect_at_once():
    model, optimizer, _ = start("O1")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2**10  # an int, as in the wild
    scaler._scale_seq_len = 1
    ((x, y),) = batches(1)
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert torch.equal(scaled, loss * 2.0**10)
        scaled.backward()
    optimizer.step()
    assert scaler._loss_scale == scaler.loss_scale() == 2.0**11


def test_losses_that_cannot_be_scaled_are_refused():
    model, optimizer, _ = start("O1")
    for loss in (1.0, torch.tensor(3), None):
        with (
            pytest.raises(TypeError, match="must be a floating tensor"),
            amp.scale_loss(loss, optimizer),
        ):
            pass
    with (
        pytest.raises(IndexError, match=r"loss_id was 1.*num_losses=1"),
        amp.scale_loss(torch.ones(()), optimizer, loss_id=1),
    ):
        pass


def test_scale_loss_needs_initialize():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    with (
        pytest.raises(RuntimeError, match=r"before amp.initialize"),
        amp.scale_loss(torch.ones(()), optimizer),
    ):
        pass
    start("O1")
    with (
        pytest.raises(RuntimeError, match=r"SGD, which did not go through"),
        amp.scale_loss(torch.ones(()), optimizer),
    ):
        pass


def test_disabled_yields_the_very_same_loss():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = model(torch.ones(1, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    start("O1")
    with amp.scale_loss(loss, optimizer) as scaled:  # also after another training has begun
        assert scaled is loss
