"""Tests marked gpu on a CPU, for a dry run: their code runs, with the numbers of the CPU."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.gpu import stand_ins
from tools.gpu.rows import NOT_DRY, Rows

# What nothing can stand in for.
NOT_DRY_TESTS = {
    "test_the_command_on_a_gpu": "the command asks torch for a GPU",
    "test_the_peak_of_known_allocations_on_a_gpu": "a CPU has no such peak",
}


class StandIns:
    """A pytest plugin."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        stand_ins.install()
        begin = torch.distributed.init_process_group

        def over_gloo(backend: str | None = None, **options: Any) -> None:
            begin("gloo" if backend == "nccl" else backend, **options)

        vars(torch.distributed)["init_process_group"] = over_gloo

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Take off the mark that skips them where there is no GPU."""
        left_out = [item for item in items if item.originalname in NOT_DRY_TESTS]
        for item in left_out:
            self.rows.add(item.nodeid, NOT_DRY, NOT_DRY_TESTS[item.originalname])
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        for item in items:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """Take the CPU where a test names a GPU."""
        with stand_ins.on_a_cpu():
            return (yield)


def files() -> list[str]:
    """The files with tests marked gpu: to collect all others takes 7 s."""
    files = sorted(Path("tests").rglob("test_*.py"))
    return [str(file) for file in files if re.search(r"mark\.gpu\b", file.read_text("utf-8"))]
