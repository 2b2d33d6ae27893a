"""accelerate: its loop with FusedAdam, in float32, bfloat16, and float16 with a scaler."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from apex import amp
from apex.optimizers import FusedAdam
from tests.checkpoints import assert_equal
from tests.clients.checked import TRUE, Planted, changed, check  # noqa: F401
from tests.tolerance import HALF_WEIGHTS

CLIP = 0.5
PRECISIONS = pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])


class Loop:
    """A model, an optimizer, data and a scheduler that one Accelerator has prepared."""

    def __init__(self, precision, optimizer_class, seed=0, weights=torch.float32):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        if precision == "fp16":
            # accelerate takes "fp16" on a CPU, and then casts and scales nothing there. What it
            # sets on a GPU is therefore set by hand.
            assert self.accelerator.scaler is None
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        set_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
        model.to(weights)
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        rows = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
        loader = torch.utils.data.DataLoader(rows, batch_size=16)
        optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.01)
        if weights == torch.float16:
            amp.float16_weights(optimizer)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.dtype, self.products = weights, set()
        model[0].register_forward_hook(lambda *of: self.products.add(of[-1].dtype))

    def train(self, epochs):
        """Return the losses of all batches and the norms of all steps, before clipping."""
        losses, norms = [], []
        for _ in range(epochs):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = torch.nn.functional.cross_entropy(
                        self.model(x.to(self.dtype)).float(), y
                    )
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        params = self.model.parameters()
                        norms.append(self.accelerator.clip_grad_norm_(params, CLIP).item())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
        return losses, norms


@PRECISIONS
def test_training_is_that_of_torchs_adamw(precision):
    ours, torchs = Loop(precision, FusedAdam), Loop(precision, torch.optim.AdamW)
    assert type(ours.optimizer.optimizer) is FusedAdam
    losses, norms = ours.train(epochs=6)
    # They are float32 numbers: of floats torch.testing would expect 1e-7.
    found, wanted = (torch.tensor([*a, *b]) for a, b in [(losses, norms), torchs.train(epochs=6)])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(ours.model.state_dict(), torchs.model.state_dict())
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert ours.products == {dtype}
    assert max(norms) > CLIP  # and after that the gradients are clipped
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_an_overflow_skips_the_step():
    loop = Loop("fp16", FusedAdam)
    loop.accelerator.scaler = loop.optimizer.scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**40
    )
    before = [p.detach().clone() for p in loop.model.parameters()]
    losses, norms = loop.train(epochs=1)
    assert not torch.isfinite(torch.tensor(norms)).any()
    assert loop.accelerator.optimizer_step_was_skipped
    assert all(map(torch.equal, loop.model.parameters(), before))
    assert loop.accelerator.scaler.get_scale() == 2.0**38
    assert losses == Loop("fp16", FusedAdam).train(epochs=1)[0][:2] + losses[2:]


@PRECISIONS
def test_saved_state_resumes_to_the_bit(tmp_path, precision):
    loop = Loop(precision, FusedAdam)
    loop.train(epochs=2)
    loop.accelerator.save_state(str(tmp_path))
    wanted = loop.train(epochs=2), loop.model.state_dict()
    other = Loop(precision, FusedAdam, seed=1)
    other.accelerator.load_state(str(tmp_path))
    found = other.train(epochs=2), other.model.state_dict()
    assert_equal(found, wanted)


def test_float16_weights_train_as_float32_ones():
    """Under its own calls of torch's scaler, which is made by hand on a CPU as above."""
    plain, half = Loop("no", FusedAdam), Loop("fp16", FusedAdam, weights=torch.float16)
    (wanted, _), (found, norms) = plain.train(epochs=6), half.train(epochs=6)
    assert {p.dtype for p in half.model.parameters()} == {torch.float16}
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(wanted), rtol=HALF_WEIGHTS, atol=0.0
    )
    assert max(norms) > CLIP
    assert sum(found[-4:]) < 0.8 * sum(found[:4])


# -- apex check ------------------------------------------------------------------------------------

LOOP = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)
accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
accelerator.native_amp = True  # as on a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
x = torch.randn(192, 8)
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
net, opt, loader, schedule = accelerator.prepare(net, opt, loader, schedule)
for x, y in loader:
    with accelerator.accumulate(net):
        accelerator.backward(F.cross_entropy(net(x).float(), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
        schedule.step()
        opt.zero_grad()
accelerator.save_state("state")
"""
CLIPS = "nn.utils.clip_grad_norm_(net.parameters(), 0.1)"
MISTAKES = {
    "clipping that does not unscale": changed(
        LOOP,
        "clip-before-unscale",
        "the norm was {0:.4g}, without the loss scale {1:.4g}; clipped to 9.8e-05 instead of 0.1",
        CLIPS,
        ("accelerator.clip_grad_norm_(net.parameters(), 0.1)", f"{TRUE}\n            {CLIPS}"),
    ),
    "weights in bfloat16": changed(
        LOOP,
        "update-lost",
        "of the bfloat16 weights with a gradient did not move",
        "opt.step()",
        ('mixed_precision="fp16"', 'mixed_precision="no"'),
        ("native_amp = True", "native_amp = False"),
        ("accelerator.scaler = torch", "_ = torch"),
        ("net(x)", "net(x.bfloat16())"),
        ("nn.Linear(32, 4))", "nn.Linear(32, 4)).bfloat16()"),
    ),
    "a schedule that is not prepared": changed(
        LOOP,
        "scheduler-counts-skipped",
        "steps had been skipped, so the learning rate was",
        "schedule.step()",
        ("2.0**10", "2.0**32"),
        ("loader, schedule = accelerator", "loader, _ = accelerator"),
        ("gradient_accumulation_steps=2", "gradient_accumulation_steps=1"),
    ),
    "a checkpoint without the scaler": changed(
        LOOP,
        "scaler-not-saved",
        "the scale is 8192 now; a resumed run starts at 1024, so 3 doublings are lost",
        'torch.save([opt.state_dict(), schedule.state_dict()], "state.pt")',
        (
            'accelerator.save_state("state")',
            'torch.save([opt.state_dict(), schedule.state_dict()], "state.pt")',
        ),
    ),
}


def test_apex_check_is_silent_for_a_healthy_loop(check):  # noqa: F811
    assert len(check.is_silent(Planted("", LOOP, {}).program())) > 100


@pytest.mark.parametrize("mistake", MISTAKES)
def test_apex_check_finds(check, mistake):  # noqa: F811
    check.finds(MISTAKES[mistake])
