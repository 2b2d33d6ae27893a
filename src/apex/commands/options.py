"""What the commands that measure share: options, checks, and where the numbers were taken."""

import argparse
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from apex.commands.command_line import UsageError
from apex.commands.info import machine

__all__ = [
    "add_device",
    "at_least",
    "check_file",
    "check_folder",
    "environment",
    "pick_device",
    "positive",
    "terminated_like_interrupted",
    "unique",
]

T = TypeVar("T")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare ``--device``, for `pick_device`."""
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: cuda if there is one, else cpu)"
    )


def at_least(least: int) -> Callable[[str], int]:
    """Make an option's type: whole numbers of ``least`` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Read an option's number, above 0 and finite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def environment(device: torch.device) -> dict[str, Any]:
    """Describe what the numbers depend on: date, versions, device, threads."""
    name = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": machine.versions(),
        "device": asdict(next(here for here in machine.devices() if here.device == name)),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        cuda = machine.cuda()
        convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        found["cuda"] = {"torch": cuda["torch_cuda"], "fp32 convolutions": convolutions}
        found["cuda"] |= {name: cuda[name] for name in ("cudnn", "driver")}
    return found


def pick_device(asked: str | None) -> torch.device:
    """Turn ``--device`` into a device; a GPU if there is one and nothing was asked for.

    Raises:
        UsageError: There is no such device here.
    """
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", asked) is None:
        raise UsageError(f"--device {asked}: unknown; use cpu, cuda or cuda:N")
    device = torch.device(asked)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        here = f"this machine has {count}" if count else "torch finds no CUDA device"
        raise UsageError(f"--device {asked}: {here}")
    return device


def check_folder(option: str, folder: Path) -> None:
    """Make the folder of an option and try to write in it, now and not after minutes of work.

    Raises:
        UsageError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise UsageError(f"{option} {folder}: is a file; name a folder") from None
    except OSError as error:
        raise UsageError(f"{option} {folder}: cannot be written ({error.strerror})") from None


def check_file(option: str, file: Path) -> None:
    """Check that the file of an option can be written, and make its folder.

    Raises:
        UsageError: It is a folder, or its folder cannot be made or written.
    """
    if file.is_dir():
        raise UsageError(f"{option} {file}: is a folder; name a file")
    check_folder(option, file.parent)


def unique(values: Iterable[T]) -> list[T]:
    """Leave out what was there before; the order stays."""
    return list(dict.fromkeys(values))


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end the training as Ctrl-C does, so that what is finished is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may choose what a signal does
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
