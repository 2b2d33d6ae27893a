"""Sets up and runs the clients: unmodified packages, each in an environment of its own.

A client is a folder here with ``requirements.txt``, every version in it pinned, and ``checks.py``,
a pytest file. The first paragraph of the requirements is what is run, each with the day on which
the package index received it. The client's virtual environment, ``.clients/<name>``, holds those
packages and the wheel that is built from this tree, never the tree itself.
"""

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
SECONDS = 300  # for one client's checks; they take 5 to 40 on one core
PACKAGE = re.compile(r"([\w.-]+)==([\w.]+)  # (\d{4}-\d\d-\d\d)")


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
    def versions(self):
        """What is run, as in ``timm 1.0.31 (2026-11-03)``: without torch, and torch."""
        lines = self.requirements.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        found = [PACKAGE.fullmatch(line).expand(r"\1 \2 (\3)") for line in lines]
        torch = next(one for one in found if one.startswith("torch "))
        return ", ".join(one for one in found if one != torch), torch

    @property
    def stamp(self):
        return self.environment / "stamp"

    @property
    def inputs(self):
        """What the environment is made from."""
        lines = self.requirements.read_text(encoding="utf-8").splitlines()
        without_comments = [line.partition("#")[0].strip() for line in lines]
        requirements = "\n".join(filter(None, without_comments))
        return f"{requirements}\n{sys.version}\n{platform.machine()}\n{self.environment}"

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
    """Whether the set-up has ended, for these requirements, this Python and this place."""
    return client.stamp.exists() and client.stamp.read_text(encoding="utf-8") == client.inputs


def set_up(client):
    """Make the client's environment, unless it fits already.

    The stamp goes first and is written last, so a set-up that was killed begins anew.

    Raises:
        SetUpError: The environment cannot be made.
    """
    if is_set_up(client):
        return
    client.stamp.unlink(missing_ok=True)
    _must_run([sys.executable, "-m", "venv", "--clear", "--without-pip", client.environment])
    pins = client.requirements
    torch = re.search(r"^torch==[\w.]+", pins.read_text(encoding="utf-8"), re.MULTILINE)
    # torch with what its build needs: CUDA libraries on some machines. The rest as it is listed:
    # pip is never free to choose another torch.
    _pip(client, "--constraint", pins, torch[0])
    _pip(client, "--no-deps", "--requirement", pins)
    client.stamp.write_text(client.inputs, encoding="utf-8")


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
    # One process imports a part of it, and keeps no bytecode: to compile all takes a second.
    _pip(client, "--no-deps", "--force-reinstall", "--no-compile", wheel)
    started = time.monotonic()
    # -I: neither PYTHONPATH nor this folder is on the path. -B: no bytecode beside the checks.
    words = [client.python, "-IB", HERE / "inside.py", client.folder / "checks.py"]
    with tempfile.TemporaryDirectory() as home:
        # Caches and settings of the packages are in the user's home; nothing is downloaded.
        own = {"HOME": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run(
                words, cwd=home, env={**os.environ, **own}, timeout=seconds, check=False, **streams
            )
            code, output = done.returncode, done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as late:
            code, output = None, (late.stdout or b"").decode(errors="replace")
            output += f"\n{client.name}: stopped after {seconds} s\n"
    last = output.strip().rpartition("\n")[2]
    # Skipped checks are not passed: their number would be in the line too.
    counted = re.fullmatch(r"(\d+) passed(, \d+ warnings?)? in .+", last)
    checks = int(counted[1]) if counted else 0
    passed = code == 0 and counted is not None
    return Result(client.name, passed, checks, time.monotonic() - started, output)


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
