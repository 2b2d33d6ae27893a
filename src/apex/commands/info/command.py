"""``apex info``: what is installed here, which code path runs it, and what gets in the way.

`collect` returns plain data and `draw` makes text of it. It needs torch alone, and a thing that is
missing is a line of the report, never an error.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from apex._compat import instead, private
from apex.amp.casting import cpu_float16
from apex.commands.info import installs, machine
from apex.commands.info.speeds import Speed, speeds, times_of_float32
from apex.commands.tables import aligned
from apex.ops import _runtime

__all__ = ["HELP", "Installation", "add_arguments", "collect", "draw", "live_paths", "run"]

HELP = (
    "Show the versions, devices and CUDA tools of this machine, how fast each dtype is, which code "
    "computes each family of operations and why, and whether another package called apex gets in "
    "the way."
)
GIB = 2**30
WIDTH = 80  # columns; rows of paths are not broken, so that they can be copied
INSTALLS = "Packages called apex"

Row = Sequence[str]


PathName = Literal["Triton", "torch fused", "unavailable"]
Choice = tuple[PathName, str]


@dataclass(frozen=True)
class LivePath:
    """The path that a family of operations takes on a device, and the reason."""

    family: str
    device: str
    path: PathName
    why: str


@dataclass(frozen=True)
class Installation:
    """Everything that ``apex info`` knows.

    ``missing_private_names``: of torch, by path, with what happens without each. ``speeds`` are of
    the CPU and of the first GPU, by device; ``warnings`` are what torch had to say about this
    machine, and that it is busy.
    """

    versions: dict[str, str | None]
    missing_private_names: dict[str, str]
    devices: tuple[machine.Device, ...]
    speeds: dict[str, tuple[Speed, ...]]
    cuda: dict[str, str | None]
    why_not_triton: str | None
    op_families: tuple[LivePath, ...]
    installs: installs.Installs
    warnings: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex info``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    report = collect()
    print(json.dumps(asdict(report), indent=2) if args.json else draw(report))
    return 0


def collect() -> Installation:
    """Look at this machine and this process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = machine.devices()
        if (busy := machine.busy()) is not None:
            warnings.warn(busy, stacklevel=1)
        names = [device.device for device in devices]
        timed = [name for name in names if name in ("cpu", "cuda:0")]
        report = Installation(
            versions=machine.versions(),
            missing_private_names=private.missing(),
            devices=tuple(devices),
            speeds={name: speeds(torch.device(name)) for name in timed},
            cuda=machine.cuda(),
            why_not_triton=_runtime.why_not_triton(),
            op_families=tuple(live_paths(names)),
            installs=installs.search(),
            warnings=(),
        )
    messages = dict.fromkeys(" ".join(str(item.message).split()) for item in caught)
    return replace(report, warnings=tuple(messages))


def draw(report: Installation) -> str:
    """Draw a report as text."""
    why_not = report.why_not_triton
    triton = f"cannot run: {why_not} (plain PyTorch runs instead)" if why_not else "run"
    sections: list[tuple[str, list[Row]]] = [
        ("Versions", list(_versions(report))),
        ("Devices", [row for device in report.devices for row in _device(device)]),
        ("Times, float32's = 1", list(_speeds(report.speeds))),
        ("CUDA", [*_cuda(report.cuda), ("Triton kernels", triton)]),
        ("Code paths", [(p.family, p.device, p.path, p.why) for p in report.op_families]),
        (INSTALLS, _installs(report.installs)),
    ]
    if report.warnings:
        sections.append(("Warnings", [(warning,) for warning in report.warnings]))
    return "\n\n".join(
        "\n".join([title, *aligned(rows, None if title == INSTALLS else WIDTH)])
        for title, rows in sections
    )


def _versions(report: Installation) -> Iterator[Row]:
    missing = report.missing_private_names
    for name, found in report.versions.items():
        yield name, found or "not installed"
        if name == "torch" and not missing:
            yield "", "it has all private names that apex uses"
        if name == "torch":
            yield from (("", f"it has no {path}: {effect}") for path, effect in missing.items())


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
        answer = {True: "native instructions", False: "not native", None: "unknown"}[half.native]
        yield "", f"{half.dtype}: {answer} ({half.why})"


def _speeds(found: dict[str, tuple[Speed, ...]]) -> Iterator[Row]:
    operations = dict.fromkeys(time.operation for times in found.values() for time in times)
    yield "", "", *operations
    for device, times in found.items():
        for (dtype, under), ratios in times_of_float32(times).items():
            if dtype != "float32":
                name = f"{dtype}, amp" if under == "amp" else dtype
                yield device, name, *(_three(ratios[operation]) for operation in operations)
        ms = [time.ms for time in times if time.dtype == "float32"]
        yield device, "float32 in ms", *map(_three, ms)


def _three(value: float | None) -> str:
    return "cannot" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _cuda(found: dict[str, str | None]) -> list[Row]:
    built_for = f"CUDA {found['torch_cuda']}" if found["torch_cuda"] else "CPU only"
    driver = found["driver"] or "not found (nvidia-smi does not answer)"
    serves = f", serves CUDA up to {found['driver_cuda']}" if found["driver_cuda"] else ""
    nvcc = f"{found['nvcc'] or 'unknown version'} at {found['nvcc_path']}"
    return [
        ("available", f"no: {found['why_not']}" if found["why_not"] else "yes"),
        ("torch built for", f"ROCm {found['torch_rocm']}" if found["torch_rocm"] else built_for),
        ("cuDNN", found["cudnn"] or "none"),
        ("driver", driver + serves),
        (
            "nvcc",
            f"{nvcc if found['nvcc_path'] else 'not found'} "
            "(not needed: apex compiles nothing with it)",
        ),
    ]


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


# --- which code path runs each family of operations -----------------------------------------------


def live_paths(devices: Iterable[str]) -> list[LivePath]:
    """Ask every family which path it takes on each device."""
    names = list(devices)
    return [
        LivePath(family, name, *choose(torch.device(name)))
        for family, choose in FAMILIES.items()
        for name in names
    ]


def _casting(device: torch.device) -> Choice:
    if torch.amp.is_autocast_available(device.type):
        return "torch fused", "torch.autocast, plus apex's rules where its lists differ"
    return "unavailable", f"torch.autocast does not know {device.type!r} devices"


def _float16(device: torch.device) -> Choice:
    if device.type != "cpu":
        return "torch fused", "the device's own arithmetic"
    what = "matrix products, convolutions, attention and recurrent layers"
    if cpu_float16.has_float16_instructions():
        what = "gradients of convolutions, and attention"
    how = "float32, rounded once, at float16 levels of amp and under fp16_utils"
    return "torch fused", f"{what}: {how}"


def _unscaling(device: torch.device) -> Choice:
    """Try torch's list kernel on one element: whether it is built for a device is not on record."""
    try:
        one = torch.ones(1, device=device, dtype=torch.float32)
        found_inf = torch.zeros_like(one)
        private.amp_foreach_non_finite_check_and_unscale_([one], found_inf, one.clone())
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return "unavailable", f"torch's list kernel cannot run: {reason}"
    if private.amp_foreach_non_finite_check_and_unscale_ is instead.check_and_unscale_:
        return "torch fused", "gradient by gradient: this torch lacks the function for lists"
    return "torch fused", "one call of torch._amp_foreach_non_finite_check_and_unscale_"


def _kernel_or(kernel: str, torchs: str) -> Callable[[torch.device], Choice]:
    """A Triton kernel where one can run, else torch's functions."""

    def choose(device: torch.device) -> Choice:
        why_not = _runtime.why_not_triton(device.type)
        return ("Triton", kernel) if why_not is None else ("torch fused", f"{torchs}; {why_not}")

    return choose


LAUNCH = "one launch for all tensors of a dtype"
FAMILIES: dict[str, Callable[[torch.device], Choice]] = {
    "casting": _casting,
    "float16 arithmetic": _float16,
    "gradient unscaling": _unscaling,
    "optimizers": _kernel_or(
        LAUNCH, "torch's fused steps where they give the same result, else plain PyTorch"
    ),
    "lists of tensors": _kernel_or(LAUNCH, "torch's check-and-unscale and foreach functions"),
    "norms, losses, attention": _kernel_or(
        "one kernel forward, one backward; small inputs: torch", "torch's functions, rounded once"
    ),
}
