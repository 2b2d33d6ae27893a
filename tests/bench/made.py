"""Reports with plausible numbers, made by hand: nothing is trained."""

import math

import numpy as np

from apex.bench.training.results import Cell, Report, Run
from apex.bench.training.rows import baseline_of, rows, runs_of
from apex.bench.training.verdict import Interval, Verdict

# level: step time and memory in units of O0's, per cent right
LEVELS = {
    "O0": (1.0, 1.0, 98.4), "O1": (3.1, 0.8, 98.3), "O2": (2.8, 0.6, 98.2), "O3": (2.5, 0.5, 91.0),
    "O4": (0.71, 0.8, 98.4), "O5": (0.62, 0.55, 98.1), "native-fp16": (3.3, 0.8, 98.4),
    "native-bf16": (0.74, 0.82, 98.3), "FP16": (2.9, 0.6, 98.0),
}  # fmt: skip
CPU = {
    "date": "2026-11-22T15:00:00+00:00",
    "versions": {"apex": "0.9", "torch": "2.13.0", "triton": None, "python": "3.11.7"},
    "device": {
        "device": "cpu",
        "name": "Thinking Machine CM-5",
        "memory_bytes": 2**34,
        "cores": 2,
        "capability": "AVX512",
        "half_types": [
            {"dtype": "float16", "native": False, "why": "no such instructions"},
            {"dtype": "bfloat16", "native": True, "why": "avx512_bf16"},
        ],
    },
    "threads": 2,
}
GPU = {
    **CPU,
    "device": {**CPU["device"], "device": "cuda:0", "name": "Graphics Engine 9", "half_types": []},
    "cuda": {"torch": "13.0", "cudnn": "9.20.0", "driver": "590.1"},
}
NOTES = {
    "time": "by the host's clock, after a warm-up of 2 steps",
    "memory": "of tensors, by torch's CPU allocator",
    "quality": "accuracy on the third of the digits that was held out",
}


def cell(level="O0", batch=128, seed=0, **changes):
    values = {
        "task": "digits-cnn", "level": level, "tf32": None, "batch": batch, "seed": seed,
        "optimizer": "sgd", "lr": 0.1, "epochs": 2, "compile": False, "quick": False,
    }  # fmt: skip
    return Cell(**{**values, **changes})


def run(of, *, steps=60, **changes):
    """A run of a cell whose numbers depend on the cell alone."""
    of_time, of_memory, accuracy = LEVELS[of.level]
    random = np.random.default_rng([of.batch, of.seed, *of.level.encode()])
    base = 0.03 * of.batch * (0.6 if of.tf32 else 1) * of_time
    step_ms = base * np.exp(0.04 * random.standard_normal(steps) + 0.02 * random.standard_normal())
    losses = 2.3 * np.exp(-np.arange(steps) / 18) + 0.05 * np.exp(random.standard_normal(steps))
    falls = 2 if of.level in ("O1", "O2", "native-fp16") else 0
    scale = 65536.0 if falls else 128.0 if of.level == "FP16" else 1.0
    scales = [scale / 2 ** min(i, falls) * 2 ** (i // 25 if falls else 0) for i in range(steps)]
    values = {
        "status": "ok",
        "step_ms": (9 * base, 3 * base, *map(float, step_ms[2:])),
        "data_ms": tuple(map(float, 0.1 * step_ms)),
        "warm_up": 2,
        "losses": tuple(map(float, losses)),
        "accuracy": (accuracy - 3.0, float(accuracy + 0.3 * random.standard_normal())),
        "steps_per_epoch": steps // 2,
        "epoch_seconds": (float(step_ms.sum()) / 1900,) * 2,
        "peak_tensor_bytes": int(2**20 * (4 + 0.1 * of.batch * of_memory)),
        "skipped": falls,
        "scales": tuple(scales),
    }
    return Run(of, **{**values, **changes})


def report(cells=None, runs=None, *, environment=CPU, **changes):
    """A report whose runs are all of the plan, if nothing else is said."""
    plan = [cell(level, seed=s) for s in range(3) for level in LEVELS] if cells is None else cells
    runs = [run(of) for of in plan] if runs is None else runs
    return Report(environment, tuple(plan), tuple(runs), **{"notes": NOTES, **changes})


def troubled(batches=(128, 256, 512)):
    """Several batch sizes and seeds; one level ran out of memory, one diverged, one failed."""
    cells = [cell(level, b, s) for s in range(3) for b in batches for level in LEVELS]
    runs = []
    for of in cells:
        changes = {}
        if of.level == "O3" and of.batch == batches[-1]:
            bad = math.nan if of.seed else math.inf
            changes = {"status": "diverged", "losses": (2.3, 2.0) * 20 + (bad,) * 20}
        elif of.level == "O0" and of.batch == batches[-1] and of.seed == 2:
            nothing = ("step_ms", "data_ms", "losses", "accuracy", "epoch_seconds", "scales")
            changes = {"status": "out of memory", "peak_tensor_bytes": None}
            changes |= dict.fromkeys(nothing, ())
        elif of.level == "FP16":
            nothing = ("step_ms", "data_ms", "losses", "accuracy", "epoch_seconds", "scales")
            changes = {"status": "failed", "error": "TypeError: tokens cannot be halved"}
            changes |= {"peak_tensor_bytes": None, **dict.fromkeys(nothing, ())}
        elif of.level == "O5":
            changes = {"joules": 12.5}
        runs.append(run(of, **changes))
    return report(cells, runs)


def on_gpu(**changes):
    """Two tasks on a GPU, O0 with TF32 off and on, and what only a GPU tells."""
    pairs = [("O0", False), ("O0", True), ("O1", True), ("O4", True), ("native-bf16", True)]
    cells = [
        cell(level, batch, seed, tf32=tf32, task=task, **changes)
        for seed in range(3)
        for task in ("digits-cnn", "bert-tiny")
        for batch in (128, 512)
        for level, tf32 in pairs
    ]
    runs = [
        run(of, host_ms=2.0, replay_ms=1.5, joules=40.0, flops=10**9, moved_bytes=10**7,
            accuracy=() if of.task == "bert-tiny" else (90.0, 97.5 + 0.1 * of.seed))
        for of in cells
    ]  # fmt: skip
    ceilings = {"flops fp32": 4e13, "flops fp16": 4e14, "flops bf16": 4e14, "bytes": 2e12}
    return report(cells, runs, environment=GPU, ceilings=ceilings)


def verdicts(of):
    """Each row against O0, with an interval of 4 per cent either way from three seeds on."""
    made = rows(of)
    found = []
    for row in made:
        base = baseline_of(row, made)
        if base is None or row.label == base.label:
            continue
        pairs = len({r.cell.seed for r in runs_of(of, row) if r.finished})
        speed = row.speed
        known = speed is not None and pairs >= 3
        said = f"{1 / speed:.2f} times the step time of" if speed else "not comparable with"
        found.append(
            Verdict(
                row.task, row.batch, row.label, base.label, pairs,
                Interval(speed, speed * 0.96, speed * 1.04) if known else None,
                speed, row.memory, None, None,
                f"{row.label} has {said} {base.label} ({pairs} seeds).",
            )
        )  # fmt: skip
    return found
