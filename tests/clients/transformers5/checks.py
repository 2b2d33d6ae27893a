"""transformers 5: our layers in its models, by apex.patch and by its kernels; Trainer; PEFT."""

import copy
import os

os.environ["TRITON_INTERPRET"] = "1"  # read by Triton where a kernel is decorated

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import apex
from apex import _fused_layers, amp
from apex.ops import _runtime
from apex.optimizers import FusedAdam
from tests.test_hub import *  # noqa: F403
from tests.test_patch import *  # noqa: F403
from tests.test_patch import made, tokens


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


class Norms(TrainerCallback):
    def __init__(self):
        self.optimizers = set()

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.optimizers.add(type(getattr(optimizer, "optimizer", optimizer)))


def test_trainer_with_fused_adam_and_a_patched_model(tmp_path):
    losses = []
    for patched in (False, True):
        model, seen = made("Llama"), Norms()
        kind = FusedAdam if patched else torch.optim.AdamW
        if patched:
            apex.patch(model)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                str(tmp_path), max_steps=6, logging_steps=1, per_device_train_batch_size=3,
                use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", seed=1,
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens()],
            optimizers=(kind(model.parameters(), lr=1e-2, weight_decay=0.01), None),
            callbacks=[seen],
        )  # fmt: skip
        trainer.train()
        assert seen.optimizers == {kind}
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[1][-1] < 0.8 * losses[1][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=0)


def test_classes_are_those_that_are_known():
    model = made("Qwen3")
    apex.patch(model)
    assert type(model.model.layers[0].self_attn.q_norm) is _fused_layers.RMSNorm
    amp.reset()
