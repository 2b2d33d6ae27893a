"""A rank that is killed ends the job on all ranks; the next job goes on from the checkpoint."""

import os
import pathlib
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # torch 2.13 never frees a process group that is older than this module
import torch.distributed as dist
from torch import nn

from apex import amp
from apex.parallel import DistributedDataParallel
from tests.checkpoints import assert_equal
from tests.ranks import processes

pytestmark = pytest.mark.dist

RANKS, STEPS, KILLED = 3, 8, 5
TIMEOUT = timedelta(seconds=20)


def _work(rank, jobs):
    torch.set_num_threads(1)
    for folder, killed in jobs:
        _train(rank, folder, killed)


def _train(rank, folder, killed):
    """One job of ``RANKS`` processes; resumes from ``checkpoint.pt`` where there is one."""
    store = dist.FileStore(str(folder / f"store-{killed}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    amp.reset()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, growth_interval=3)
    wrapper = DistributedDataParallel(model, message_size=1)
    first = 0
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt")
        wrapper.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        first = saved["step"]
    try:
        for step in range(first, STEPS):
            generator = torch.Generator().manual_seed(100 * rank + step)
            x = torch.randn(8, 6, generator=generator)
            optimizer.zero_grad()
            if (rank, step) == (1, killed):  # some buckets are on their way, others are not
                model[0].register_full_backward_pre_hook(lambda *of: os.kill(os.getpid(), 9))
            loss = nn.functional.cross_entropy(wrapper(x).float(), x[:, 0].gt(0).long())
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            if rank == 0:
                _save(folder, wrapper, optimizer, step + 1)
    except RuntimeError as error:
        (folder / f"error-{rank}").write_text(str(error))
        raise SystemExit(1) from error
    dist.destroy_process_group()


def _save(folder, wrapper, optimizer, step):
    states = {"model": wrapper, "optimizer": optimizer, "amp": amp}
    saved = {name: has_state.state_dict() for name, has_state in states.items()}
    torch.save({**saved, "step": step}, folder / "new.pt")
    (folder / "new.pt").rename(folder / "checkpoint.pt")


def _run(*jobs):
    """Run jobs one after the other in the same processes; return their exit codes."""
    context = processes()
    started = [context.Process(target=_work, args=(rank, jobs)) for rank in range(RANKS)]
    for process in started:
        process.start()
    deadline = time.monotonic() + 240  # starting takes most of a minute on a busy machine
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    return [process.exitcode for process in started]


@pytest.mark.slow
def test_killed_and_restarted(tmp_path):
    plain = pathlib.Path(tmp_path, "plain")
    plain.mkdir()
    assert _run((plain, None), (tmp_path, KILLED)) == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert (tmp_path / f"error-{rank}").read_text()
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == KILLED
    assert _run((tmp_path, None)) == [0, 0, 0]
    wanted, found = (torch.load(folder / "checkpoint.pt") for folder in (plain, tmp_path))
    assert wanted["step"] == STEPS
    assert_equal(wanted, found)
