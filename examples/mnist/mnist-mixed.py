"""Train a convolutional network on images of digits, in mixed precision, on several GPUs."""

import argparse

import common
import data
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from apex import amp
from apex.parallel import DistributedDataParallel


def train(process: common.Process, args: argparse.Namespace) -> None:
    """Train with the other processes, each on its share of the images; rank 0 then evaluates."""
    torch.manual_seed(0)
    device = process.device
    model = common.ConvNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = DistributedDataParallel(model)

    train_set, test_set = data.load(args.data, args.limit)
    sampler = DistributedSampler(train_set, process.world_size, process.rank)
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=False, sampler=sampler)
    with common.Report(args.epochs, len(loader), silent=process.rank > 0) as report:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # another order in each epoch
            for images, labels in loader:
                loss = criterion(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                report.step(loss)
    if process.rank == 0:  # alone; without gradients apex's wrapper does not communicate
        common.evaluate(model, test_set, device)


def main() -> None:
    """Read the options and start the processes."""
    parser = common.parser(__doc__)
    levels = ["O0", "O1", "O2", "O3", "O4", "O5"]
    parser.add_argument("--opt-level", default="O2", choices=levels)
    common.start(train, parser.parse_args())


if __name__ == "__main__":
    main()
