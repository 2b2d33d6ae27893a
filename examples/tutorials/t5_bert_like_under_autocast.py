"""T5: a BERT-like model under autocast with a scaler and a scheduler; and one that is 16 bits wide.

A real BERT, fine-tuned on text: examples/bert.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


class Outputs(NamedTuple):
    """What a language model returns: ``outputs.loss`` and ``outputs.logits``."""

    loss: torch.Tensor
    logits: torch.Tensor


class Bert(nn.Module):
    """Embeddings, one encoder layer and a classifier on the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Outputs:
        """Map tokens ``(n, length)`` and labels ``(n,)`` to a loss and scores ``(n, 2)``."""
        logits = self.classifier(self.layer(self.embedding(input_ids))[:, 0])
        return Outputs(F.cross_entropy(logits.float(), labels), logits)


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
input_ids = torch.randint(0, 20, (32, 6), device=device)
labels = (input_ids[:, 0] > input_ids[:, 1]).long()


def train(name: str, dtype: torch.dtype, level: str = "") -> None:
    """Fine-tune a model whose weights are cast to ``dtype`` first, and show losses."""
    torch.manual_seed(1)
    model = Bert().to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    scaler = amp.GradScaler(device, init_scale=2**10)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with amp.autocast(dtype=torch.bfloat16 if dtype == torch.bfloat16 else None):
            outputs = model(input_ids, labels=labels)
        if level:
            with amp.scale_loss(outputs.loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        else:
            scaler.scale(outputs.loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        losses.append(outputs.loss.item())
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, logits {outputs.logits.dtype}")


train("float32 weights, autocast, torch's scaler", torch.float32)
try:
    train("float16 weights, autocast, torch's scaler", torch.float16)
except ValueError as error:  # torch's scaler refuses them; what is meant is O2
    print(f"float16 weights, autocast, torch's scaler: ValueError: {error}")
train("float16 weights and masters by O2, scale_loss", torch.float32, "O2")
train("bfloat16 weights, autocast, torch's scaler", torch.bfloat16)
