"""What has to be said beside the numbers of a report, in the terminal, on plots and on the page."""

from typing import Any

from apex.bench.results import Report
from apex.bench.rows import rows

__all__ = ["marks", "notices", "problems", "source"]

TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16"}


def source(environment: dict[str, Any]) -> str:
    """Say in one line what machine and versions the numbers are from."""
    versions = environment["versions"]
    return f"{environment['device']['name']}, torch {versions['torch']}, apex {versions['apex']}"


def marks(report: Report) -> list[str]:
    """Say what keeps these numbers from being a full result."""
    found = []
    if not report.complete:
        found.append(f"INCOMPLETE: {len(report.runs)} of {len(report.plan)} runs")
    if report.quick:
        found.append("QUICK: fewer steps and less data")
    return found


def notices(report: Report) -> list[str]:
    """Say where a time does not mean what it seems to mean."""
    made = rows(report)
    found = []
    noisy = [row for row in made if row.ms_median and (row.ms_p90 or 0) > 2 * row.ms_median]
    if noisy:
        names = ", ".join(f"{row.label} ({row.task}, batch {row.batch})" for row in noisy)
        found.append(
            f"The step times vary a lot at {names}: the machine seems busy with something else. "
            "Do not trust these medians, nor the speeds that rest on them."
        )
    used = {TORCH_NAMES.get(row.dtype) for row in made}
    for half in report.environment["device"]["half_types"]:
        if half["dtype"] in used and half["native"] is False:
            found.append(f"{half['dtype']} is not native to this device: {half['why']}.")
    return found


def problems(report: Report) -> list[tuple[str, str]]:
    """List where something went wrong, and what; the same at several batch sizes is one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows(report):
        if row.problem:
            found.setdefault((row.label, row.task, row.problem), []).append(str(row.batch))
    return [
        (f"{label} ({task}, batch size {', '.join(batches)})", problem)
        for (label, task, problem), batches in found.items()
    ]
