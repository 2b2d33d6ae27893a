"""timm: ApexScaler in its training step, its fast norms, its factory of our optimizers."""

from functools import partial

import pytest
import torch

if torch.version.cuda is None:
    # The one torchvision that an index has for this torch is built for CUDA, and does not import
    # beside a CPU build unless the operators of its library exist. timm calls none of them.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")

import timm
from timm.layers import LayerNorm, LayerNorm2d, RmsNorm, fast_norm
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import ApexScaler, CheckpointSaver
from timm.utils.clip_grad import dispatch_clip_grad

from apex import amp
from apex.normalization import fused_layer_norm
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.checkpoints import assert_equal
from tests.tolerance import FIRST_FLOAT16_STEP, SIX_FLOAT16_STEPS, assert_one_rounding

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


@pytest.fixture(autouse=True)
def _start_and_end_without_casts():
    torch.manual_seed(0)
    yield
    amp.reset()  # the casts of O1 hold for a whole thread, as in NVIDIA's Apex


def vit():
    torch.manual_seed(0)
    return timm.create_model("test_vit", img_size=32, num_classes=4, depth=2)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count * 8).view(count, 8) % 4
    noise = torch.randn(count, 8, 3, 32, 32, generator=generator)
    return [(x + y[:, None, None, None], y) for x, y in zip(noise, labels, strict=True)]


def loss_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x).float(), y)


def train(scaler, model, optimizer, data, clip_grad, clip_mode):
    """Train like timm's train.py, two batches a step; return losses and norms of each step.

    The norms are of the gradients that the optimizer was given, clipped.
    """
    losses, norms = [], []

    def note_norm(optimizer, *_):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(grads).item())

    with optimizer.register_step_pre_hook(note_norm):
        for number, (x, y) in enumerate(data):
            loss = loss_of(model, x, y)
            losses.append(loss.item())
            stepped = number % 2 == 1
            scaler(
                loss / 2, optimizer, clip_grad=clip_grad, clip_mode=clip_mode,
                parameters=model.parameters(), need_update=stepped,
            )  # fmt: skip
            if stepped:
                optimizer.zero_grad()
    return losses, norms


def plain_scaler(loss, optimizer, clip_grad, clip_mode, parameters, need_update):
    """Do in float32 what timm's scalers do."""
    loss.backward()
    if need_update:
        dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
        optimizer.step()


@pytest.mark.parametrize(("mode", "value"), [("norm", 1.0), ("value", 0.02), ("agc", 0.05)])
@LEVELS
def test_apex_scaler_accumulates_clips_and_steps(level, mode, value):
    data = batches(12)
    plain = vit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    wanted = train(plain_scaler, plain, optimizer, data, value, mode)
    model = vit()
    optimizer = FusedSGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found = train(ApexScaler(), model, optimizer, data, value, mode)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 6}}
    assert sum(found[0][-4:]) < 0.95 * sum(found[0][:4])
    for numbers, exact, first in zip(found, wanted, (2, 1), strict=True):  # two losses, one norm
        close = partial(torch.testing.assert_close, atol=0)
        numbers, exact = torch.tensor(numbers), torch.tensor(exact)
        close(numbers[:first], exact[:first], rtol=FIRST_FLOAT16_STEP)
        close(numbers, exact, rtol=SIX_FLOAT16_STEPS)


@LEVELS
def test_checkpoint_resumes_to_the_bit(tmp_path, level):
    def start():
        model = vit()
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        return amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    data = batches(8)
    scaler = ApexScaler()
    model, optimizer = start()
    # The scale is not the one that a new training starts with.
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 0}})
    train(scaler, model, optimizer, data[:4], 1.0, "norm")
    saver = CheckpointSaver(model, optimizer, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(epoch=0, metric=1.0)
    del saver  # it holds the optimizer, and one training is to be alive below
    wanted = train(scaler, model, optimizer, data[4:], 1.0, "norm"), model.state_dict()

    scaler = ApexScaler()
    model = optimizer = None
    model, optimizer = start()
    file = str(tmp_path / "checkpoint-0.pth.tar")
    assert resume_checkpoint(model, file, optimizer, scaler, log_info=False) == 1
    found = train(scaler, model, optimizer, data[4:], 1.0, "norm"), model.state_dict()
    assert_equal(found, wanted)
    assert amp.state_dict(optimizers=optimizer) == {
        "loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 4}
    }


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # torch advises against
def test_create_graph_for_a_second_order_optimizer():
    """At a loss scale of 1 it is torch's; the graph of scaled gradients is refused, not used."""
    timm.layers.set_fused_attn(False)  # torch's fused attention has no second derivative
    losses = {}
    for level in (None, "O0"):
        model = vit()
        optimizer = create_optimizer_v2(model, "adahessian", lr=1e-2)
        assert optimizer.is_second_order
        if level is not None:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        losses[level] = []
        for x, y in batches(4):
            loss = loss_of(model, x, y)
            if level is None:
                loss.backward(create_graph=True)
                optimizer.step()
            else:
                ApexScaler()(loss, optimizer, create_graph=True)
            optimizer.zero_grad()
            losses[level].append(loss.item())
    assert len(set(losses[None])) == 4
    assert losses["O0"] == losses[None]

    for level in ("O1", "O2"):
        model = vit()
        optimizer = create_optimizer_v2(model, "adahessian", lr=1e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="does not unscale their graph"):
            ApexScaler()(loss_of(model, x, y), optimizer, create_graph=True)
        assert all(map(torch.equal, model.parameters(), before))


# Not RmsNorm2d: where timm finds apex, it normalizes and multiplies by the weight twice there.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [LayerNorm, RmsNorm, LayerNorm2d])
@pytest.mark.parametrize("affine", [True, False])
def test_fast_norms_are_ours_and_exact(layer, affine, dtype):
    assert fast_norm.has_apex
    assert fast_norm.has_apex_rmsnorm
    assert fast_norm.fused_layer_norm_affine is fused_layer_norm.fused_layer_norm_affine
    assert fast_norm.fused_rms_norm_affine is fused_layer_norm.fused_rms_norm_affine
    assert fast_norm.fused_rms_norm is fused_layer_norm.fused_rms_norm
    x, dy = torch.randn(2, 3, 48, 5, 7).to(dtype)
    if layer is not LayerNorm2d:
        x, dy = x.movedim(1, -1), dy.movedim(1, -1)
    timm.layers.set_fast_norm(True)
    norm = layer(48, affine=affine).to(dtype)
    timm.layers.set_fast_norm(False)
    for weight in norm.parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5)
    exactly = (torch.nn.RMSNorm if layer is RmsNorm else torch.nn.LayerNorm)(
        48, eps=norm.eps, elementwise_affine=affine, dtype=torch.float64
    )
    exactly.load_state_dict(norm.state_dict())
    given, given64 = x.clone().requires_grad_(), x.double().requires_grad_()
    y = norm(given)
    y.backward(dy)
    last = (lambda t: t.movedim(1, -1)) if layer is LayerNorm2d else (lambda t: t)
    y64 = exactly(last(given64))
    y64.backward(last(dy).double())
    assert_one_rounding(last(y).detach(), y64.detach())
    assert_one_rounding(given.grad, given64.grad)
    for weight, weight64 in zip(norm.parameters(), exactly.parameters(), strict=True):
        assert_one_rounding(weight.grad, weight64.grad, added=3 * 5 * 7)


@LEVELS
def test_a_model_with_fast_norms_trains(level):
    timm.layers.set_fast_norm(True)
    model = vit()
    timm.layers.set_fast_norm(False)
    assert any(module._fast_norm for module in model.modules() if isinstance(module, LayerNorm))
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses, _ = train(ApexScaler(), model, optimizer, batches(12), 1.0, "norm")
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


@pytest.mark.parametrize(
    ("name", "ours", "torchs"),
    [  # those that timm's factory knows
        ("fusedsgd", FusedSGD, lambda groups: torch.optim.SGD(groups, 0.01, 0.9, nesterov=True)),
        ("fusedadam", FusedAdam, lambda groups: torch.optim.Adam(groups, 0.01)),
        ("fusedadamw", FusedAdam, lambda groups: torch.optim.AdamW(groups, 0.01)),
        ("fusedlamb", FusedLAMB, None),
        ("fusednovograd", FusedNovoGrad, None),
    ],
)
def test_the_factory_makes_our_optimizers(monkeypatch, name, ours, torchs):
    model = vit()
    with monkeypatch.context() as patch:
        # timm insists on a CUDA device before it imports apex; nothing else of it asks.
        patch.setattr(torch.cuda, "is_available", lambda: True)
        made = create_optimizer_v2(model, name, lr=0.01, weight_decay=0.05, layer_decay=0.7)
    assert type(made) is ours
    assert len({group["lr_scale"] for group in made.param_groups}) > 1  # timm's own key
    losses = run_steps(model, made)
    assert losses[-1] < losses[0]
    if torchs is not None:
        other = vit()
        groups = create_optimizer_v2(
            other, "sgd", lr=0.01, weight_decay=0.05, layer_decay=0.7
        ).param_groups
        keys = ("params", "lr", "weight_decay")
        groups = [{key: group[key] for key in keys} for group in groups]
        wanted = run_steps(other, torchs(groups))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted))


def run_steps(model, optimizer):
    ((x, y),) = batches(1)
    losses = []
    for _ in range(4):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
