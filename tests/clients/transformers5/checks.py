"""transformers 5: our layers in its models, by apex.patch and by its kernels; Trainer; PEFT."""

import copy
import os

os.environ["TRITON_INTERPRET"] = "1"  # read by Triton where a kernel is decorated

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import apex
from apex import amp
from apex.ops import _runtime
from apex.optimizers import FusedAdam
from apex.patching import _layers as layers
from tests.checkpoints import assert_equal
from tests.clients.checked import TRUE, Planted, changed, check  # noqa: F401
from tests.clients.documented import callback, program
from tests.test_patch import *  # noqa: F403
from tests.test_patch import made, tokens

STEPS = 10


def with_lora(model):
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(model, config)


def loss_of(model):
    with _runtime.use("triton"):
        return model(input_ids=tokens(), labels=tokens()).loss


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_lora_of_peft(first):
    """Both orders: the linear layers inside of a patched MLP are PEFT's."""
    plain = with_lora(made("Llama"))
    model = made("Llama")
    if first == "patch":
        report, model = apex.patch(model), with_lora(model)
    else:
        model = with_lora(model)
        report = apex.patch(model)
    assert len(report.replaced) == 8
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8
    both = []
    for one in (model, plain):
        loss = loss_of(one)
        loss.backward()
        both.append([loss.detach(), *(p.grad for p in one.parameters() if p.requires_grad)])
    torch.testing.assert_close(*both)
    merged = [copy.deepcopy(one).merge_and_unload() for one in (model, plain)]
    torch.testing.assert_close(*[loss_of(one) for one in merged])
    report.undo()
    torch.testing.assert_close(loss_of(model), loss_of(plain))


def test_the_loss_of_the_page_is_the_models():
    """The lines that give a model's loss to `linear_cross_entropy`, as they stand there."""
    names = {}
    exec(program("fused-layers.md", "linear_cross_entropy("), names)
    model, ids = names["model"], names["tokens"]
    torch.testing.assert_close(names["loss"], model(input_ids=ids, labels=ids).loss)
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0


class Seen(TrainerCallback):
    """Notes classes of optimizers and scalers, and the loss scale after each step."""

    def __init__(self):
        self.classes, self.scales = set(), []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        scaler = optimizer.scaler
        self.classes.add((type(optimizer.optimizer), type(scaler)))
        self.scales.append(scaler and scaler.get_scale())


def trained(folder, optimizer_class, patched=False, scaler=None, ours=False, resume=None):
    """Train a small Llama; return losses, weights and what was seen.

    With a ``scaler`` in float16, as accelerate does it on a GPU; ``ours`` is the documented
    callback, which replaces it.
    """
    model, seen = made("Llama"), Seen()
    if patched:
        apex.patch(model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(folder), max_steps=STEPS, logging_steps=1, per_device_train_batch_size=3,
            use_cpu=True, report_to="none", disable_tqdm=True, save_steps=STEPS // 2, seed=1,
            save_only_model=False, dataloader_pin_memory=False, fp16=scaler is not None,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens()],
        optimizers=(optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.01), None),
        callbacks=[seen],
    )  # fmt: skip
    if scaler is not None:
        assert trainer.accelerator.scaler is None
        trainer.accelerator.native_amp, trainer.accelerator.scaler = True, scaler
    if ours:
        trainer.add_callback(callback("transformers", "recipes.md", "Scale")(trainer))
    products = set()
    model.lm_head.register_forward_hook(lambda *of: products.add(of[-1].dtype))
    trainer.train(resume_from_checkpoint=resume)
    assert products == {torch.float32 if scaler is None else torch.float16}
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, [p.detach().clone() for p in model.parameters()], seen


def test_trainer_with_fused_adam_and_a_patched_model(tmp_path):
    wanted, _, seen = trained(tmp_path, torch.optim.AdamW)
    assert seen.classes == {(torch.optim.AdamW, type(None))}
    losses, _, seen = trained(tmp_path, FusedAdam, patched=True)
    assert seen.classes == {(FusedAdam, type(None))}
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted))


def test_trainer_with_our_scaler_in_a_callback(tmp_path):
    """Two steps overflow, and are skipped; then all is torch's scaler's, to the bit."""
    scales = [2.0**38, 2.0**37]
    wanted = trained(tmp_path, FusedAdam, scaler=torch.amp.GradScaler("cpu", 2.0**39))
    found = trained(tmp_path, FusedAdam, scaler=torch.amp.GradScaler("cpu", 2.0**39), ours=True)
    assert found[2].classes == {(FusedAdam, amp.GradScaler)}
    assert wanted[2].classes == {(FusedAdam, torch.amp.GradScaler)}
    assert found[2].scales[:2] == scales
    assert found[2].scales == wanted[2].scales
    assert_equal(found[:2], wanted[:2])
    resumed = trained(
        tmp_path, FusedAdam, scaler=torch.amp.GradScaler("cpu"), ours=True,
        resume=str(tmp_path / f"checkpoint-{STEPS // 2}"),
    )  # fmt: skip
    assert resumed[2].scales == wanted[2].scales[STEPS // 2 :]
    assert_equal(resumed[1], wanted[1])


def test_classes_are_those_that_are_known():
    model = made("Qwen3")
    apex.patch(model)
    assert type(model.model.layers[0].self_attn.q_norm) is layers.RMSNorm
    amp.reset()


# -- apex check ------------------------------------------------------------------------------------

LOOP = """
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback
from transformers import TrainingArguments

class Average(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.ema = {name: one.float().clone() for name, one in model.state_dict().items()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, one in model.state_dict().items():
            self.ema[name].lerp_(one.to(self.ema[name].dtype), 0.01)

class Own(Trainer):
    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        return loss

net = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
))
rows = (torch.arange(32)[:, None] + torch.arange(12)) % 32
trainer = Own(
    model=net,
    args=TrainingArguments(
        "out", max_steps=12, per_device_train_batch_size=8, use_cpu=True, report_to="none",
        disable_tqdm=True, save_steps=6, seed=1, learning_rate=1e-4, max_grad_norm=0.1,
        lr_scheduler_type="cosine", dataloader_pin_memory=False, fp16=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[Average()],
)
trainer.remove_callback(PrinterCallback)  # which prints how long it took
trainer.accelerator.native_amp = True  # as on a GPU
trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
trainer.train()
"""
CLIPS = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
MISTAKES = {
    "a training_step that clips before the Trainer unscales": changed(
        LOOP,
        "clip-before-unscale",
        "the norm was {0:.4g}, without the loss scale {1:.4g}; clipped to 9.8e-05 instead of 0.1",
        CLIPS,
        ("        return loss", f"        {TRUE}\n        {CLIPS}\n        return loss"),
    ),
    "weights in bfloat16": changed(
        LOOP,
        "update-lost",
        "of the bfloat16 weights with a gradient did not move",
        "trainer.train()",
        ("\n))\nrows", "\n)).bfloat16()\nrows"),
        ("fp16=True", "bf16=True"),
        ("trainer.accelerator.native_amp = True", "pass"),
        ("trainer.accelerator.scaler = ", ""),
    ),
    "an average in bfloat16": changed(
        LOOP,
        "sum-in-16-bits",
        "of its elements did not move although the update was not 0, in",
        "self.ema[name].lerp_(one.to(self.ema[name].dtype), 0.01)",
        (".float().clone()", ".bfloat16()"),
    ),
}


def test_apex_check_is_silent_for_a_healthy_loop(check):  # noqa: F811
    assert len(check.is_silent(Planted("", LOOP, {}).program())) > 100


@pytest.mark.parametrize("mistake", MISTAKES)
def test_apex_check_finds(check, mistake):  # noqa: F811
    check.finds(MISTAKES[mistake])
