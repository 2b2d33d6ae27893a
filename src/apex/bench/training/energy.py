"""Energy that the device used, where the machine lets it be read.

* NVIDIA GPU: NVML's counter of the whole board, through the package ``nvidia-ml-py`` (``pynvml``);
  Volta or newer. It moves about ten times a second.
* CPU: RAPL's counters of the processor packages, which Linux gives to root, or to whom the
  administrator does. Everything that the machine does in the meantime is in them.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

__all__ = ["POWERCAP", "Meter"]

POWERCAP = Path("/sys/class/powercap")

Reading = Callable[[], list[tuple[float, float | None]]]
"""Joules of each counter, and the joules after which it starts at 0 again, or ``None``."""


class Meter:
    """Adds up the energy of the blocks that it surrounds.

    ``joules`` is the sum, or ``None`` where nothing can be read, or could not be once. A block has
    to end before a RAPL counter has wrapped round twice: the smallest range in use, 65 kJ, lasts
    for four minutes at 250 W, so surround epochs and not a whole training.

    Example:
        >>> meter = Meter(torch.device("cpu"))
        >>> with meter:
        ...     _ = torch.ones(3) + 1
        >>> meter.joules is None or meter.joules >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read = _nvml(device) if device.type == "cuda" else _rapl(device, POWERCAP)
        self._begin: list[tuple[float, float | None]] | None = None
        self.joules: float | None = None if self._reading() is None else 0.0

    def __enter__(self) -> "Meter":
        self._begin = self._reading()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = self._reading() if kind is None else None
        if end is None or self._begin is None or self.joules is None:
            self.joules = None
            return
        for (first, around), (last, _) in zip(self._begin, end, strict=True):
            wrapped = around if last < first and around is not None else 0.0
            self.joules += last - first + wrapped

    def _reading(self) -> list[tuple[float, float | None]] | None:
        if self._read is None:
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what was launched before belongs to before
        try:
            return self._read()
        except (OSError, ValueError, RuntimeError):
            return None


def _rapl(device: torch.device, folder: Path) -> Reading | None:
    """Read the packages alone: core and dram are parts of one, and psys contains them all."""
    if device.type != "cpu" or not folder.is_dir():
        return None
    domains = [zone for zone in folder.iterdir() if re.fullmatch(r"intel-rapl:\d+", zone.name)]
    packages = sorted(zone for zone in domains if _text(zone / "name").startswith("package"))

    def read() -> list[tuple[float, float | None]]:
        return [
            (_joules(zone / "energy_uj"), _joules(zone / "max_energy_range_uj"))
            for zone in packages
        ]

    return read if packages else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _joules(path: Path) -> float:
    return int(path.read_text(encoding="ascii")) / 1e6


def _nvml(device: torch.device) -> Reading | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid  # torch and NVML count differently
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (nvml.NVMLError, RuntimeError):
        return None

    def read() -> list[tuple[float, float | None]]:
        try:
            return [(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000, None)]
        except nvml.NVMLError as error:
            raise RuntimeError(str(error)) from error

    return read
