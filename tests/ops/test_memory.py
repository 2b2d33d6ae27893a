"""Huge pages for large results: when they are asked for, and that only speed depends on it."""

from types import SimpleNamespace

import pytest
import torch

from apex.ops import _memory

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch):
    """What the system was asked for, on a machine where it has to be and for small tensors too."""
    calls = []
    system = SimpleNamespace(madvise=lambda *call: calls.append(call))
    monkeypatch.setattr(_memory, "_system", lambda: system)
    monkeypatch.setattr(_memory, "LEAST", 2**16)
    return calls


@pytest.mark.parametrize("rows", [128, 129])
def test_whole_pages_are_asked_for(asked, rows):
    out = _memory.empty((rows, 256), torch.float32, CPU)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((rows, 256), torch.float32, True)
    [(start, size, advice)] = asked
    assert (start % 4096, size % 4096, advice) == (0, 0, 14)
    assert out.data_ptr() <= start < start + size <= out.data_ptr() + out.nbytes
    assert size > out.nbytes - 2 * 4096


def test_small_tensors_and_other_devices_are_torchs_own(asked):
    assert _memory.empty((8, 8), torch.float32, CPU).shape == (8, 8)
    assert _memory.empty((512, 512), torch.float32, torch.device("meta")).is_meta
    assert not asked
    assert _memory.pays(2**14, torch.float32, CPU)
    assert not _memory.pays(2**14, torch.bfloat16, CPU)


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_where_nothing_has_to_be_asked(monkeypatch, tmp_path, setting):
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(_memory, "SETTING", file)
    assert _memory._system.__wrapped__() is None


def test_the_system_takes_the_advice(monkeypatch, tmp_path):
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never")
    monkeypatch.setattr(_memory, "SETTING", file)
    system = _memory._system.__wrapped__()
    if system is None:
        pytest.skip("no madvise here")
    monkeypatch.setattr(_memory, "_system", lambda: system)
    out = _memory.empty((2 * _memory.LEAST,), torch.uint8, CPU)
    assert out.fill_(2).sum().item() == 2 * out.numel()
