"""``./dev kernels --triton DIR ...``: compile every kernel with other releases of Triton.

A release is unpacked beside the others, and not installed ::

    pip install --no-deps --target .tritons/3.9.0 triton==3.9.0

Each compiles in a process of its own, with its folder in front of the path. No kernel may have more
registers than `LIMITS` says for its name: the most that Triton 3.5.0 to 3.9.0 took for sm_90,
rounded up to a multiple of 8, by which they are given out. None may spill more than `SPILLS` says.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

LIMITS = pathlib.Path(__file__).with_name("registers.json")
# Bytes a thread: Triton 3.5 spills 16 of Lion with Kahan's compensation in bfloat16, and 3.8 spills
# 8 of Adagrad in 16 bits. With the Triton that is pinned `./dev kernels` takes any for a fault.
SPILLS = {"lion": 16, "adagrad": 8}
Finding = Mapping[str, Any]


def compared(folders: Sequence[str], targets: Sequence[str]) -> list[dict[str, Any]]:
    """What each release made of the kernels: a row for each folder and target."""
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    rows = []
    for folder in folders:
        for target in targets:
            found = _compiled(folder, target)
            rows.append({"triton": found["triton"], **judged(found["kernels"], limits, target)})
    return rows


def judged(findings: Sequence[Finding], limits: Mapping[str, int], target: str) -> dict[str, Any]:
    """Count kernels and registers, and say what is spilled and what is above the limits.

    Args:
        findings: Of one release.
        limits: The most registers by the name of a kernel; they hold for sm_90.
        target: What the kernels were compiled for.
    """
    bad, spills = {}, {}
    for one in findings:
        name, spilled = one["kernel"], one["spilled"]
        where, most = f"{name} {one['variant']}", limits.get(name, 0)
        if spilled:
            spills[where] = spilled
        said = []
        if spilled > SPILLS.get(name, 0):
            said.append(f"spills {spilled} bytes, allowed are {SPILLS.get(name, 0)}")
        if target == "sm_90" and one["registers"] > most:
            said.append(f"{one['registers']} registers, allowed are {most}")
        if said:
            bad[where] = ", ".join(said)
    return {
        "target": target,
        "kernels": len(findings),
        "most_registers": max(one["registers"] for one in findings),
        "spilled_bytes": spills,
        "above_limits": bad,
    }


def _compiled(folder: str, target: str) -> dict[str, Any]:
    path = os.pathsep.join([os.path.abspath(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "tools.kernels", "--json", "--target", target],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"--triton {folder}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    if not os.path.abspath(found["from"]).startswith(os.path.abspath(folder)):
        raise RuntimeError(f"--triton {folder}: no triton there; {found['from']} was taken")
    return found
