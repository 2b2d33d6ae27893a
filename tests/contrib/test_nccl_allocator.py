"""``apex.contrib.nccl_allocator``: what is called of torch; without a GPU, what it says."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from apex._compat import private
from apex.contrib import nccl_allocator


@pytest.fixture
def calls(monkeypatch):
    """In the place of a GPU and of NCCL's backend, what notes its calls."""
    noted = []

    class Backend:
        mem_allocator = "NCCL's allocator"

        def __init__(self, name):
            self.name = name

        def register_mem_pool(self, pool):
            noted.append(("registered with", self.name, pool))

    def group(name, device="cuda"):
        return SimpleNamespace(
            _device_types=[torch.device(device)], _get_backend=lambda device: Backend(name)
        )

    @contextlib.contextmanager
    def use_mem_pool(pool, device=None):
        noted.append(("allocating", pool, device))
        yield
        noted.append("done")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"a pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(private, "get_backend", lambda group, device: group._get_backend(device))
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=group("the world")))
    return SimpleNamespace(noted=noted, group=group)


def test_a_block_allocates_from_the_pool_and_registers_it(calls):
    pool = nccl_allocator.create_nccl_mem_pool()
    assert pool == "a pool of NCCL's allocator"
    with nccl_allocator.nccl_mem(pool, device=3):
        calls.noted.append("inside")
    with nccl_allocator.nccl_mem(pool, group=calls.group("some")), contextlib.suppress(KeyError):
        raise KeyError
    nccl_allocator.register_mem_pool(pool, calls.group("others"))
    assert calls.noted == [
        ("allocating", pool, 3), "inside", "done", ("registered with", "the world", pool),
        ("allocating", pool, None), "done", ("registered with", "some", pool),
        ("registered with", "others", pool),
    ]  # fmt: skip


def test_a_group_of_another_backend(calls):
    with (
        pytest.raises(RuntimeError, match="nccl_mem needs a GPU and an NCCL process group; there"),
        nccl_allocator.nccl_mem("pool", group=calls.group("gloo", "cpu")),
    ):
        pass
    assert calls.noted == []


def test_a_symmetric_pool(calls):
    """In releases whose MemPool has the argument, which this one has not."""
    with pytest.raises(RuntimeError, match="Leave symmetric out, or use torch.distributed._symm"):
        nccl_allocator.create_nccl_mem_pool(symmetric=True)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (
        nccl_allocator.create_nccl_mem_pool,
        lambda: nccl_allocator.register_mem_pool("pool"),
        lambda: nccl_allocator.nccl_mem("pool").__enter__(),
    ):
        with pytest.raises(RuntimeError, match="needs a GPU and an NCCL process group; there is"):
            call()
    with nccl_allocator.nccl_mem(None, enabled=False):
        pass


def test_init_sets_what_nccl_reads(monkeypatch):
    names = "NCCL_NVLS_ENABLE", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    for name in names:
        monkeypatch.setenv(name, "unset")
    nccl_allocator.init()
    assert [os.environ[name] for name in names] == ["1", "0"]
