"""What the three programs share: the options and a small regression problem."""

import argparse
from collections.abc import Callable, Sequence

import torch

BATCH, INPUTS, OUTPUTS = 64, 1024, 16


def parser(description: str, steps: int) -> argparse.ArgumentParser:
    """Declare the options that all have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    made.add_argument(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        default="float16",
        help="of the model; float32 to compare with (default: %(default)s)",
    )
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    args = made.parse_args(argv)
    if args.steps < 2:
        made.error(f"--steps {args.steps}: pass 2 or more")
    return args


def problem(args: argparse.Namespace) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Make a model, its inputs and, in float32, what it shall learn; the same in each dtype."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.randn(BATCH, INPUTS), torch.randn(BATCH, OUTPUTS)
    dtype = getattr(torch, args.dtype)
    model = torch.nn.Linear(INPUTS, OUTPUTS).to(device, dtype)
    return model, x.to(device, dtype), y.to(device)


def start(main: Callable[[], None]) -> None:
    """Run a program; Ctrl-C, or a full disk, ends it without a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
    except OSError as error:
        raise SystemExit(str(error)) from None
