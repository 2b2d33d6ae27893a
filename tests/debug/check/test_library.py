"""``apex.debug.check``: findings of a block in a program."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from apex import amp, debug
from apex.debug.check import facts


def made():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, *, clips, steps=4):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(steps):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x)
        scaler.scale(functional.mse_loss(y.float(), x[:, :1])).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_the_findings_are_there_at_the_end_of_the_block():
    model, optimizer = made()
    with debug.check(model, optimizer, steps=3) as found:
        train(model, optimizer, clips=True)
        assert found == []
    assert [(one.kind, one.count, one.steps) for one in found] == [("clip-before-unscale", 3, 3)]
    assert (found[0].function, found[0].file) == ("train", __file__)
    train(model, optimizer, clips=True)
    assert len(found) == 1


def test_what_is_made_in_the_block_is_seen_and_kinds_are_ignored():
    with debug.check() as found:
        train(*made(), clips=True)
    assert [one.kind for one in found] == ["clip-before-unscale"]
    with debug.check(ignore=["clip-before-unscale"]) as found:
        train(*made(), clips=True)
    assert found == []


def test_a_healthy_training_keeps_its_bits():
    plain, seen = made(), made()
    torch.manual_seed(1)
    train(*plain, clips=False)
    torch.manual_seed(1)
    with debug.check(*seen) as found:
        train(*seen, clips=False)
    assert found == []
    assert torch.equal(plain[0].weight, seen[0].weight)


def test_findings_are_there_after_an_error():
    model, optimizer = made()
    block = debug.check(model, optimizer)
    found = block.__enter__()
    train(model, optimizer, clips=True)
    assert not block.__exit__(KeyError, KeyError(), None)  # it goes on
    assert len(found) == 1


@pytest.mark.parametrize("factor", [float("inf"), 1.0])
def test_no_findings_of_a_broken_training_are_no_all_clear(factor):
    model, optimizer = made()
    with (
        pytest.warns(UserWarning, match="4 of 4 losses were not finite") if factor > 1
        else contextlib.nullcontext(),
        debug.check(model, optimizer) as found,
    ):  # fmt: skip
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.randn(16, 8)).square().mean() * factor).backward()
            optimizer.step()
    assert found == []


def test_a_block_in_which_nothing_was_checked_says_so():
    model, optimizer = made()
    with pytest.warns(UserWarning, match="no optimizer made a step"), debug.check() as found:
        pass
    assert found == []


def test_steps_of_amp_before_the_block_are_not_counted(request):
    request.addfinalizer(amp.reset)
    model, optimizer = made()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            with amp.scale_loss(
                model(torch.randn(16, 8)).float().square().mean(), optimizer
            ) as scaled:
                scaled.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    warnings.simplefilter("ignore")  # amp's, of the same mistake
    train(25)
    with debug.check(model, optimizer) as found:
        train(3)
    assert [(one.kind, one.count, one.steps) for one in found] == [
        ("clip-of-model-gradients", 3, 3)
    ]


@pytest.mark.parametrize(
    ("words", "options", "error", "message"),
    [
        ((), {"steps": 0}, ValueError, "steps was 0; it must be 1 or more"),
        ((), {"ignore": ["sums"]}, ValueError, "there is no kind 'sums'"),
        ((nn.Linear(1, 1),), {}, TypeError, "pass the optimizers that the program made"),
    ],
)
def test_what_is_refused(words, options, error, message):
    with pytest.raises(error, match=message), debug.check(*words, **options):
        pass


def test_later_steps_of_an_optimizer_for_each_parameter_do_not_look_at_all(monkeypatch):
    calls, count = [], facts.Facts.count
    monkeypatch.setattr(facts.Facts, "count", lambda *args: calls.append(1) or count(*args))
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(40)])
    with debug.check(steps=2):
        optimizers = [torch.optim.SGD([param], lr=0.1) for param in net.parameters()]
        for _ in range(4):
            calls.clear()
            net(torch.ones(2, 4)).sum().backward()
            for one in optimizers:
                one.step()
        assert len(calls) < 10 * len(optimizers)  # 40 at each step would be 1,600
