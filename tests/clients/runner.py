"""Sets up and runs the clients: unmodified packages, each in an environment of its own.

A client is a folder here with ``requirements.txt``, every version in it pinned, and ``checks.py``,
a pytest file. Its virtual environment, ``.clients/<name>``, holds those packages and the wheel that
is built from this tree, never the tree itself.
"""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SECONDS = 300  # for one client's checks; they take 5 to 15 on one core


class SetUpError(Exception):
    """An environment or the wheel cannot be made; the message is one line for the user."""


@dataclass(frozen=True)
class Client:
    """A folder with a client's files, and the place of its environment."""

    folder: Path
    environment: Path

    @property
    def name(self):
        return self.folder.name

    @property
    def requirements(self):
        return self.folder / "requirements.txt"

    @property
    def python(self):
        where = "Scripts/python.exe" if os.name == "nt" else "bin/python"
        return self.environment / where


@dataclass(frozen=True)
class Result:
    """How a client's checks went: ``passed`` if all did, ``checks`` of them."""

    name: str
    passed: bool
    checks: int
    seconds: float
    output: str

    def __str__(self):
        word = "passed" if self.passed else "FAILED"
        return f"{self.name:<14} {word}   {self.checks:>2} checks passed   {self.seconds:5.1f} s"


def clients():
    """Return all clients by name."""
    found = sorted(file.parent for file in HERE.glob("*/requirements.txt"))
    return {folder.name: Client(folder, ROOT / ".clients" / folder.name) for folder in found}


def is_set_up(client):
    """Tell whether a set-up has ended, for these requirements, this Python and this place."""
    try:
        return _stamp_file(client).read_text(encoding="utf-8") == _stamp(client)
    except FileNotFoundError:
        return False


def set_up(client):
    """Make the client's environment, unless it fits already.

    The stamp goes first and is written last, so a set-up that was killed begins anew.

    Raises:
        SetUpError: The environment cannot be made.
    """
    if is_set_up(client):
        return
    with _alone(client):
        if is_set_up(client):  # another run has just done it
            return
        _stamp_file(client).unlink(missing_ok=True)
        _must_run([sys.executable, "-m", "venv", "--clear", "--without-pip", client.environment])
        pins = client.requirements
        # torch with what its build needs: CUDA libraries on some machines. The rest as it is
        # listed: pip is never free to choose another torch.
        _pip(client, "--constraint", pins, _pin(pins, "torch"))
        _pip(client, "--no-deps", "--requirement", pins)
        _stamp_file(client).write_text(_stamp(client), encoding="utf-8")


def build_wheel(folder):
    """Build the wheel of this tree into a folder.

    Raises:
        SetUpError: The tree cannot be built.
    """
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    _must_run([sys.executable, *words])
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def run(client, wheel, seconds=SECONDS):
    """Install the wheel into the client's environment and run its checks there.

    Raises:
        SetUpError: The wheel cannot be installed.
    """
    with _alone(client), tempfile.TemporaryDirectory() as home:
        _pip(client, "--no-deps", "--force-reinstall", wheel)
        # Caches and settings of the packages are in the user's home; nothing is downloaded.
        own = {"HOME": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        started = time.monotonic()
        # -I: neither PYTHONPATH nor this folder is on the path. -B: no bytecode beside the checks.
        words = [client.python, "-IB", HERE / "inside.py", client.folder / "checks.py"]
        try:
            done = subprocess.run(
                words, cwd=home, env={**os.environ, **own}, timeout=seconds, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            code, output = done.returncode, done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as late:
            code, output = None, (late.stdout or b"").decode(errors="replace")
            output += f"\n{client.name}: stopped after {seconds} s\n"
        took = time.monotonic() - started
    last = output.strip().rpartition("\n")[2]
    # Skipped checks are not passed: their number would be in the line too.
    only_passed = re.fullmatch(r"(\d+) passed(, \d+ warnings?)? in .+", last)
    counted = re.search(r"(\d+) passed", last)
    return Result(
        name=client.name,
        passed=code == 0 and only_passed is not None,
        checks=int(counted[1]) if counted else 0,
        seconds=took,
        output=output,
    )


def _stamp_file(client):
    return client.environment / "stamp"


def _stamp(client):
    parts = [
        client.requirements.read_text(encoding="utf-8"),
        sys.version,
        platform.machine(),
        str(client.environment),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _pin(requirements, name):
    text = requirements.read_text(encoding="utf-8")
    pin = re.search(rf"^{name}==[\w.]+", text, re.MULTILINE)
    if pin is None:
        raise SetUpError(f"{requirements} has no line {name}==VERSION")
    return pin.group()


def _pip(client, *words):
    """Install into a client's environment with the pip of this one."""
    pip = [sys.executable, "-m", "pip", "--python", client.python, "--disable-pip-version-check"]
    _must_run([*pip, "install", "--no-input", "--quiet", *words])


def _must_run(words):
    """Run a program to its end; what it said is the error if it fails."""
    words = [str(word) for word in words]
    done = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or ["no reason given"]
        error = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
        raise SetUpError(f"{' '.join(words[1:])}: {error}")


@contextlib.contextmanager
def _alone(client):
    """Keep other runs out of a client's environment; they wait. Windows goes without."""
    client.environment.parent.mkdir(exist_ok=True)
    with client.environment.with_suffix(".lock").open("w") as lock:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
