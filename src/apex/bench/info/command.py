"""``apex info``: what is installed here, which code path runs it, and what gets in the way.

`collect` returns plain data and `draw` makes text of it, so that other commands can keep the
same facts beside their results. It needs torch alone, and a thing that is missing is a line of
the report, never an error.
"""

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from apex.bench.info import families, installs, machine
from apex.ops import _runtime

__all__ = ["HELP", "Report", "add_arguments", "as_dict", "collect", "draw", "run"]

HELP = (
    "Show the versions, devices and CUDA tools of this machine, which code computes "
    "each family of operations and why, and whether another package called apex gets in the way."
)
GIB = 2**30


@dataclass(frozen=True)
class Report:
    """Everything that ``apex info`` knows."""

    versions: machine.Versions
    devices: tuple[machine.Device, ...]
    cuda: machine.Cuda
    why_not_triton: str | None  # why no Triton kernel can run here, None if they can
    op_families: tuple[families.LivePath, ...]
    installs: installs.Installs
    warnings: tuple[str, ...]  # what torch had to say about this machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex info``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    report = collect()
    print(json.dumps(as_dict(report), indent=2) if args.json else draw(report))
    return 0


def collect() -> Report:
    """Look at this machine and this process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = machine.devices()
        cuda = machine.cuda()
        why_not_triton = _runtime.why_not_triton()
        paths = families.live_paths(device.device for device in devices)
    return Report(
        versions=machine.versions(),
        devices=tuple(devices),
        cuda=cuda,
        why_not_triton=why_not_triton,
        op_families=tuple(paths),
        installs=installs.look(),
        warnings=tuple(dict.fromkeys(" ".join(str(item.message).split()) for item in caught)),
    )


def as_dict(report: Report) -> dict[str, Any]:
    """Turn a report into dicts, lists, strings and numbers."""
    return asdict(report)


def draw(report: Report) -> str:
    """Draw a report as text."""
    sections = [
        ("Versions", _versions(report.versions)),
        ("Devices", [row for device in report.devices for row in _device(device)]),
        ("CUDA", [*_cuda(report.cuda), ("Triton kernels", _triton(report.why_not_triton))]),
        ("Code paths", _families(report.op_families)),
        ("Called apex here", _installs(report.installs)),
    ]
    if report.warnings:
        sections.append(("Warnings", [(warning,) for warning in report.warnings]))
    return "\n\n".join("\n".join([title, *_aligned(rows)]) for title, rows in sections)


Row = Sequence[str]


def _versions(versions: machine.Versions) -> list[Row]:
    return [
        ("apex", versions.apex),
        ("torch", versions.torch),
        ("Triton", versions.triton or "not installed"),
        ("Python", versions.python),
        ("platform", versions.platform),
    ]


def _device(device: machine.Device) -> Iterator[Row]:
    cpu = device.device == "cpu"
    details = [device.name]
    if device.cores is not None:
        details.append(f"{device.cores} {'logical cores' if cpu else 'multiprocessors'}")
    if device.memory_bytes is not None:
        details.append(f"{device.memory_bytes / GIB:.1f} GiB")
    if device.capability is not None:
        details.append(f"{'' if cpu else 'compute capability '}{device.capability}")
    yield device.device, ", ".join(details)
    for half in device.half_types:
        answer = {True: "native", False: "not native", None: "unknown"}[half.native]
        yield "", f"{half.dtype}: {answer} ({half.why})"


def _cuda(cuda: machine.Cuda) -> list[Row]:
    return [
        ("available", "yes" if cuda.available else f"no: {cuda.why_not}"),
        ("torch built for", _built_for(cuda)),
        ("cuDNN", cuda.cudnn or "none"),
        ("driver", _driver(cuda)),
        ("nvcc", _nvcc(cuda)),
    ]


def _built_for(cuda: machine.Cuda) -> str:
    if cuda.torch_rocm is not None:
        return f"ROCm {cuda.torch_rocm}"
    return f"CUDA {cuda.torch_cuda}" if cuda.torch_cuda else "CPU only"


def _triton(why_not: str | None) -> str:
    if why_not is None:
        return "run"
    return f"cannot run: {why_not} (plain PyTorch runs in their place)"


def _driver(cuda: machine.Cuda) -> str:
    if cuda.driver is None:
        return "not found (nvidia-smi does not answer)"
    return cuda.driver + (f", serves CUDA up to {cuda.driver_cuda}" if cuda.driver_cuda else "")


def _nvcc(cuda: machine.Cuda) -> str:
    not_needed = "not needed: nothing here is compiled with it"
    if cuda.nvcc_path is None:
        return f"not found ({not_needed})"
    return f"{cuda.nvcc or 'unknown version'} at {cuda.nvcc_path} ({not_needed})"


def _families(paths: Iterable[families.LivePath]) -> list[Row]:
    return [(path.family, path.device, path.path, path.why) for path in paths]


def _installs(found: installs.Installs) -> list[Row]:
    rows = [("running", found.running), ("shadowed", "yes" if found.shadowed else "no")]
    rows += [
        ("installed", f"{item.version}, {item.project}, in {item.where}")
        for item in found.distributions
    ]
    rows += [
        ("importable", f"{package.where}, {package.project}")
        for package in found.packages
        if package.where != found.running
    ]
    return [*rows, *(("to do", advice) for advice in found.advice)]


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    """Indent the rows and line up all columns but the last."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()
