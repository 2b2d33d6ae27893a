"""Train a convolutional network on images of digits, each step replayed as one CUDA graph."""

import argparse

import common
import data
import torch
from torch import nn
from torch.utils.data import DataLoader

from apex import amp
from apex.optimizers import FusedSGD


def train(process: common.Process, args: argparse.Namespace) -> None:
    """Train on one device, then evaluate."""
    torch.manual_seed(0)
    device = process.device
    model = common.ConvNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = FusedSGD(model.parameters(), args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss

    step = amp.capture(train_step)  # without this line: step = train_step

    train_set, test_set = data.load(args.data, args.limit)
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    with common.Report(args.epochs, len(loader)) as report:
        for _ in range(args.epochs):
            for images, labels in loader:
                report.step(step(images.to(device), labels.to(device)))
    common.evaluate(model, test_set, device)


def main() -> None:
    """Read the options and start."""
    parser = common.parser(__doc__)
    parser.add_argument("--opt-level", default="O2", choices=["O0", "O1", "O2", "O3", "O4", "O5"])
    args = parser.parse_args()
    if args.nodes * args.gpus > 1:
        parser.error("-n, -g: one GPU, and one process; amp.capture does not take more yet")
    common.start(train, args)


if __name__ == "__main__":
    main()
