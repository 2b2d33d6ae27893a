"""What has to be said beside the numbers of a report, in the terminal, on plots and on the page."""

from typing import Any

from apex.bench.training.results import Report
from apex.bench.training.rows import Row, rows

__all__ = ["SHARED", "largest_said", "marks", "notices", "problems", "source"]

SHARED = (
    "A quick run trains all seeds of a level in one process, so its intervals leave out what "
    "differs from process to process: levels with the same arithmetic can seem to differ in speed. "
    "Without --quick each training has a process of its own."
)
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
        found.append("QUICK: less data, and one process for all trainings of a level")
    if _unsteady(rows(report)):
        found.append("BUSY MACHINE: times vary a lot")
    return found


def _unsteady(of: list[Row]) -> list[Row]:
    """Rows whose steps take twice their median now and then."""
    return [row for row in of if row.ms_median and (row.ms_p90 or 0) > 2 * row.ms_median]


def largest_said(found: dict[str, Any]) -> str:
    """Say what ``--batch max`` found of a level."""
    said = f"{found['task']}, {found['level']}: the largest batch that fits into "
    said += f"{found['limit_bytes'] / 2**20:,.0f} MiB is {found['batch']}"
    return f"{said}, where the search ended: {found['error']}" if found.get("error") else said


def notices(report: Report) -> list[str]:
    """Say where a time does not mean what it seems to mean."""
    made = rows(report)
    found = [SHARED] if report.quick else []
    noisy = _unsteady(made)
    if noisy:
        batches: dict[tuple[str, str], list[str]] = {}
        for row in noisy:
            batches.setdefault((row.label, row.task), []).append(str(row.batch))
        names = ", ".join(
            f"{label} ({task}, batch size {', '.join(sizes)})"
            for (label, task), sizes in batches.items()
        )
        found.append(
            f"The step times vary a lot at {names}: the machine seems busy with something else. "
            "Do not trust these medians, nor the speeds computed from them."
        )
    used = {TORCH_NAMES.get(row.dtype) for row in made}
    for half in report.environment["device"]["half_types"]:
        if half["dtype"] in used and half["native"] is False:
            found.append(f"{half['dtype']} is not native to this device ({half['why']}).")
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
