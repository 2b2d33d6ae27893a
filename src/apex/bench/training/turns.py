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

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from apex import amp
from apex.bench.output.columns import three
from apex.bench.training import profiling
from apex.bench.training.results import Cell, Run, Status
from apex.bench.training.tasks.task import Task
from apex.bench.training.timing import Stopwatch, stopwatch
from apex.bench.training.trainer import OwnState, Trainer, out_of_memory, to

__all__ = ["BLOCK", "Turns", "train"]

BLOCK = 8  # steps of a turn; the first does not count
TURN_MS = 50.0  # a turn of the fastest level lasts as long at least
MOST = 64  # steps of a turn
TOO_SLOW = 2.0  # times O0's step: levels that a budget may stop
AFTER = 12  # steps' time that evaluation and the measurements apart take, about
INFERENCES = 6  # rounds


def train(
    cells: Sequence[Cell],
    task: Task,
    device: torch.device,
    told: Callable[[float, str | None], None] = lambda share, line: None,
    budget_s: float | None = None,
) -> list[Run]:
    """Train the cells by turns and measure; what goes wrong in one is part of its result.

    Args:
        cells: They differ in level and TF32 alone.
        task: The task that they name.
        device: Where.
        told: Called after every block with the share of the work that is done, 0 to 1, and
            perhaps a line for the user.
        budget_s: Seconds that this may take; ``None`` is no limit.
    """
    if cells[0].compile:
        torch.compiler.reset()
        # Past Dynamo's limit, 8, a model goes on uncompiled, in silence.
        config: Any = torch._dynamo.config
        with config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            return Turns(cells, task, device, told, budget_s).run()
    return Turns(cells, task, device, told, budget_s).run()


class Turns:
    """Trainings that take turns."""

    def __init__(
        self,
        cells: Sequence[Cell],
        task: Task,
        device: torch.device,
        told: Callable[[float, str | None], None],
        budget_s: float | None,
    ) -> None:
        self._began = time.monotonic()
        self._budget = budget_s
        self._told = told
        self._device = device
        self._trainings = [_Training(cell, task, device) for cell in cells]
        self._draw = random.Random(cells[0].seed)
        if budget_s is not None:
            count = _counted(task.loader(cells[0].batch, 1000 * cells[0].seed), budget_s / 20)
            for training in self._trainings:
                training.per_epoch = count

    def run(self) -> list[Run]:
        """Train all to their end."""
        self._train()
        self._compare_inference()
        for training in self._trainings:
            training.free()
        for training in self._trainings:
            training.measure_apart(self._left())
        together = tuple(one.cell.label for one in self._trainings)
        runs = [training.result(together) for training in self._trainings]
        self._trainings.clear()
        amp.reset()
        return runs

    def _train(self) -> None:
        order = list(self._trainings)  # O0 first, so that a budget knows what is slow
        size, rounds = BLOCK, 0
        while order:
            for training in order:
                training.block(size, self._budget)
                self._told(self._share(), None)
            order = [training for training in order if not training.over]
            if rounds == 0 and order:
                self._told(self._share(), _first_line(self._trainings))
                fastest = min(training.step_ms() for training in order)
                size = max(BLOCK, min(MOST, math.ceil(TURN_MS / max(fastest, 1e-3))))
            self._keep_to_budget(order)
            if rounds % 2:
                order.reverse()
            else:
                self._draw.shuffle(order)
            rounds += 1
            order = [training for training in order if not training.over]

    def _left(self) -> float:
        """Seconds of the budget."""
        if self._budget is None:
            return math.inf
        return self._budget - (time.monotonic() - self._began)

    def _share(self) -> float:
        return statistics.fmean(training.share for training in self._trainings)

    def _keep_to_budget(self, running: Sequence["_Training"]) -> None:
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
            slow.stop(
                f"stopped after {slow.done}{of} steps to keep to the time budget: a step "
                f"takes {slow.fastest_ms / base:.1f} times O0's"
            )
        after = AFTER * sum(one.seconds_a_step for one in running)
        to_train = _needed(running) - after
        if to_train > max(0.0, left - after):
            most = max(one.done for one in self._trainings if one.status == "ok")  # all end alike
            limit = most + int(max(0.0, left - after) / to_train * (running[0].aim - most))
            for one in running:
                one.limit = limit

    def _compare_inference(self) -> None:
        ready = [one for one in self._trainings if one.trained and one.infers]
        for _ in range(INFERENCES if len(ready) > 1 else 0):
            for training in self._draw.sample(ready, len(ready)):
                training.infer()


class _Training:
    """One training, as far as it has come."""

    def __init__(self, cell: Cell, task: Task, device: torch.device) -> None:
        self.cell, self._task, self._device = cell, task, device
        self._own = OwnState(cell, device)
        self._watch: Stopwatch = stopwatch(device)
        self._inference: Stopwatch = stopwatch(device)
        self._trainer: Trainer | None = None
        self._steps = self._train()
        self.over = False
        self.limit: int | None = None
        self.status: Status = "ok"
        self.error: str | None = None
        self.planned = self.per_epoch = 0
        self._blocks: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._scales: list[Any] = []
        self._data_ms: list[float] = []
        self._epoch_seconds: list[float] = []
        self._accuracy: list[float] = []
        self._test_loss: list[float] = []
        self._steps_per_epoch = 0
        self._apart = profiling.Measured()
        self._seconds = 0.0

    @property
    def done(self) -> int:
        """Steps so far."""
        return len(self._losses)

    @property
    def trained(self) -> bool:
        """Whether it came to its end."""
        return self.status == "ok" and self.over

    @property
    def infers(self) -> bool:
        """Whether inference can be timed: a task with a step of its own may have no loss."""
        return self._task.step is None

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return 1.0 if self.over else min(1.0, self.done / self.aim) if self.aim else 0.0

    @property
    def aim(self) -> int:
        """The steps that it is to take."""
        return self.planned if self.limit is None else self.limit

    @property
    def seconds_a_step(self) -> float:
        """All that its blocks took over their steps; the first makes the optimizer's state."""
        return self._seconds / max(1, self.done - 1)

    @property
    def fastest_ms(self) -> float:
        """Its fastest step so far: something else that uses the machine only slows."""
        return min(self._watch.milliseconds()[1:], default=math.inf)

    def step_ms(self) -> float:
        """Median time of its steps so far, without the first."""
        times = self._watch.milliseconds()
        return statistics.median(times[1:] or times or [0.0])

    def block(self, size: int, budget_s: float | None) -> None:
        """Train for some steps, or to the end; for a twentieth of a budget at most."""
        self._blocks.append(self.done)
        begin = time.monotonic()
        with self._guarded():
            for step in range(size):
                if next(self._steps, None) is None:
                    self.over = True
                    break
                if self.done == 1:
                    begin = time.monotonic()
                if step and budget_s is not None and time.monotonic() > begin + budget_s / 20:
                    break
            self._synchronize()
        self._seconds += time.monotonic() - begin

    def stop(self, why: str) -> None:
        """End here."""
        self._end("stopped", why)

    def infer(self) -> None:
        """Time inference once."""
        assert self._trainer is not None
        with self._guarded():
            self._inference.start()
            self._trainer.infer(self._batch)
            self._inference.stop()
            self._synchronize()

    def measure_apart(self, left: float) -> None:
        """Measure what would disturb the times, at the first seed, if there are seconds left."""
        stopped = self.status == "stopped"
        if self.cell.seed == 0 and (self.trained or stopped) and left > self.seconds_a_step * AFTER:
            with self._guarded():
                self._apart = profiling.measure(
                    self.cell, self._task, self._device, self._batch, stopped=stopped
                )

    def result(self, together: tuple[str, ...]) -> Run:
        """Put together what was measured."""
        losses = torch.stack(self._losses).float().flatten().tolist() if self._losses else []
        scales = [float(scale) for scale in self._scales]
        if self.trained and not (self._finite and math.isfinite(losses[-1])):
            self.status = "diverged"
        return Run(
            cell=self.cell,
            status=self.status,
            error=self.error,
            together=together,
            blocks=tuple(block for block in self._blocks if block < len(losses)),
            step_ms=tuple(self._watch.milliseconds()[: len(losses)]),
            data_ms=tuple(self._data_ms),
            losses=tuple(losses),
            scales=tuple(scales[: len(losses)]),
            skipped=sum(after < before for before, after in pairwise(scales)),
            steps_per_epoch=self._steps_per_epoch,
            planned_steps=self.planned,
            epoch_seconds=tuple(self._epoch_seconds),
            accuracy=tuple(self._accuracy),
            test_loss=tuple(self._test_loss),
            test_size=self._task.test_size,
            inference_ms=tuple(self._inference.milliseconds()[1:]),
            **self._apart._asdict(),
        )

    # --- inside ----------------------------------------------------------------------------------

    def _train(self) -> Generator[bool, None, None]:
        """Train; stops after every step."""
        cell, task = self.cell, self._task
        trainer = self._trainer = Trainer(cell, task, self._device)
        for epoch in range(cell.epochs):
            loader = task.loader(cell.batch, 1000 * cell.seed + epoch)
            per_epoch = _length(loader) or self._steps_per_epoch or self.per_epoch
            self.planned = per_epoch * cell.epochs
            begun, sizes = self.done, []
            for batch in self._timed(loader):
                sizes.append(_rows(batch))
                self._scales.append(trainer.precision.scale())
                self._watch.start()
                loss = trainer.step(batch)
                self._watch.stop()
                self._losses.append(loss)
                self._batch = batch
                yield True
                if self.done == self.limit:
                    break
            steps = self.done - begun
            self._check(epoch, sizes, cut=self.done == self.limit)
            self._steps_per_epoch = self._steps_per_epoch or steps
            times = self._watch.milliseconds()[begun:], self._data_ms[begun:]
            self._epoch_seconds.append(sum(map(sum, times)) / 1000)
            self._measure_quality(trainer)
            if self.done == self.limit:
                break
        self.planned = max(self.planned, self.done)
        self._scales.append(trainer.precision.scale())
        self._finite = trainer.finite()

    def _timed(self, loader: Any) -> Iterator[Any]:
        """Give the batches on the device, and note how long each was waited for."""
        batches = iter(loader)
        while True:
            begin = time.perf_counter()
            try:
                batch = to(next(batches), self._device)
            except StopIteration:
                return
            self._data_ms.append(1000 * (time.perf_counter() - begin))
            yield batch

    def _check(self, epoch: int, sizes: Sequence[int], *, cut: bool) -> None:
        batch = self.cell.batch
        if not sizes:
            raise ValueError(f"the loader gave no batch of {batch}")
        if sizes[0] == batch > sizes[-1]:
            raise ValueError(
                f"the loader's last batch has {sizes[-1]} rows and not {batch}; leave it out "
                "(drop_last=True of a DataLoader)"
            )
        if epoch and not cut and len(sizes) != self._steps_per_epoch:
            raise ValueError(
                f"the loader gave {self._steps_per_epoch} batches in an epoch and {len(sizes)} in "
                "the next; they must be equally many"
            )

    def _measure_quality(self, trainer: Trainer) -> None:
        for found, what in (
            (self._accuracy, self._task.accuracy),
            (self._test_loss, self._task.test_loss),
        ):
            value = trainer.measure(what)
            if value is not None:
                found.append(value)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Surround what belongs to this training; an error ends it, and the others go on."""
        with self._own:
            try:
                yield
            except Exception as error:  # noqa: BLE001  one cell's failure is a result, not our end
                status: Status = "out of memory" if out_of_memory(error) else "failed"
                self._end(status, f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _end(self, status: Status, why: str) -> None:
        self.status, self.error, self.over = status, why, True
        self.free()

    def free(self) -> None:
        """Let go of the model, which is trained no further."""
        self._steps.close()
        self._trainer = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _needed(trainings: Sequence[_Training]) -> float:
    """Seconds that are left to do."""
    return sum(one.seconds_a_step * (one.aim - one.done + AFTER) for one in trainings)


def _first_line(trainings: Sequence[_Training]) -> str:
    cell = trainings[0].cell
    times = [f"{one.cell.label} {three(one.step_ms())}" for one in trainings if one.done]
    return f"{cell.task}, batch {cell.batch}: first steps in ms: {', '.join(times)}"


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return 0


def _counted(loader: Any, seconds: float) -> int:
    """Count the batches of a loader, which need not know how many; 0 if that takes too long."""
    end, count = time.monotonic() + seconds, _length(loader)
    if count:
        return count
    for _ in loader:
        count += 1
        if time.monotonic() > end:
            return 0
    return count


def _rows(batch: Any) -> int:
    """Return the length of the first tensor, 0 if there is none that has one."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next((len(tensor) for tensor in tensors), 0)
