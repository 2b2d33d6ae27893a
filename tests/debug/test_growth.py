"""Weights that exploded before the step with the fault: the sentence says so, and what to do."""

import re

import pytest
import torch
from torch import nn

from apex import amp
from apex.debug.growth import Growth
from apex.debug.watch import Watch


def explode(kind="plain", factors=(1.0, 1.0, 1.0, 1e5), lr=0.3):
    """Steps whose loss grows by these factors, then one whose loss is NaN; its report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=lr), None
    if kind == "GradScaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    elif kind != "plain":
        amp.initialize(model, optimizer, opt_level=kind, verbosity=0, loss_scale=4.0)
    growth = Growth()
    watch = Watch([model], [optimizer], scaler, None, "keep", patience=0, growth=growth)
    for factor in (*factors, float("nan")):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).float().square().mean() * factor
        if kind.startswith("O"):
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        if watch.fault is not None:
            break
    report = watch.explain()
    watch.close()
    return report


SAID = re.compile(
    r"\. The update of step 4 raised the norm of (\S+) from (\S+) to (\S+) \(norm of its gradient "
    r"(\S+)\): clip gradients \(torch.nn.utils.clip_grad_norm_\) or lower the learning rate\.$"
)


@pytest.mark.parametrize("kind", ["plain", "GradScaler", "O0", "O2"])
def test_the_growth_the_step_and_the_remedy_are_said(kind):
    report = explode(kind)
    name, before, after, norm = SAID.search(report.sentence).groups()
    assert 0.1 < float(before) < 4.0
    assert float(after) > 100 * float(before)
    assert float(norm) > float(after)  # the rate is 0.3
    assert name in dict(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).named_parameters())


def test_several_steps_are_named():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = Growth()
    for step, size in enumerate((1.0, 1.0, 20.0, 400.0), 1):
        nn.init.constant_(model.weight, size)
        growth.begin(step, [optimizer])
        model.weight.grad = torch.full((1, 2), 3.0 * size)
        growth.end()
    assert growth.sentence({id(model.weight): "weight"}).startswith(
        " The updates of steps 2 to 3 raised the norm of weight from 1.41 to 566 (norm of its "
        "gradient 84.9): clip"
    )


@pytest.mark.parametrize("factors", [(1.0,) * 3, (0.0, 1.0)])
def test_healthy_growth_is_not_said(factors):
    assert "raised the norm" not in explode(factors=factors, lr=0.01).sentence


def test_weights_that_begin_at_zero_did_not_explode():
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch([model], [optimizer], None, None, "keep", growth=Growth())
    for factor in (1.0, 1.0, float("nan")):
        (model(torch.ones(2, 4)).sum() * factor).backward()
        optimizer.step()
    assert watch.explain().sentence.endswith("names the line).")
    watch.close()


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2).double(), nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).half()),
     nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2, device="meta"), nn.Embedding(0, 2)],
)  # fmt: skip
def test_all_kinds_of_parameters_are_taken(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = Growth()
    for step in (1, 2):
        growth.begin(step, [optimizer])
        for param in model.parameters():
            param.grad = torch.ones_like(param)
            param.grad = param.grad.to_sparse() if isinstance(model, nn.Embedding) else param.grad
        growth.end()
    assert growth.sentence({}) == ""


def test_at_most_eight_matrices_are_read():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = Growth()
    growth.begin(1, [optimizer])
    assert len(growth._rows[-1].weights) <= 8
    assert growth._sampled[0] is model[-1].weight
    growth.begin(1, [optimizer])
    assert len(growth._rows) == 1
