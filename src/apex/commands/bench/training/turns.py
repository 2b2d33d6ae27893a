"""The levels of one seed, trained by turns in one process, each measured.

A machine is never equally fast for long, so trainings that run one after the other differ in speed
even if their arithmetic is the same. Here each trains a block of some steps, then the next one
does. A round is a block of each; their order is drawn from the seed, and every second round has
the order of the one before it reversed, so that a clock that drifts steadily moves no ratio.

Each training has the random numbers, casts and kernels of its own (`trainer.OwnState`): it computes
what it would compute alone.

With a time budget, each round shows how long a step of each level takes, on a machine as busy as it
is. If what is left does not fit, the slowest level ends there if its fastest step takes twice the
time of O0's or more, and so on; then all are cut to the same number of steps.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from apex import amp
from apex._compat import private
from apex.commands.bench.training.results import Cell, Run
from apex.commands.bench.training.tasks.task import Task
from apex.commands.bench.training.training import AFTER, CellTraining, counted
from apex.commands.tables import three

__all__ = ["BLOCK", "Turns", "train"]

# Involuntary switches for each second without the processor: beside 1 to 6 busy processes 510 to
# 158. A thread that waits for a GPU or a loader gives the processor up by itself.
PREEMPTED = 50
BLOCK = 8  # steps of a turn; the first does not count
TURN_MS = 50.0  # a turn of the fastest level lasts as long at least
MOST = 64  # steps of a turn
TOO_SLOW = 2.0  # times O0's step: levels that a budget may stop
INFERENCES = 6  # rounds
COMPILATIONS = 64  # of one function, with --compile


def train(
    cells: Sequence[Cell],
    task: Task,
    device: torch.device,
    on_progress: Callable[[float, str | None], None] = lambda share, line: None,
    budget_s: float | None = None,
) -> list[Run]:
    """Train the cells by turns and measure; what goes wrong in one is part of its result.

    Args:
        cells: They differ in level and TF32 alone.
        task: The task that they name.
        device: Where.
        on_progress: Called after every block with the share of the work that is done, 0 to 1, and
            perhaps a line for the user.
        budget_s: Seconds that this may take; ``None`` is no limit.
    """
    if cells[0].compile:
        torch.compiler.reset()
        # Past Dynamo's limit, 8, a model goes on uncompiled, in silence.
        with private.dynamo_config.patch(
            recompile_limit=COMPILATIONS, fail_on_recompile_limit_hit=True
        ):
            return Turns(cells, task, device, on_progress, budget_s).run()
    return Turns(cells, task, device, on_progress, budget_s).run()


class Turns:
    """Trainings that take turns."""

    def __init__(
        self,
        cells: Sequence[Cell],
        task: Task,
        device: torch.device,
        on_progress: Callable[[float, str | None], None],
        budget_s: float | None,
    ) -> None:
        self._began = time.monotonic()
        self._budget = budget_s
        self._report = on_progress
        self._device = device
        self._trainings = [CellTraining(cell, task, device) for cell in cells]
        self._draw = random.Random(cells[0].seed)
        if budget_s is not None:
            count = counted(task.loader(cells[0].batch, 1000 * cells[0].seed), budget_s / 20)
            for training in self._trainings:
                training.per_epoch = count

    def run(self) -> list[Run]:
        """Train all to their end."""
        before = _processor()
        self._train()
        waited = _waited(before)
        self._infer([one for one in self._trainings if one.trained and one.infers])
        for training in self._trainings:
            training.free(collect=False)
        gc.collect()  # once: it takes 0.2 s
        self._measure_apart()
        together = tuple(one.cell.label for one in self._trainings)
        runs = [training.result(together, waited) for training in self._trainings]
        self._trainings.clear()
        amp.reset()
        return runs

    def _train(self) -> None:
        order = list(self._trainings)  # O0 first, so that a budget knows what is slow
        size, rounds = BLOCK, 0
        while order:
            for training in order:
                training.block(size, self._budget)
                self._report(self._share(), None)
            order = [training for training in order if not training.over]
            if rounds == 0 and order:
                self._report(self._share(), _first_line(self._trainings))
                fastest = min(training.step_ms for training in order)
                size = max(BLOCK, min(MOST, math.ceil(TURN_MS / max(fastest, 1e-3))))
            self._keep_to_budget(order)
            if rounds % 2:
                order.reverse()
            else:
                self._draw.shuffle(order)
            rounds += 1
            order = [training for training in order if not training.over]

    def _infer(self, ready: Sequence[CellTraining]) -> None:
        """Time inference in rounds, as many as there is time for; the first does not count."""
        took = sum(training.step_ms for training in ready) / 1000  # a step has a forward
        for number in range(INFERENCES if len(ready) > 1 else 0):
            if self._left() < took * (1 if number else 2):
                break
            begin = time.monotonic()
            for training in self._draw.sample(ready, len(ready)):
                training.infer()
            took = time.monotonic() - begin

    def _measure_apart(self) -> None:
        """Each takes about as long as the longest before it, as far as is known."""
        longest = 0.0
        for training in self._trainings:
            begin = time.monotonic()
            training.measure_apart(self._left() - longest)
            longest = max(longest, time.monotonic() - begin)

    def _left(self) -> float:
        """Seconds of the budget."""
        if self._budget is None:
            return math.inf
        return self._budget - (time.monotonic() - self._began)

    def _share(self) -> float:
        return statistics.fmean(training.share for training in self._trainings)

    def _keep_to_budget(self, running: Sequence[CellTraining]) -> None:
        """Stop levels, then cut all, until what is left fits into the budget."""
        left = self._left()
        running = list(running)
        base = next((one.fastest_ms for one in running if one.cell.level == "O0"), math.inf)
        planned = max(one.planned for one in self._trainings)  # 0 where the length is unknown
        while running and _needed(running) > left:
            slow = max(running, key=lambda one: one.fastest_ms)
            if slow.fastest_ms < TOO_SLOW * base:
                break
            running.remove(slow)
            of = f" of {planned}" if planned else ""
            slow.end(
                "stopped",
                f"stopped after {slow.done}{of} steps to keep to the time budget: a step "
                f"takes {slow.fastest_ms / base:.1f} times O0's",
            )
        after = AFTER * sum(one.seconds_a_step for one in running)
        to_train = _needed(running) - after
        if to_train > max(0.0, left - after):
            most = max(one.done for one in self._trainings if one.status == "ok")  # all end alike
            limit = most + int(max(0.0, left - after) / to_train * (running[0].aim - most))
            for one in running:
                one.limit = limit


def _processor() -> tuple[float, ...]:
    """Read the clock, this thread's processor time, and forced and other switches of threads."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows does not count them
        return (0.0,) * 4
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), time.thread_time(), used.ru_nivcsw, used.ru_nvcsw


def _waited(before: Sequence[float]) -> float:
    """Give the share of the time since then in which other programs had the processor."""
    clock, processor, forced, own = (a - b for a, b in zip(_processor(), before, strict=True))
    without = max(0.0, clock - processor)
    return without / clock if forced > max(own, PREEMPTED * without) else 0.0


def _needed(trainings: Sequence[CellTraining]) -> float:
    """Seconds that are left to do."""
    return sum(one.seconds_a_step * (one.aim - one.done + AFTER) for one in trainings)


def _first_line(trainings: Sequence[CellTraining]) -> str:
    cell = trainings[0].cell
    times = [f"{one.cell.label} {three(one.step_ms)}" for one in trainings if one.done]
    return f"{cell.task}, batch {cell.batch}: first steps in ms, no result yet: {', '.join(times)}"
