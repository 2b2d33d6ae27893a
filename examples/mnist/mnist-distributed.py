"""Train a convolutional network on images of digits, on several GPUs."""

import argparse

import common
import data
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(process: common.Process, args: argparse.Namespace) -> None:
    """Train with the other processes, each on its share of the images; rank 0 then evaluates."""
    torch.manual_seed(0)
    device = process.device
    model = common.ConvNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
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
                loss.backward()
                optimizer.step()
                report.step(loss)
    if process.rank == 0:  # alone, so without the wrapper, whose forward waits for all ranks
        common.evaluate(model.module, test_set, device)


if __name__ == "__main__":
    common.start(train, common.parser(__doc__).parse_args())
