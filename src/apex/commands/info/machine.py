"""What this machine is: software versions, devices, and the CUDA tool chain round them.

Everything is looked up, nothing is required: what is missing comes back as ``None`` with the
reason beside it where one is known. Triton is not imported, and no option of the process changes.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import apex
from apex import _compat

__all__ = ["Device", "HalfType", "busy", "cuda", "devices", "version_of", "versions"]

TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
TOOL_TIMEOUT_S = 10.0  # a wedged driver makes nvidia-smi hang

# Instruction sets that multiply this type directly; without one, torch goes through float32.
# The names are those of torch.cpu.get_capabilities() and, where it is older, /proc/cpuinfo.
CPU_HALF_FLAGS = {
    "float16": (
        ("amx_fp16", "avx512_fp16", "fp16_arith", "asimdhp"),
        "slow in torch alone, computed in float32 under amp",
    ),
    "bfloat16": (
        ("amx_bf16", "avx512_bf16", "sve_bf16", "svebf16", "bf16"), "correct, but slow",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class HalfType:
    """Whether a device computes a 16-bit type in hardware; ``None`` is "not known"."""

    dtype: str
    native: bool | None
    why: str


@dataclass(frozen=True)
class Device:
    """A device that tensors can be on.

    ``device`` is torch's name for it; ``capability`` is CUDA's compute capability, AMD's name of
    the architecture, or for a CPU the vector instructions that torch uses. ``cores`` counts a
    CPU's logical cores and a GPU's multiprocessors.
    """

    device: str
    name: str
    memory_bytes: int | None
    cores: int | None
    capability: str | None
    half_types: tuple[HalfType, ...]


def versions() -> dict[str, str | None]:
    """Look up the versions that a bug report needs; ``None`` is "not installed"."""
    return {
        "apex": apex.__version__,
        "torch": str(torch.__version__),
        "triton": next(filter(None, map(version_of, TRITON_DISTRIBUTIONS)), None),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
    }


def devices() -> list[Device]:
    """List the CPU and every accelerator that this torch can use."""
    if torch.cuda.is_available():
        return [_cpu(), *(_gpu(index) for index in range(torch.cuda.device_count()))]
    return [_cpu(), *_other_accelerators()]


def cuda() -> dict[str, str | None]:
    """Look up what must fit together on a GPU machine, and why no GPU can be used (or ``None``)."""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    driver, driver_cuda = _driver()
    return {
        "why_not": None if torch.cuda.is_available() else _why_no_gpu(driver),
        "torch_cuda": torch.version.cuda,
        "torch_rocm": torch.version.hip,
        "cudnn": None if cudnn is None else _cudnn_version(cudnn),
        "driver": driver,
        "driver_cuda": driver_cuda,
        "nvcc": _search(r"release ([\d.]+)", _output_of("nvcc", "--version")),
        "nvcc_path": shutil.which("nvcc"),
    }


def busy() -> str | None:
    """Say that other programs use this CPU, where the system tells: times mean little then."""
    cores = os.cpu_count() or 1
    running = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if running < cores / 2:
        return None
    return f"busy machine (load {running:.1f} on {cores} cores): do not trust the times"


def _cpu() -> Device:
    memory = None
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        device="cpu",
        name=next(_cpuinfo("model name"), "") or platform.processor() or platform.machine(),
        memory_bytes=memory,
        cores=os.cpu_count(),
        capability=torch.backends.cpu.get_cpu_capability(),
        half_types=_cpu_half_types(),
    )


def _cpu_half_types() -> tuple[HalfType, ...]:
    capabilities = _compat.cpu_capabilities()
    if capabilities is None:
        flags = {word for line in _cpuinfo("flags", "Features") for word in line.split()}
    else:
        flags = {name for name, present in capabilities.items() if present is True}
    if not flags:
        return _unknown_half_types("this system does not report the CPU's instructions")
    found = []
    for dtype, (wanted, without) in CPU_HALF_FLAGS.items():
        present = ", ".join(sorted(flags.intersection(wanted)))
        found.append(HalfType(dtype, bool(present), present or f"no such instructions: {without}"))
    return tuple(found)


def _gpu(index: int) -> Device:
    name = f"cuda:{index}"
    try:
        properties = torch.cuda.get_device_properties(index)
    except (AssertionError, RuntimeError) as error:  # fallen off the bus, or in use by one process
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        return Device(name, f"unusable: {reason}", None, None, None, ())
    rocm = torch.version.hip is not None
    capability = (properties.major, properties.minor)
    return Device(
        device=name,
        name=properties.name,
        memory_bytes=properties.total_memory,
        cores=properties.multi_processor_count,
        capability=properties.gcnArchName if rocm else "{}.{}".format(*capability),
        half_types=_unknown_half_types() if rocm else _cuda_half_types(capability),
    )


def _cuda_half_types(capability: tuple[int, int]) -> tuple[HalfType, ...]:
    """Source: CUDA C++ Programming Guide, "Compute Capabilities", feature support."""
    why = "needs compute capability 5.3: saves memory only"
    if capability >= (5, 3):
        why = "arithmetic since 5.3, but no tensor cores before 7.0"
    if capability >= (7, 0):
        why = "tensor cores since compute capability 7.0"
    float16 = HalfType("float16", capability >= (5, 3), why)
    if capability >= (8, 0):
        return float16, HalfType("bfloat16", True, "tensor cores since compute capability 8.0")
    return float16, HalfType("bfloat16", False, "needs compute capability 8.0: emulated, slow")


def _unknown_half_types(why: str = "unknown for this device") -> tuple[HalfType, ...]:
    return tuple(HalfType(dtype, None, why) for dtype in CPU_HALF_FLAGS)


def _other_accelerators() -> list[Device]:
    """List accelerators that are not CUDA's (mps, xpu, ...); only their kind is known here."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return []
    kind = accelerator.current_accelerator().type
    return [
        Device(f"{kind}:{index}", kind, None, None, None, _unknown_half_types())
        for index in range(accelerator.device_count())
    ]


def _why_no_gpu(driver: str | None) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is a CPU build"
    if driver is None:
        return "no NVIDIA driver answers (nvidia-smi)" if torch.version.cuda else "no GPU answers"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}"
    return "the driver answers, but torch finds no GPU"


def _driver() -> tuple[str | None, str | None]:
    """Ask nvidia-smi for the driver's version and the newest CUDA that it serves."""
    answer = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = _search(r"^\s*(\d+\.[\d.]+)\s*$", answer)
    if version is None:
        return None, None
    return version, _search(r"CUDA[^:|]*Version\s*:\s*([\d.]+)", _output_of("nvidia-smi"))


def _output_of(*command: str) -> str:
    """Return what a tool prints, or nothing where it is missing, fails or hangs."""
    options: dict[str, Any] = {"text": True, "errors": "replace", "stderr": subprocess.DEVNULL}
    try:
        return str(subprocess.check_output(command, timeout=TOOL_TIMEOUT_S, **options))
    except (OSError, subprocess.SubprocessError):
        return ""


def _search(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else None


def _cudnn_version(number: int) -> str:
    """Take cuDNN's number apart: 9.20.0 is 92000, and 8.9.2, of the older kind, was 8902."""
    scale = 10_000 if number >= 90_000 else 1_000
    return f"{number // scale}.{number % scale // 100}.{number % 100}"


def version_of(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo(*fields: str) -> Iterator[str]:
    """Yield the values of some fields of Linux's CPU list, in order; none on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        field, _, value = line.partition(":")
        if field.strip() in fields:
            yield value.strip()
