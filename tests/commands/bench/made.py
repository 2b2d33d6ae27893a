"""Reports with plausible numbers, made by hand: nothing is trained."""

import dataclasses
import math

import numpy as np

from apex.commands.bench.training.results import Cell, Operator, Results, Run

# level: step time and memory in units of O0's, per cent right
LEVELS = {
    "O0": (1.0, 1.0, 98.4), "O1": (3.1, 0.8, 98.3), "O2": (2.8, 0.6, 98.3), "O3": (2.5, 0.5, 91.0),
    "O4": (0.71, 0.8, 98.4), "O5": (0.62, 0.55, 98.1), "native-fp16": (3.3, 0.8, 98.4),
    "native-bf16": (0.74, 0.82, 98.3), "FP16": (2.9, 0.6, 98.0),
}  # fmt: skip
ARITHMETIC = {"O2": "O1", "native-bf16": "O4"}  # whose losses are the other's
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
NOTES = {"time": "by the host's clock", "memory": "of tensors, by torch's CPU allocator"}
NOTHING = dict.fromkeys(
    ("step_ms", "data_ms", "blocks", "losses", "accuracy", "test_loss", "epoch_seconds", "scales",
     "inference_ms", "operators"), ()
)  # fmt: skip


def cell(level="O0", batch=128, seed=0, **changes):
    values = {
        "task": "digits-cnn", "level": level, "tf32": None, "batch": batch, "seed": seed,
        "optimizer": "sgd", "lr": 0.1, "epochs": 2, "compile": False, "quick": False,
    }  # fmt: skip
    return Cell(**{**values, **changes})


def run(of, *, steps=60, turns=5, ms=None, noise=0.04, **changes):
    """A run of a cell whose numbers depend on the cell alone; ``ms`` is about a step's time."""
    of_time, of_memory, accuracy = LEVELS[of.level]
    name = ARITHMETIC.get(of.level, of.level)
    random = np.random.default_rng([of.batch, of.seed, *of.level.encode()])
    training = np.random.default_rng([of.batch, of.seed, *name.encode()])
    base = ms or 0.03 * of.batch * (0.6 if of.tf32 else 1) * of_time
    step_ms = base * np.exp(noise * random.standard_normal(steps))
    losses = 2.3 * np.exp(-np.arange(steps) / 18)
    losses += 0.05 * np.exp(0.1 * training.standard_normal(steps))
    falls = 2 if of.level in ("O1", "O2", "native-fp16") else 0
    scale = 65536.0 if falls else 128.0 if of.level == "FP16" else 1.0
    scales = [scale / 2 ** min(i, falls) * 2 ** (i // 25 if falls else 0) for i in range(steps)]
    values = {
        "status": "ok",
        "together": tuple(LEVELS),
        "blocks": tuple(range(0, steps, steps // turns)),
        "step_ms": tuple(map(float, step_ms)),
        "data_ms": tuple(map(float, 0.1 * step_ms)),
        "losses": tuple(map(float, losses)),
        "scales": tuple(scales),
        "skipped": falls,
        "steps_per_epoch": steps // 2,
        "planned_steps": steps,
        "epoch_seconds": (float(step_ms.sum()) / 1900,) * 2,
        "accuracy": (accuracy - 3.0, float(accuracy + 0.3 * training.standard_normal())),
        "test_loss": (0.4, float(0.2 * np.exp(0.01 * training.standard_normal()))),
        "test_size": 600,
        "inference_ms": tuple(map(float, 0.3 * step_ms[:4])),
        "peak_bytes": int(2**20 * (4 + 0.1 * of.batch * of_memory)),
        "operators": (Operator("mm", "float32", 0.6 * base), Operator("add", "", 0.1 * base)),
    }
    return Run(of, **{**values, **changes})


def report(cells=None, runs=None, *, environment=CPU, **changes):
    """A report whose runs are all of the plan, if nothing else is said."""
    plan = [cell(level, seed=s) for s in range(3) for level in LEVELS] if cells is None else cells
    runs = [run(of) for of in plan] if runs is None else runs
    return Results(environment, tuple(plan), tuple(runs), **{"notes": NOTES, **changes})


def level(name, ms=(1.0, 1.1, 0.9), accuracy=None, others=None, **cells):
    """The runs of a level with a step time, and perhaps an accuracy, for each seed."""
    accuracy = accuracy or [None] * len(ms)
    return [
        run(
            cell(name, seed=seed, **cells), ms=time, noise=0.0,
            **{"accuracy": () if right is None else (10.0, right), **(others or {})},
        )
        for seed, (time, right) in enumerate(zip(ms, accuracy, strict=True))
    ]  # fmt: skip


def of_runs(*runs, **changes):
    """A complete report of these runs."""
    return report([one.cell for one in runs], runs, **changes)


def troubled(batches=(128, 512)):
    """Several batch sizes and seeds; levels ran out of memory, diverged, failed, were stopped."""
    cells = [cell(level, b, s) for s in range(3) for b in batches for level in LEVELS]
    runs = []
    for of in cells:
        changes = {}
        if of.level == "O3" and of.batch == batches[-1]:
            bad = math.nan if of.seed else math.inf
            changes = {"status": "diverged", "losses": (2.3, 2.0) * 20 + (bad,) * 20}
        elif of.level == "O0" and of.batch == batches[-1] and of.seed == 2:
            changes = {"status": "out of memory", "peak_bytes": None, **NOTHING}
        elif of.level == "FP16":
            said = "TypeError: tokens cannot be halved"
            changes = {"status": "failed", "error": said, "peak_bytes": None, **NOTHING}
        runs.append(run(of, **changes))
    return report(cells, runs, target=97.0)


def on_gpu(batches=(128, 512), **changes):
    """Two tasks on a GPU, O0 with TF32 off and on, and what only a GPU tells."""
    pairs = [("O0", False), ("O0", True), ("O1", True), ("O4", True), ("native-bf16", True)]
    cells = [
        cell(level, batch, seed, tf32=tf32, task=task, **changes)
        for seed in range(3)
        for task in ("digits-cnn", "bert-tiny")
        for batch in batches
        for level, tf32 in pairs
    ]
    quality = {"bert-tiny": {"accuracy": (), "test_loss": ()}, "digits-cnn": {}}
    runs = [run(of, host_ms=2.0, **quality[of.task]) for of in cells]
    return report(cells, runs, environment=GPU)


def without(part, **fields):
    """A copy with other fields."""
    return dataclasses.replace(part, **fields)
