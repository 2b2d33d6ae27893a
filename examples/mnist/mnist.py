"""Train a convolutional network on images of digits, on one device."""

import argparse

import common
import data
import torch
from torch import nn
from torch.utils.data import DataLoader

from apex.parallel.launch import environment


def train(args: argparse.Namespace) -> None:
    """Train, then show the accuracy."""
    torch.manual_seed(0)
    device = common.device_of(0)
    model = common.ConvNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr)

    train_set, test_set = data.load(args.data, args.limit)
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    with common.Report(args.epochs, len(loader)) as report:
        for _ in range(args.epochs):
            for images, labels in loader:
                loss = criterion(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report.step(loss)
    common.evaluate(model, test_set, device)


def main() -> None:
    """Read the options and train."""
    args = common.parser(__doc__).parse_args()
    processes = max(args.nodes * args.gpus, environment().world_size)
    if processes != 1:
        raise SystemExit(
            f"{processes} processes are asked for, and mnist.py trains on one device: use "
            "mnist-distributed.py"
        )
    train(args)


if __name__ == "__main__":
    main()
