"""How much of the machine's memory this process has at most: its resident set.

Linux keeps a high-water mark that can be set back; elsewhere there is none that can, and nothing
is measured.
"""

from pathlib import Path

__all__ = ["grown", "resident"]

STATUS = Path("/proc/self/status")
SET_BACK = Path("/proc/self/clear_refs")  # "5": the high-water mark becomes the present size


def resident() -> int | None:
    """Set the high-water mark back and return the resident set in bytes."""
    try:
        SET_BACK.write_text("5")
    except OSError:
        return None
    return _bytes("VmRSS")


def grown(before: int) -> int | None:
    """Return how many bytes above ``before`` the resident set has been since `resident`."""
    most = _bytes("VmHWM")
    return None if most is None else max(0, most - before)


def _bytes(field: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{field}:")), None)
    return None if found is None else 1024 * int(found.split()[1])  # "VmHWM:  12345 kB"
