"""T3: a picture of the loss scale while a small sequence model learns to copy backwards.

The scale grows, and then swings in a band. It starts lower and grows sooner here (after 10 good
steps, not 2,000), so that this is seen within seconds.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

try:
    from matplotlib.figure import Figure
except ImportError:
    raise SystemExit("This program draws a picture: pip install matplotlib") from None

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("picture", nargs="?", default="loss_scale.png", help="file to write")
picture = parser.parse_args().picture
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
words, width, length, steps = 8, 32, 4, 300
embedding, encoder = nn.Embedding(words, width), nn.GRU(width, width, bidirectional=True)
decoder = nn.Linear(2 * width, words)
model = nn.ModuleList([embedding, encoder, decoder]).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(
    model,
    optimizer,
    opt_level="O1",
    verbosity=0,
    init_scale=2.0**10,
    growth_interval=10,
    max_loss_scale=None,
)

scales, losses, skipped = [], [], []
for step in range(steps):
    text = torch.randint(0, words, (length, 16), device=device)
    out, _ = encoder(embedding(text))
    loss = F.cross_entropy(decoder(out).flatten(0, 1), text.flip(0).flatten())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    if not amp.stepped(optimizer):
        skipped.append(step)
    losses.append(loss.item())
    scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])

figure = Figure(figsize=(8, 3.5), layout="constrained")
axes = figure.subplots()
axes.step(range(steps), scales, where="post", label="loss scale")
axes.plot(skipped, [scales[i] for i in skipped], "v", color="tab:red", label="step skipped")
axes.set(xlabel="step", ylabel="loss scale")
axes.set_yscale("log", base=2)
axes.legend()
try:
    figure.savefig(picture)
except (OSError, ValueError) as error:  # no such folder, or no such kind of picture
    raise SystemExit(f"{picture}: {error}") from None

band = scales[skipped[0] :] if skipped else scales[-1:]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(skipped)} of {steps} steps were skipped")
print(f"scale {scales[0]:.0f}, from step {steps - len(band)} on {min(band):.0f} to {max(band):.0f}")
