"""Small reports with chosen numbers, for the tests of what reads reports."""

import dataclasses

from apex.bench.training.results import Cell, Report, Run

CPU = {
    "device": "cpu",
    "name": "A CPU",
    "memory_bytes": 2**33,
    "cores": 2,
    "capability": "AVX512",
    "half_types": (
        {"dtype": "float16", "native": False, "why": "no such instructions"},
        {"dtype": "bfloat16", "native": True, "why": "amx_bf16"},
    ),
}
ENVIRONMENT = {
    "date": "2026-01-01T00:00:00+00:00",
    "versions": {"apex": "1", "torch": "2.13", "triton": None, "python": "3", "platform": "x"},
    "device": CPU,
    "threads": 2,
}


def cell(level="O0", seed=0, **others):
    """The cell of a level and seed."""
    fields = {
        "task": "digits", "tf32": None, "batch": 8, "optimizer": "sgd", "lr": 0.1, "epochs": 1,
        "compile": False, "quick": False,
    }  # fmt: skip
    return Cell(level=level, seed=seed, **fields | others)


def run(of, ms=1.0, accuracy=None, **others):
    """A run whose steps take 100 ms twice, as warm-up, and then ``ms`` on the median."""
    fields = {
        "status": "ok",
        "step_ms": (100.0, 100.0, 0.9 * ms, 50 * ms, ms, ms),
        "data_ms": (0.01,) * 6,
        "warm_up": 2,
        "losses": (4.0, 3.0, 2.0, 1.0, 0.5, 0.5),
        "accuracy": () if accuracy is None else (10.0, accuracy),
        "steps_per_epoch": 6,
        "epoch_seconds": (0.006 * ms,),
        "peak_tensor_bytes": 1000,
    }
    return Run(cell=of, **fields | others)


def report(*runs, **others):
    """A complete report of these runs."""
    fields = {"environment": ENVIRONMENT, "notes": {"time": "by a clock"}}
    return Report(plan=tuple(r.cell for r in runs), runs=runs, **fields | others)


def level(name="O0", ms=(1.0, 1.1, 0.9), accuracy=None, tf32=None, others=None, **cells):
    """The runs of a level with a time, and perhaps an accuracy, for each seed."""
    accuracy = accuracy or [None] * len(ms)
    return [
        run(cell(name, seed, tf32=tf32, **cells), time, right, **others or {})
        for seed, (time, right) in enumerate(zip(ms, accuracy, strict=True))
    ]


def without(part, **fields):
    """A copy with other fields."""
    return dataclasses.replace(part, **fields)
