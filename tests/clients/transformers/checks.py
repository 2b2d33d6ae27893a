"""transformers: the Trainer's own apex path, and T5 on our FusedRMSNorm."""

import copy
import math

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.t5 import modeling_t5

from apex import amp, debug
from apex._compat import HAS_GRAD_DTYPE
from apex.normalization import FusedRMSNorm
from apex.optimizers import FusedAdam
from tests.checkpoints import assert_equal
from tests.clients.documented import callback
from tests.tolerance import HALF_WEIGHTS

STEPS, SAVED_AT = 12, 6
CLIP = 0.5
WITHOUT_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


class Watch(TrainerCallback):
    """Notes the norm of the gradients that the optimizer is given, and the weights at each step."""

    def __init__(self, first_scale=None):
        self.first_scale = first_scale
        self.norms = []
        self.weights = []

    def on_train_begin(self, args, state, control, **kwargs):
        if self.first_scale is not None:
            amp._amp_state.loss_scalers[0]._loss_scale = self.first_scale

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        weights = list(amp.master_params(optimizer))
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in weights]).item())
        self.weights.append([p.detach().clone() for p in weights])


class Root(torch.nn.Module):
    """Finite in forward, not in backward."""

    def forward(self, x):
        return torch.sqrt(x - x.detach())


def train(folder, watch, resume=None, broken=False, **changes):
    """Train a tiny GPT-2 to count; return the Trainer."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    rows = (torch.arange(64)[:, None] + torch.arange(12)) % 32
    settings = {
        "fp16": True, "half_precision_backend": "apex", "optim": "adamw_apex_fused",
        "gradient_accumulation_steps": 2, "use_cpu": True, "max_grad_norm": CLIP,
        "max_steps": STEPS, "save_steps": SAVED_AT, "logging_steps": 1,
        "per_device_train_batch_size": 8, "learning_rate": 1e-2, "weight_decay": 0.01,
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 1,
        **changes,
    }  # fmt: skip
    model = GPT2LMHeadModel(config)  # its dropout makes the state of the generator matter
    if broken:
        model.transformer.h[1].mlp.act = Root()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(folder), **settings),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[watch],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, what, after=0):
    return [log[what] for log in trainer.state.log_history if what in log and log["step"] > after]


@LEVELS
def test_trainer_trains_accumulates_clips_and_resumes(tmp_path, level):
    whole_watch = Watch()
    whole = train(tmp_path, whole_watch, fp16_opt_level=level)
    # Its own apex path was taken, with our optimizer under our amp, for every step.
    assert whole.use_apex
    assert type(whole.optimizer) is FusedAdam
    assert hasattr(whole.optimizer, "_amp_stash")
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": STEPS}}
    half = {torch.float16} if level == "O2" else {torch.float32}
    assert {p.dtype for p in whole.model.parameters()} == half
    assert {p.dtype for p in amp.master_params(whole.optimizer)} == {torch.float32}

    losses = logged(whole, "loss")
    assert losses[-1] < 0.7 * losses[0]
    # The norm that the Trainer logs is the one from before; the optimizer's gradients are clipped.
    assert min(logged(whole, "grad_norm")) > CLIP
    torch.testing.assert_close(torch.tensor(whole_watch.norms), torch.full((STEPS,), CLIP))

    # The same training in float32, without apex; torch's tolerance for float16. The casts of O1
    # hold for a whole thread, as in NVIDIA's Apex.
    with amp.disable_casts():
        plain = train(
            tmp_path / "plain", TrainerCallback(), fp16=False, half_precision_backend="auto",
            optim="adamw_torch",
        )  # fmt: skip
    assert not plain.use_apex
    wanted = logged(plain, "loss")
    torch.testing.assert_close(torch.tensor(losses).half(), torch.tensor(wanted).half())

    # The Trainer saves the optimizer and the generators but not amp.state_dict(): the scale starts
    # again where it started, which here is where it still was. So everything else is the same.
    resumed_watch = Watch()
    folder = str(tmp_path / f"checkpoint-{SAVED_AT}")
    resumed = train(tmp_path, resumed_watch, folder, fp16_opt_level=level)
    assert logged(resumed, "loss", SAVED_AT) == logged(whole, "loss", SAVED_AT)
    assert logged(resumed, "grad_norm", SAVED_AT) == logged(whole, "grad_norm", SAVED_AT)
    assert_equal(resumed_watch.weights, whole_watch.weights[SAVED_AT:])


@LEVELS
def test_trainer_survives_overflows(tmp_path, level):
    watch = Watch(first_scale=2.0**34)
    trainer = train(tmp_path, watch, fp16_opt_level=level)
    skipped = [not math.isfinite(norm) for norm in watch.norms]
    assert 0 < sum(skipped) < STEPS
    # The counter of clean steps begins anew with every skipped one.
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == skipped[::-1].index(True)
    for was_skipped, before, after in zip(skipped, watch.weights, watch.weights[1:], strict=False):
        assert all(map(torch.equal, before, after)) == was_skipped
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """The folder of a tiny T5 with random weights."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("t5")
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, FusedRMSNorm)]


def tokens():
    order = torch.randperm(62, generator=torch.Generator().manual_seed(0))
    return 2 + order[:40].view(4, 10)


def test_t5_takes_our_norm_and_it_is_torchs(t5):
    assert modeling_t5.T5LayerNorm is FusedRMSNorm
    ours = T5ForConditionalGeneration.from_pretrained(t5)
    assert len(norms_of(ours)) == 2 * 2 + 2 * 3 + 2  # of encoder and decoder, and their last
    torchs = copy.deepcopy(ours)
    for module in list(torchs.modules()):
        for name, child in module.named_children():
            if isinstance(child, FusedRMSNorm):
                norm = torch.nn.RMSNorm(child.normalized_shape, child.eps)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    assert not norms_of(torchs)
    results = []
    for model in (ours, torchs):
        model.eval()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)
    written = [model.generate(tokens(), max_new_tokens=8) for model in (ours, torchs)]
    assert torch.equal(*written)


@pytest.mark.parametrize("how", ["float32", "float16", "bfloat16", "O1", "O2"])
def test_t5_trains_and_generates(t5, how):
    dtype = torch.float32 if how.startswith("O") else getattr(torch, how)
    # In half, transformers keeps the last linear layer of each block in float32.
    model = T5ForConditionalGeneration.from_pretrained(t5, dtype=dtype).train()
    assert norms_of(model)
    assert {norm.weight.dtype for norm in norms_of(model)} == {dtype}
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    if how.startswith("O"):
        model, optimizer = amp.initialize(model, optimizer, opt_level=how, verbosity=0)
    losses = []
    for _ in range(25):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        if how.startswith("O"):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    written = model.eval().generate(tokens(), max_new_tokens=10, do_sample=False)
    # What it learned: to write the rows that it was given, after the token that starts.
    assert torch.equal(written[:, 1:], tokens())


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "apex"])
def test_the_documented_callback_explains(tmp_path, mode):
    explain = callback("transformers")()
    options = {"fp16": mode == "apex", "bf16": mode == "bfloat16", "max_steps": 20}
    if mode != "apex":
        options |= {"half_precision_backend": "auto", "optim": "adamw_torch"}
    with pytest.warns(debug.FaultWarning, match="SqrtBackward0"):
        train(tmp_path, explain, broken=True, save_strategy="no", **options)
    report = explain.watch.report
    assert (report.cause, report.module) == ("model", "transformer.h.1.mlp.act")
    assert report.step == (17 if mode == "apex" else 1)
    assert explain.watch.skipped == 20


def test_a_healthy_training_has_no_report_and_the_same_weights(tmp_path):
    explain = callback("transformers")()
    watched = train(tmp_path, explain, save_strategy="no")
    assert (explain.watch.report, explain.watch.steps) == (None, STEPS)
    plain = train(tmp_path, Watch(), save_strategy="no")
    assert_equal(watched.model.state_dict(), plain.model.state_dict())


class Scales(TrainerCallback):
    """What accelerate does on a GPU and leaves out on a CPU: its scaler unscales before it clips.

    Set once the model is prepared, which is not to run under autocast.
    """

    def __init__(self, trainer):
        self.accelerator = trainer.accelerator
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def on_train_begin(self, args, state, control, **kwargs):
        self.accelerator.native_amp = True


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Tensor.grad_dtype: torch 2.13")
def test_float16_weights_train_as_float32_ones(tmp_path):
    found = []
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(32, 16, 32, 2, 2, **WITHOUT_DROPOUT)).to(dtype)
        optimizer = FusedAdam(model.parameters(), lr=1e-2, eps=1e-6)
        rows = (torch.arange(64)[:, None] + torch.arange(12)) % 32
        settings = {
            "fp16": dtype == torch.float16, "use_cpu": True, "max_grad_norm": CLIP,
            "max_steps": STEPS, "save_strategy": "no", "logging_steps": 1, "seed": 1,
            "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
        }  # fmt: skip
        trainer = Trainer(
            model=model,
            args=TrainingArguments(str(tmp_path), **settings),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            optimizers=(optimizer, None),
        )
        if dtype == torch.float16:
            amp.float16_weights(optimizer)
            trainer.add_callback(Scales(trainer))
        trainer.train()
        assert {p.dtype for p in model.parameters()} == {dtype}
        found.append(torch.tensor(logged(trainer, "loss")))
        if dtype == torch.float16:
            assert trainer.accelerator.scaler.get_scale() == 2.0**10
            assert trainer.accelerator.scaler._get_growth_tracker() == STEPS
    torch.testing.assert_close(found[1], found[0], rtol=HALF_WEIGHTS, atol=0.0)
    assert found[1][-1] < 0.7 * found[1][0]
