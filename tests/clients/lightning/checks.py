"""Lightning: the callback of docs/nan.md in its Trainer."""

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.plugins.precision import MixedPrecision

from apex import amp, debug
from apex.optimizers import FusedAdam
from tests.checkpoints import assert_equal
from tests.clients.checked import TRUE, Planted, changed, check  # noqa: F401
from tests.clients.documented import callback
from tests.tolerance import HALF_WEIGHTS

STEPS = 20

# Of Lightning itself: data without workers, a precision that it replaces on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore:::(pytorch_lightning|lightning_fabric)")


class Root(torch.nn.Module):
    """Finite in forward, not in backward."""

    def forward(self, x):
        return torch.sqrt(x - x.detach())


class Network(pytorch_lightning.LightningModule):
    """Two layers with ``middle`` between them."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(8, 8), middle, torch.nn.Linear(8, 1))

    def forward(self, x):
        return self.last(self.middle(self.first(x)))

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(middle, precision="32-true", callbacks=(), network=None, scale=2.0**16, **changes):
    torch.manual_seed(0)
    network = network or Network(middle)
    x = torch.randn(8 * STEPS, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    options = {"precision": precision, **changes}
    if precision == "16-mixed":  # which it replaces by bf16-mixed on a CPU, but for a plug-in
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler), **changes}
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(network, torch.utils.data.DataLoader(data, batch_size=8))
    return network


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_documented_callback_explains(precision):
    explain = callback("pytorch_lightning")()
    with pytest.warns(debug.FaultWarning, match="SqrtBackward0"):
        network = train(Root(), precision, [explain])
    report = explain.watch.report
    assert (report.cause, report.module) == ("model", "middle")
    assert report.step == (17 if precision == "16-mixed" else 1)
    assert explain.watch.skipped == STEPS
    assert all(bool(p.isfinite().all()) for p in network.parameters())


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_healthy_training_has_no_report_and_the_same_weights(precision):
    explain = callback("pytorch_lightning")()
    watched = train(torch.nn.ReLU(), precision, [explain])
    assert (explain.watch.report, explain.watch.steps) == (None, STEPS)
    assert_equal(watched.state_dict(), train(torch.nn.ReLU(), precision).state_dict())


class HalfWeights(Network):
    """Float16 weights, or float32 ones beside them, with FusedAdam; keeps its losses."""

    def __init__(self, dtype):
        super().__init__(torch.nn.ReLU())
        self.to(dtype)
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x.to(self.first.weight.dtype)).float(), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=1e-2)
        half = self.first.weight.dtype == torch.float16
        return amp.float16_weights(optimizer) if half else optimizer


def test_float16_weights_train_as_float32_ones():
    """Its plug-in calls ``unscale_`` of torch's scaler, clips and steps."""
    found = {}
    for dtype, precision in ((torch.float32, "32-true"), (torch.float16, "16-mixed")):
        torch.manual_seed(0)
        network = HalfWeights(dtype)
        train(None, precision, network=network, scale=2.0**10, gradient_clip_val=0.5)
        assert {p.dtype for p in network.parameters()} == {dtype}
        found[dtype] = torch.tensor(network.losses)
    torch.testing.assert_close(
        found[torch.float16], found[torch.float32], rtol=HALF_WEIGHTS, atol=0.0
    )
    assert len(network.losses) == STEPS


# -- apex check ------------------------------------------------------------------------------------

LOOP = """
import pytorch_lightning
from pytorch_lightning.plugins.precision import MixedPrecision

class Network(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
        return [opt], [{"scheduler": schedule, "interval": "step"}]

class Average(pytorch_lightning.Callback):
    def on_fit_start(self, trainer, net):
        self.ema = [p.detach().float().clone() for p in net.parameters()]

    def on_after_backward(self, trainer, net):
        pass

    def on_train_batch_end(self, trainer, net, *_):
        for slow, fast in zip(self.ema, net.parameters()):
            slow.lerp_(fast.detach().to(slow.dtype), 0.01)

x = torch.randn(192, 8)
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=16)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
trainer = pytorch_lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=0.1, callbacks=[Average()],
    plugins=MixedPrecision("16-mixed", "cpu", scaler),
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
net = Network()
trainer.fit(net, loader)
"""
CLIPS = "nn.utils.clip_grad_norm_(net.parameters(), 0.1)"
BY_HAND = """
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt, 0.1, "norm")
        opt.step()
"""
MISTAKES = {
    "a callback that clips before the plug-in unscales": changed(
        LOOP,
        "clip-before-unscale",
        "the norm was {0:.4g}, without the loss scale {1:.4g}; clipped to 9.8e-05 instead of 0.1",
        CLIPS,
        ("        pass", f"        {TRUE}\n        {CLIPS}"),
    ),
    # Its own method does not unscale in a loop by hand.
    "clipping in manual optimization": changed(
        LOOP,
        "clip-before-unscale",
        "clipped to 9.8e-05 instead of 0.1",
        'self.clip_gradients(opt, 0.1, "norm")',
        ("        return loss", BY_HAND),
        (
            "        super().__init__()",
            "        super().__init__()\n        self.automatic_optimization = False",
        ),
        ("gradient_clip_val=0.1, ", ""),
    ),
    "weights in bfloat16": changed(
        LOOP,
        "update-lost",
        "of the bfloat16 weights with a gradient did not move",
        "trainer.fit(net, loader)",
        ('plugins=MixedPrecision("16-mixed", "cpu", scaler)', 'precision="bf16-true"'),
    ),
    "an average in bfloat16": changed(
        LOOP,
        "sum-in-16-bits",
        "of its elements did not move although the update was not 0, in",
        "slow.lerp_(fast.detach().to(slow.dtype), 0.01)",
        (".float().clone()", ".bfloat16()"),
    ),
}


def test_apex_check_is_silent_for_a_healthy_loop(check):  # noqa: F811
    assert len(check.is_silent(Planted("", LOOP, {}).program())) > 100


@pytest.mark.parametrize("mistake", MISTAKES)
def test_apex_check_finds(check, mistake):  # noqa: F811
    check.finds(MISTAKES[mistake])
