"""The columns of `apex bench`'s report, and its CSV files."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apex.bench.intervals import percentile
from apex.bench.output.columns import Column, Value, span, three, write_records
from apex.bench.output.console import NOTHING, number
from apex.bench.training.results import Report, Run
from apex.bench.training.rows import Row, Spread, baseline_of, rows
from apex.bench.training.verdict import Verdict

__all__ = ["COLUMNS", "Line", "lines", "run_fields", "short_problem", "write_runs_csv"]


class Line(NamedTuple):
    """A row with its comparison to the baseline, where there is one."""

    row: Row
    verdict: Verdict | None

    @property
    def speed(self) -> float | None:
        """The verdict's, paired over seeds; that of the pooled medians where there is none."""
        known = self.verdict.speed if self.verdict else None
        return self.row.speed if known is None else known.value


def lines(report: Report, verdicts: Sequence[Verdict]) -> list[Line]:
    """Put each row beside its verdict against O0."""
    found = {(v.task, v.batch, v.label, v.against): v for v in verdicts}
    made = rows(report)
    bases = [baseline_of(row, made) for row in made]
    return [
        Line(row, found.get((row.task, row.batch, row.label, base.label)) if base else None)
        for row, base in zip(made, bases, strict=True)
    ]


def short_problem(row: Row) -> str:
    """Give the kind of a row's problem without the text of the error."""
    return (row.problem or "").partition(":")[0]


def _spread(value: Spread | None, spec: str) -> str:
    if value is None:
        return NOTHING
    return f"{value.mean:{spec}}" + ("" if value.sd is None else f" ± {value.sd:{spec}}")


def _ends(ascending: Sequence[float]) -> str:
    ends = dict.fromkeys([*ascending[:1], *ascending[-1:]])
    return "–".join(f"{value:g}" for value in ends) or NOTHING


def _mib(value: int | None) -> float | None:
    return None if value is None else value / 2**20


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _interval(line: Line) -> str:
    speed = line.verdict.speed if line.verdict else None
    return NOTHING if speed is None else f"{speed.low:.2f}–{speed.high:.2f}"


def _bound(name: str) -> Callable[[Line], Value]:
    def get(line: Line) -> Value:
        speed = line.verdict.speed if line.verdict else None
        return None if speed is None else float(getattr(speed, name))

    return get


def _of(name: str) -> Callable[[Line], Any]:
    return lambda line: getattr(line.row, name)


def _part(name: str, part: str) -> Callable[[Line], Value]:
    return lambda line: getattr(getattr(line.row, name), part, None)


GPU_ONLY = "measured on a GPU only, where the host and the device work side by side"
WHOLE_RUNS = "no run of the row finished"
CEILING = "needs a ceiling measured in the same run and a count of the step's work"

COLUMNS: tuple[Column[Line], ...] = (
    Column("task", _of("task"), {"task": _of("task")}, left=True, group=True),
    Column(
        "batch", lambda x: str(x.row.batch), {"batch_size": _of("batch")},
        "samples per training step", group=True,
    ),
    Column(
        "level", _of("label"), {"label": _of("label"), "level": _of("level")},
        "O0 to O5 are apex.amp's; native-fp16 and native-bf16 are torch.autocast; FP16 is "
        "network_to_half with FP16_Optimizer", left=True,
    ),
    Column("dtype", _of("dtype"), {"dtype": _of("dtype")},
           "what most matrix products compute in", left=True, drop=9),
    Column(
        "ms per\nstep", lambda x: three(x.row.ms_median),
        {"step_median_ms": _of("ms_median")},
        "median over the steps after the warm-up, all seeds together", WHOLE_RUNS,
    ),
    Column(
        "p10–p90", lambda x: span(x.row.ms_p10, x.row.ms_p90),
        {"step_p10_ms": _of("ms_p10"), "step_p90_ms": _of("ms_p90")},
        "tenth and ninetieth percentile of the same steps, in ms", WHOLE_RUNS, drop=4,
    ),
    Column(
        "speed\n/ O0", lambda x: number(x.speed, ".2f", "×"), {"speed_vs_O0": lambda x: x.speed},
        "step time of O0 (TF32 off) divided by this one: above 1 is faster; the mean of the pairs "
        "of seeds, or the ratio of the medians where fewer than three pairs give no interval",
        "the row or O0 was not measured",
    ),
    Column(
        "95 %\ninterval", _interval,
        {"speed_vs_O0_low": _bound("low"), "speed_vs_O0_high": _bound("high")},
        "confidence interval of the speed, paired over seeds",
        "needs three seeds at which both levels finished", drop=2,
    ),
    Column(
        "peak\nMiB", lambda x: three(x.row.peak_mib), {"peak_tensor_bytes": _of("peak_bytes")},
        "peak memory of tensors: weights, gradients, optimizer state, activations",
        "the device does not report it, or no run finished",
    ),
    Column(
        "memory\n/ O0", lambda x: number(x.row.memory, ".2f", "×"), {"memory_vs_O0": _of("memory")},
        "peak divided by that of O0: below 1 is less", "the row or O0 was not measured", drop=1,
    ),
    Column(
        "final\nloss", lambda x: _spread(x.row.loss, ".4f"),
        {"final_loss_mean": _part("loss", "mean"), "final_loss_sd": _part("loss", "sd")},
        "mean training loss of the last epoch, mean ± standard deviation over the seeds",
        WHOLE_RUNS, drop=3,
    ),
    Column(
        "test\nacc. %", lambda x: _spread(x.row.accuracy, ".2f"),
        {"accuracy_mean_percent": _part("accuracy", "mean"),
         "accuracy_sd_percent": _part("accuracy", "sd")},
        "per cent right on data not trained on, mean ± standard deviation over the seeds",
        "the task has no accuracy, or no run finished",
    ),
    Column(
        "data\nms", lambda x: three(x.row.data_ms), {"data_median_ms": _of("data_ms")},
        "median time before a step until its batch was on the device; not part of the step",
        WHOLE_RUNS, drop=8,
    ),
    Column(
        "host\nms", lambda x: three(x.row.host_ms), {"host_median_ms": _of("host_ms")},
        "median time until the calls of a step had returned; if it is near the step time, "
        "the host's calls limit the speed", GPU_ONLY, drop=6,
    ),
    Column(
        "replay\nms", lambda x: three(x.row.replay_ms), {"replay_median_ms": _of("replay_ms")},
        "median time of a step replayed as a CUDA graph, without host time",
        f"{GPU_ONLY}; not every step can be captured", drop=7,
    ),
    Column(
        "samples\n/ s", lambda x: three(x.row.samples_s), {"samples_per_s": _of("samples_s")},
        "of whole epochs, data included", WHOLE_RUNS, drop=8,
    ),
    Column(
        "total\ns", lambda x: _spread(x.row.seconds, ".3g"),
        {"total_mean_s": _part("seconds", "mean"), "total_sd_s": _part("seconds", "sd")},
        "of all epochs, data included, without evaluation", WHOLE_RUNS, drop=7,
    ),
    Column(
        "process\nMiB", lambda x: three(_mib(x.row.process_bytes)),
        {"peak_process_bytes": _of("process_bytes")},
        "growth of the resident set of the run's own process at most",
        "measured on a CPU only, and not where cells share a process (--quick)", drop=9,
    ),
    Column(
        "steps\nskipped", lambda x: number(x.row.skipped, "d"), {"skipped_steps": _of("skipped")},
        "optimizer steps skipped because a gradient was not finite, all seeds together",
        "nothing was run", drop=5,
    ),
    Column(
        "loss\nscale", lambda x: _ends(x.row.scale_ends),
        {"scale_lowest": lambda x: min(x.row.scale_ends, default=None),
         "scale_highest": lambda x: max(x.row.scale_ends, default=None)},
        "after the first and the last step: lowest and highest", WHOLE_RUNS, drop=5,
    ),
    Column(
        "J per\nsample", lambda x: three(x.row.joules_per_sample),
        {"joules_per_sample": _of("joules_per_sample")},
        "energy of all epochs by NVML or RAPL, divided by the samples",
        "this machine does not let its energy be read (NVML, RAPL)", drop=6,
    ),
    Column(
        "of peak\nFLOP/s", lambda x: _percent(x.row.of_flops),
        {"share_of_flops_ceiling": _of("of_flops")},
        "share of the matrix-product speed measured in the same run in this dtype", CEILING, drop=6,
    ),
    Column(
        "of peak\nbytes/s", lambda x: _percent(x.row.of_bytes),
        {"share_of_bandwidth_ceiling": _of("of_bytes")},
        "share of the memory bandwidth measured in the same run", CEILING, drop=7,
    ),
    Column(
        "runs", lambda x: f"{x.row.runs}/{x.row.planned}",
        {"runs": _of("runs"), "runs_planned": _of("planned")},
        "finished or failed, of those that were planned: one for each seed", drop=9,
    ),
    Column(
        "problem", lambda x: short_problem(x.row), {"problem": _of("problem")}, left=True,
    ),
)  # fmt: skip


def run_fields(run: Run) -> dict[str, Value]:
    """Give the numbers of one run: its cell, and one value for each thing measured."""
    return {
        "label": run.cell.label,
        **dataclasses.asdict(run.cell),
        "status": run.status,
        "error": run.error,
        "step_median_ms": percentile(run.counted_ms, 50),
        "data_median_ms": percentile(run.data_ms, 50),
        "host_median_ms": run.host_ms,
        "replay_median_ms": run.replay_ms,
        "total_s": sum(run.epoch_seconds) if run.epoch_seconds else None,
        "peak_tensor_bytes": run.peak_tensor_bytes,
        "peak_process_bytes": run.peak_process_bytes,
        "final_loss": run.epoch_losses[-1] if run.epoch_losses else None,
        "accuracy_percent": run.accuracy[-1] if run.accuracy else None,
        "skipped_steps": run.skipped,
        "last_scale": run.scales[-1] if run.scales else None,
        "joules": run.joules,
    }


def write_runs_csv(report: Report, path: Path) -> None:
    """Write one line per run."""
    write_records([run_fields(run) for run in report.runs], path)
