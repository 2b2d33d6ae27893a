"""Lightning Fabric: FusedAdam under its precision plug-ins, its gradient scaler among them."""

import pytest
import torch
from lightning_fabric import Fabric, seed_everything
from lightning_fabric.plugins.precision import MixedPrecision

from apex import amp
from apex.optimizers import FusedAdam
from tests.checkpoints import assert_equal
from tests.clients.checked import TRUE, Planted, changed, check  # noqa: F401
from tests.tolerance import HALF_WEIGHTS

CLIP = 0.25


def start(precision, optimizer_class=FusedAdam, seed=0, scale=2.0**10, weights=torch.float32):
    if precision == "16-mixed":
        # On a CPU, Fabric replaces this precision by bf16-mixed unless it is given the plug-in.
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    else:
        options = {"precision": precision}
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    seed_everything(seed, verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    model.to(weights)
    products = set()
    model[0].register_forward_hook(lambda *of: products.add(of[-1].dtype))
    optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.01)
    if weights == torch.float16:
        amp.float16_weights(optimizer)
    return fabric, *fabric.setup(model, optimizer), products


def train(fabric, model, optimizer, products, clip=True):
    """Return the losses of twelve steps and the norms before clipping."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    losses, norms = [], []
    for _ in range(12):
        outputs = model(inputs.to(next(model.parameters()).dtype)).float()
        loss = torch.nn.functional.cross_entropy(outputs, inputs[:, :4].argmax(1))
        fabric.backward(loss)
        if clip:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16),
    ],
)  # fmt: skip
def test_training_is_that_of_torchs_adamw(precision, dtype):
    ours, torchs = start(precision), start(precision, torch.optim.AdamW)
    assert isinstance(ours[2], FusedAdam)
    assert type(ours[2].optimizer) is FusedAdam
    found = train(*ours), ours[1].state_dict()
    wanted = train(*torchs), torchs[1].state_dict()
    # They are float32 numbers: of floats torch.testing would expect 1e-7.
    (losses, norms), (others, other_norms) = found[0], wanted[0]
    torch.testing.assert_close(torch.tensor([losses, norms]), torch.tensor([others, other_norms]))
    torch.testing.assert_close(found[1], wanted[1])
    assert ours[3] == {dtype}
    assert min(norms) > CLIP
    assert losses[-1] < 0.7 * losses[0]


def test_half_weights_train_as_float32_ones():
    """The moments are float32. torch's AdamW has them in float16, where its eps is 0: nan."""
    half, single = start("16-true"), start("32-true")
    losses, _ = train(*half)
    assert {p.dtype for p in half[1].parameters()} == half[3] == {torch.float16}
    moments = [slot for slots in half[2].state.values() for slot in slots.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    wanted, _ = train(*single)  # by torch's tolerance for float16
    torch.testing.assert_close(torch.tensor(losses).half(), torch.tensor(wanted).half())


def test_an_overflow_skips_the_step():
    fabric, model, optimizer, products = start("16-mixed", scale=2.0**40)
    before = [p.detach().clone() for p in model.parameters()]
    losses, _ = train(fabric, model, optimizer, products, clip=False)
    assert all(map(torch.equal, model.parameters(), before))
    assert len(set(losses)) == 1
    assert fabric.strategy.precision.scaler.get_scale() == 2.0**28


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "16-true"])
def test_saved_state_resumes_to_the_bit(tmp_path, precision):
    fabric, model, optimizer, products = start(precision)
    train(fabric, model, optimizer, products)
    fabric.save(tmp_path / "state", {"model": model, "optimizer": optimizer})
    wanted = train(fabric, model, optimizer, products), model.state_dict()
    fabric, model, optimizer, products = start(precision, seed=1)
    fabric.load(tmp_path / "state", {"model": model, "optimizer": optimizer})
    found = train(fabric, model, optimizer, products), model.state_dict()
    assert_equal(found, wanted)


def test_float16_weights_train_as_float32_ones_under_its_scaler():
    """Its plug-in calls ``unscale_`` of torch's scaler, which float16_weights follows."""
    half, single = start("16-mixed", weights=torch.float16), start("32-true")
    losses, norms = train(*half)
    assert {p.dtype for p in half[1].parameters()} == half[3] == {torch.float16}
    wanted, _ = train(*single)
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(wanted), rtol=HALF_WEIGHTS, atol=0.0
    )
    assert min(norms) > CLIP
    assert losses[-1] < 0.7 * losses[0]


# -- apex check ------------------------------------------------------------------------------------

LOOP = """
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler))
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
net, opt = fabric.setup(net, opt)
ema = [p.detach().float().clone() for p in net.parameters()]
for step in range(12):
    x = torch.randn(16, 8)
    fabric.backward(F.cross_entropy(net(x), x[:, :4].argmax(1)))
    fabric.clip_gradients(net, opt, max_norm=0.1)
    opt.step()
    schedule.step()
    opt.zero_grad()
    for slow, fast in zip(ema, net.parameters()):
        slow.lerp_(fast.detach().to(slow.dtype), 0.01)
state = {"net": net, "opt": opt, "schedule": schedule, "scaler": scaler}
fabric.save("state.ckpt", state)
"""
CLIPS = "nn.utils.clip_grad_norm_(net.parameters(), 0.1)"
MISTAKES = {
    "clipping that does not unscale": changed(
        LOOP,
        "clip-before-unscale",
        "the norm was {0:.4g}, without the loss scale {1:.4g}; clipped to 9.8e-05 instead of 0.1",
        CLIPS,
        ("fabric.clip_gradients(net, opt, max_norm=0.1)", f"{TRUE}\n    {CLIPS}"),
    ),
    "weights in bfloat16": changed(
        LOOP,
        "update-lost",
        "of the bfloat16 weights with a gradient did not move",
        "opt.step()",
        ('plugins=MixedPrecision("16-mixed", "cpu", scaler)', 'precision="bf16-true"'),
    ),
    "an average in bfloat16": changed(
        LOOP,
        "sum-in-16-bits",
        "of its elements did not move although the update was not 0, in",
        "slow.lerp_(fast.detach().to(slow.dtype), 0.01)",
        (".float().clone()", ".bfloat16()"),
    ),
    "a checkpoint without the scaler": changed(
        LOOP,
        "scaler-not-saved",
        "the scale is 8192 now; a resumed run starts at 1024, so 3 doublings are lost",
        'fabric.save("state.ckpt", state)',
        (', "scaler": scaler}', "}"),
    ),
}


def test_apex_check_is_silent_for_a_healthy_loop(check):  # noqa: F811
    assert len(check.is_silent(Planted("", LOOP, {}).program())) > 100


@pytest.mark.parametrize("mistake", MISTAKES)
def test_apex_check_finds(check, mistake):  # noqa: F811
    check.finds(MISTAKES[mistake])
