"""Training that may be killed at any moment and goes on, bit for bit, when started again."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make noisy pictures of ten shapes, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randn(10, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return shapes[labels] + torch.randn(count, 1, 8, 8, generator=generator), labels


def network() -> nn.Module:
    """A small convolutional classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 8 * 8, 10),
    )


def save(path: str, state: dict[str, object]) -> None:
    """Write ``state`` to ``path``, where at any moment there is the old file or the new, whole."""
    temporary = f"{path}.tmp"  # in the same folder: os.replace cannot cross file systems
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    os.replace(temporary, path)


def main(argv: list[str] | None = None) -> None:
    """Train from the checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="file to resume from and to save to")
    parser.add_argument("--opt-level", default="O2", choices=["O0", "O1", "O2", "O3", "O4", "O5"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pictures, labels = (tensor.to(device) for tensor in digits(1000))
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "amp": amp}
    done = 0
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        done = saved["step"]
        torch.set_rng_state(saved["rng"])
        if device == "cuda":
            torch.cuda.set_rng_state(saved["cuda_rng"])
        print(f"resumed at step {done}", flush=True)

    for step in range(done + 1, args.steps + 1):
        batch = torch.randint(0, len(pictures), (64,)).to(device)
        loss = F.cross_entropy(model(pictures[batch]), labels[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            state = {name: part.state_dict() for name, part in parts.items()}
            state["step"], state["rng"] = step, torch.get_rng_state()
            if device == "cuda":
                state["cuda_rng"] = torch.cuda.get_rng_state()
            save(args.checkpoint, state)


if __name__ == "__main__":
    main()
