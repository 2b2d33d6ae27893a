"""Train a VGG16 at FP32, FP16 and amp over batch sizes, as the tutorial's benchmark did.

The results go to ``results/NAME``, where NAME is the device's or that of ``--GPU``; make_plot.py
draws them. Everything else on the command line goes to ``apex bench``, which does the work.
"""

import argparse
import re
import sys
from pathlib import Path

import torch

from apex.commands.command_line import main

RESULTS = Path("results")
METHODS = ("FP32", "FP16", "amp")
BATCHES = ("128", "256", "512", "1024", "2048")


def device_name() -> str:
    """Name the device that will train."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "CPU"


def run() -> int:
    """Hand the command line to apex bench with the tutorial's matrix as defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--GPU", default=device_name(), help="name of this machine's results")
    parser.add_argument(
        "--method", nargs="+", default=METHODS, help="FP32, FP16, amp, O0 to O5 ..."
    )
    parser.add_argument("--batch", nargs="+", default=BATCHES, help="batch sizes")
    parser.add_argument(
        "--data", help="folder with CIFAR-10's binary files; without it, scikit-learn's digits"
    )
    args, others = parser.parse_known_args()
    if not re.fullmatch(r"[\w .()+-]+", args.GPU) or args.GPU.strip(".") == "":
        said = f"--GPU {args.GPU}: a name of letters, digits, spaces and .()+- is needed"
        print(said, file=sys.stderr)
        return 2
    task = ["--task", "cifar10-vgg16", "--data", args.data] if args.data else []
    words = ["bench", *(task or ["--task", "digits-vgg16"])]
    words += ["--levels", *args.method, "--batch", *args.batch]
    return main([*words, "--out", str(RESULTS / args.GPU), *others])


if __name__ == "__main__":
    sys.exit(run())
