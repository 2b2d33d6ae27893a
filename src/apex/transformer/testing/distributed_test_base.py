"""``unittest`` cases whose methods run in several processes, one for each rank."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import unittest
from typing import Any

import torch

from apex.transformer._ucc_util import HAS_UCC
from apex.transformer.utils import device_type

dist = torch.distributed

SECONDS = 300.0  # that a method may take on all ranks


class DistributedTestBase(unittest.TestCase):
    """Each test method runs on ``world_size`` ranks, with ``torch.distributed`` initialised.

    ``setUp`` and ``tearDown`` run once, in the process that starts the others. ``self.rank`` exists
    in the other processes. A method fails or is skipped if that happens on any rank.
    """

    DISTRIBUTED_BACKEND = "nccl"  # on a CPU Gloo
    rank = -1
    init_method = ""
    """Where the ranks meet; known on the ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        method: Any = getattr(self, self._testMethodName, None)
        run = functools.partial(self._on_all_ranks)  # with the marks of unittest
        setattr(self, self._testMethodName, functools.update_wrapper(run, method))

    @property
    def world_size(self) -> int:
        """Number of ranks. It is the number of accelerators, but at most 4, and 2 on a CPU."""
        return 2 if device_type() == "cpu" else min(torch.accelerator.device_count(), 4)

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """Whether each rank destroys its process group at the end."""
        return True

    def assertEqual(self, first: Any, second: Any, msg: Any = None, **kwargs: Any) -> None:
        """Compare as unittest does, and tensors with ``torch.testing.assert_close(**kwargs)``."""
        tensors = [x for x in (first, second) if torch.is_tensor(x)]
        if len(tensors) == 1:  # beside a number, or numbers
            kwargs = {"check_dtype": False, **kwargs}
            first, second = (_on_device_of(x, tensors[0]) for x in (first, second))
        if tensors or kwargs:
            torch.testing.assert_close(first, second, msg=msg, **kwargs)
        else:
            super().assertEqual(first, second, msg)  # noqa: PT009

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None, **kwargs: Any) -> None:
        """The opposite of :meth:`assertEqual`."""
        with self.assertRaises(AssertionError, msg=msg):  # noqa: PT027
            self.assertEqual(first, second, **kwargs)  # noqa: PT009

    def _on_all_ranks(self) -> None:
        context: Any = multiprocessing.get_context("spawn")
        if sys.platform == "linux":  # imports torch once, not on each rank
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch"])
        end = time.monotonic() + SECONDS
        said: dict[int, tuple[str, str]] = {}
        with tempfile.TemporaryDirectory() as folder:
            url = f"file://{os.path.join(folder, 'store')}"
            pipes, theirs = zip(*(context.Pipe() for _ in range(self.world_size)), strict=True)
            processes = [
                context.Process(
                    target=_run,
                    args=(type(self), self._testMethodName, rank, url, pipe),
                    daemon=True,
                )
                for rank, pipe in enumerate(theirs)
            ]
            for process, pipe in zip(processes, theirs, strict=True):
                process.start()
                pipe.close()  # so that the end of the process ends the pipe
            waiting = dict(zip(pipes, range(self.world_size), strict=True))
            while waiting and not any(kind == "failed" for kind, _ in said.values()):
                ready = multiprocessing.connection.wait([*waiting], max(end - time.monotonic(), 0))
                for pipe in ready:
                    said[waiting.pop(pipe)] = _answer(pipe)
                if not ready:
                    said.update(dict.fromkeys(waiting.values(), ("failed", "no answer in time")))
                    break
            for process in processes:
                process.join(10.0 if not waiting else 0.0)
                process.kill()
        ends: dict[str, Any] = {"failed": self.fail, "skipped": self.skipTest}
        for kind, end_with in ends.items():
            texts = [
                f"rank {r}: {text}" for r, (found, text) in sorted(said.items()) if found == kind
            ]
            if texts:
                end_with("\n".join(texts))


def _answer(pipe: Any) -> tuple[str, str]:
    try:
        kind, text = pipe.recv()
    except EOFError:
        return "failed", "the process died"
    return kind, text


def _run(cls: type[DistributedTestBase], method: str, rank: int, url: str, pipe: Any) -> None:
    """What each process runs."""
    case = cls(method)
    delattr(case, method)  # what starts processes
    case.rank, case.init_method = rank, url
    backend = cls.DISTRIBUTED_BACKEND
    if device_type() == "cpu":
        backend = "gloo" if backend == "nccl" else backend
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=case.world_size)
    dist.barrier()  # a rank that ends at once would break the connections that others make
    try:
        getattr(case, method)()
        answer = "passed", ""
    except unittest.SkipTest as skipped:
        answer = "skipped", str(skipped)
    except BaseException:  # noqa: BLE001  # the test is to see every error
        answer = "failed", traceback.format_exc()
    if answer[0] != "failed":
        dist.barrier()
        if case.destroy_pg_upon_exit:
            dist.destroy_process_group()
    pipe.send(answer)


def _on_device_of(x: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``x`` as a tensor on the device of ``tensor``; numbers beside floats are float64."""
    if torch.is_tensor(x):
        return x.to(tensor.device)
    dtype = torch.float64 if tensor.is_floating_point() else None
    return torch.tensor(x, device=tensor.device, dtype=dtype)


class NcclDistributedTestBase(DistributedTestBase):
    """Test case that uses NCCL, or Gloo on a CPU."""


class UccDistributedTestBase(DistributedTestBase):
    """Test case that uses UCC. It is skipped if PyTorch was built without UCC."""

    DISTRIBUTED_BACKEND = "ucc"

    def setUp(self) -> None:
        """Skip the test if UCC is missing."""
        super().setUp()
        if not HAS_UCC:
            self.skipTest("this PyTorch has no UCC")
