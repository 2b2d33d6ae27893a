"""The columns of `apex bench`'s report."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from apex.commands.bench.training.results import Results
from apex.commands.bench.training.rows import LevelRow, mean, rows
from apex.commands.bench.training.verdict import Verdict, baseline_of
from apex.commands.tables import NOTHING, Column, number, three

__all__ = ["COLUMNS", "Line", "lines"]


class Line(NamedTuple):
    """A row with its comparison to the baseline, where there is one."""

    row: LevelRow
    verdict: Verdict | None

    @property
    def ratio(self) -> float | None:
        """The speed relative to O0; of O0 it is 1."""
        if self.row.ms is not None and baseline_of(self.row, [self.row]):
            return 1.0
        return self.verdict.ratio if self.verdict and not self.verdict.noise else None


def lines(report: Results, verdicts: Sequence[Verdict]) -> list[Line]:
    """Put each row beside its verdict against O0."""
    made = rows(report)
    found = {(v.row.task, v.row.batch, v.row.label, v.other.label): v for v in verdicts}
    bases = [baseline_of(row, made) for row in made]
    return [
        Line(row, found.get((row.task, row.batch, row.label, base.label)) if base else None)
        for row, base in zip(made, bases, strict=True)
    ]


def _spread(values: Sequence[float], spec: str) -> str:
    average = mean(values)
    several = len(values) > 1 and all(map(math.isfinite, values))
    sd = f" ± {statistics.stdev(values):{spec}}" if several else ""
    return NOTHING if average is None else f"{average:{spec}}{sd}"


def _speed(line: Line) -> str:
    known = line.verdict.speed if line.verdict else None
    ends = f" ({known.low:.2f}–{known.high:.2f})" if known else ""
    noisy = "noisy" if line.verdict and line.verdict.noise else None
    about = "≈" if line.verdict and line.ratio and not known else ""
    return noisy or about + number(line.ratio, ".2f", ends)


def _end(name: str) -> Any:
    return lambda x: getattr(x.verdict.speed, name) if x.verdict and x.verdict.speed else None


WHOLE_RUNS = "no run of the row finished"

COLUMNS: tuple[Column[Line], ...] = (
    Column("task", lambda x: x.row.task, {"task": lambda x: x.row.task}, left=True, group=True),
    Column("batch", lambda x: str(x.row.batch), {"batch_size": lambda x: x.row.batch},
           "samples per training step", group=True),
    Column("level", lambda x: x.row.label,
           {"label": lambda x: x.row.label, "level": lambda x: x.row.level,
            "dtype": lambda x: x.row.dtype},
           "O0 to O5 are apex.amp's; native-fp16 and native-bf16 are torch.autocast; FP16 is "
           "network_to_half with FP16_Optimizer", left=True),
    Column("ms per\nstep", lambda x: three(x.row.ms), {"step_median_ms": lambda x: x.row.ms},
           "median over the steps that count, all seeds together", WHOLE_RUNS),
    Column("speed / O0\n(95 %)", _speed,
           {"speed_vs_O0": lambda x: x.ratio, "speed_vs_O0_low": _end("low"),
            "speed_vs_O0_high": _end("high")},
           "step time of O0 (TF32 off) divided by this level's, measured in turns in one process; "
           "mean over the seeds and its interval; ≈: too few steps or seeds for one; noisy: the "
           "times vary too much, or other programs used this machine",
           "the row or O0 was not measured, or did not train"),
    Column("peak\nMiB", lambda x: three(x.row.peak_bytes and x.row.peak_bytes / 2**20),
           {"peak_tensor_bytes": lambda x: x.row.peak_bytes},
           "peak memory of tensors: weights, gradients, optimizer state, activations",
           "the device does not report it, or no run finished"),
    Column("memory\n/ O0", lambda x: number(x.verdict.memory if x.verdict else None, ".2f"),
           {"memory_vs_O0": lambda x: x.verdict.memory if x.verdict else None},
           "peak divided by O0's; below 1 is less", "the row or O0 was not measured", drop=1),
    Column("test\nacc. %", lambda x: _spread(x.row.accuracies, ".2f"),
           {"accuracy_mean_percent": lambda x: mean(x.row.accuracies)},
           "per cent right on data not trained on, mean ± standard deviation over the seeds",
           "the task has no accuracy, or no run finished"),
    Column("test\nloss", lambda x: _spread(x.row.test_losses, ".4f"),
           {"test_loss_mean": lambda x: mean(x.row.test_losses)},
           "mean loss on the same data", "the task has no test loss, or no run finished", drop=2),
    Column("training\nloss", lambda x: _spread(x.row.final_losses, ".4f"),
           {"final_loss_mean": lambda x: mean(x.row.final_losses)},
           "mean of the last epoch", WHOLE_RUNS, drop=3),
    Column("s to\ntarget", lambda x: three(x.row.seconds_to_target),
           {"seconds_to_target": lambda x: x.row.seconds_to_target},
           "training time until the accuracy of --target, median over the seeds",
           "a seed did not reach it, or there is no --target", drop=4),
    Column("inference\nms", lambda x: three(x.row.inference_ms),
           {"inference_median_ms": lambda x: x.row.inference_ms},
           "forward and loss of a training batch in evaluation mode",
           "the task has its own training step, or only one level was trained", drop=5),
    Column("samples\n/ s", lambda x: three(x.row.samples_s),
           {"samples_per_s": lambda x: x.row.samples_s},
           "of whole epochs, data included", WHOLE_RUNS, drop=8),
    Column("data\nms", lambda x: three(x.row.data_ms), {"data_median_ms": lambda x: x.row.data_ms},
           "median time before a step until its batch was on the device", WHOLE_RUNS, drop=9),
    Column("host\nms", lambda x: three(x.row.host_ms), {"host_median_ms": lambda x: x.row.host_ms},
           "median time until the calls of a step had returned; near the step time, the host's "
           "calls limit the speed", "measured on a GPU only", drop=6),
    Column("steps\nskipped", lambda x: number(x.row.skipped, "d"),
           {"skipped_steps": lambda x: x.row.skipped},
           "steps skipped because a gradient was not finite, all seeds together",
           "nothing was run", drop=6),
    Column("loss\nscale", lambda x: "–".join(f"{s:g}" for s in x.row.scale_ends) or NOTHING,
           {"scale_lowest": lambda x: min(x.row.scale_ends, default=None),
            "scale_highest": lambda x: max(x.row.scale_ends, default=None)},
           "of the first and the last step", WHOLE_RUNS, drop=7),
    Column("problem", lambda x: (x.row.problem or "").partition(":")[0],
           {"problem": lambda x: x.row.problem}, left=True, wraps=True),
)  # fmt: skip
