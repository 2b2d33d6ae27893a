"""Lightning: the callback of docs/nan.md in its Trainer."""

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.plugins.precision import MixedPrecision

from apex import debug
from tests.checkpoints import assert_equal
from tests.clients.documented import callback

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


def train(middle, precision="32-true", callbacks=()):
    torch.manual_seed(0)
    network = Network(middle)
    x = torch.randn(8 * STEPS, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    options = {"precision": precision}
    if precision == "16-mixed":  # which it replaces by bf16-mixed on a CPU, but for a plug-in
        scaler = torch.amp.GradScaler("cpu")
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
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
