import sys
import types
from pathlib import Path

import pytest
import torch

from apex.bench.training import energy
from apex.bench.training.energy import Meter

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)
RANGE = 262_143_328_850


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """A folder as Linux has it, on a machine of two processors."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    (tmp_path / "intel-rapl").mkdir()  # the control type
    names = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    for zone, name in names.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
        _set(tmp_path, zone, 1_000_000)
    return tmp_path


def _set(sysfs, zone, microjoules):
    (sysfs / zone / "energy_uj").write_text(f"{microjoules}\n")


def test_packages_are_added_up_and_their_parts_are_not(sysfs):
    meter = Meter(CPU)
    assert meter.joules == 0.0
    with meter:
        for zone in sysfs.glob("intel-rapl*:*"):
            _set(sysfs, zone.name, 51_000_000)
        _set(sysfs, "intel-rapl:1", 3_500_000)
    assert meter.joules == 50.0 + 2.5


def test_what_happens_between_blocks_does_not_count(sysfs):
    meter = Meter(CPU)
    for start, end in ((1_000_000, 2_000_000), (10_000_000, 10_250_000)):
        _set(sysfs, "intel-rapl:0", start)
        with meter:
            _set(sysfs, "intel-rapl:0", end)
    assert meter.joules == 1.25


def test_a_counter_that_wraps_round(sysfs):
    meter = Meter(CPU)
    _set(sysfs, "intel-rapl:0", RANGE - 3_000_000)
    with meter:
        _set(sysfs, "intel-rapl:0", 4_000_000)
    assert meter.joules == pytest.approx(7.0)


def _unreadable(sysfs):
    (sysfs / "intel-rapl:0" / "energy_uj").unlink()


def _nonsense(sysfs):
    (sysfs / "intel-rapl:1" / "energy_uj").write_text("\n")


def _no_packages(sysfs):
    for name in sysfs.glob("*/name"):
        name.write_text("dram\n")


def _no_names(sysfs):
    for name in sysfs.glob("*/name"):
        name.unlink()


def _no_folder(sysfs):
    energy.POWERCAP = sysfs / "nothing"  # the fixture puts it back


@pytest.mark.parametrize("spoil", [_unreadable, _nonsense, _no_packages, _no_names, _no_folder])
def test_what_cannot_be_read_gives_none(sysfs, spoil):
    spoil(sysfs)
    meter = Meter(CPU)
    assert meter.joules is None
    with meter:
        pass
    assert meter.joules is None


def test_root_alone_may_read(sysfs, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    meter = Meter(CPU)
    with meter:
        monkeypatch.setattr(Path, "read_text", refuse)
    assert meter.joules is None
    assert Meter(CPU).joules is None


def test_an_epoch_that_broke_off_leaves_no_number(sysfs):
    meter = Meter(CPU)
    with pytest.raises(ZeroDivisionError), meter:
        raise ZeroDivisionError
    assert meter.joules is None


# --- NVML ----------------------------------------------------------------------------------------


class _Error(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml whose GPU has used 5 J, and more each time it is asked; torch numbers it 1."""
    readings = iter([5000, 6000, 8500])
    seen = []

    def total(handle):
        seen.append(handle)
        return next(readings)

    fake = types.SimpleNamespace(
        NVMLError=_Error,
        nvmlInit=lambda: seen.append("init"),
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetTotalEnergyConsumption=total,
        seen=seen,
    )
    properties = {GPU: types.SimpleNamespace(uuid="12-34")}
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("synchronize"))
    return fake


def test_a_gpus_counter_is_found_by_its_uuid_and_read_in_millijoules(nvml):
    meter = Meter(GPU)
    with meter:
        pass
    assert meter.joules == 2.5
    read = ["synchronize", "handle of GPU-12-34"]
    assert nvml.seen == ["init", *read, *read, *read]


@pytest.mark.parametrize(
    "function",
    ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"],
)
def test_a_gpu_that_does_not_tell_gives_none(nvml, function):
    def refuse(*_):
        raise _Error("Not Supported")

    setattr(nvml, function, refuse)
    meter = Meter(GPU)
    with meter:
        pass
    assert meter.joules is None


def test_without_pynvml_there_is_none(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Meter(GPU).joules is None


def test_a_cpu_is_not_asked_through_nvml(nvml, sysfs):
    assert Meter(CPU).joules == 0.0
    assert nvml.seen == []


def test_on_this_machine_it_works_or_says_none():
    meter = Meter(CPU)
    with meter:
        torch.ones(10) + 1
    assert meter.joules is None or meter.joules >= 0
