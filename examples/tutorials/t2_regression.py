"""T2: the same regression in float32 and at O1. 500 steps, as in the tutorial; --steps N."""

import argparse

import torch

from apex import amp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=500)
steps = parser.parse_args().steps
if steps < 1:
    raise SystemExit(f"--steps {steps}: it must be 1 or more")

device = "cuda" if torch.cuda.is_available() else "cpu"
N, D_in, D_out = 64, 1024, 512
for use_amp in (False, True):
    torch.manual_seed(0)
    x, y = torch.randn(N, D_in, device=device), torch.randn(N, D_out, device=device)
    model = torch.nn.Linear(D_in, D_out).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if use_amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        if step == 0:
            first = loss.item()
        optimizer.zero_grad()
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
    print(f"{'O1' if use_amp else 'float32':7}  loss {first:.6f} -> {loss.item():.6f}")
