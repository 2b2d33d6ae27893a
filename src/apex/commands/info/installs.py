"""Whether something else called apex is installed here, and would be imported instead of this one.

Three projects share the name: this one, NVIDIA's Apex, and an unrelated Pyramid package, which
is what ``pip install apex`` fetches from the public index. Programs ask for installed metadata by
name; Python imports the first package called apex on its path. Either may be another project's.
"""

import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import apex

__all__ = ["Found", "Installs", "search"]

OURS = "this project"
NVIDIA = "NVIDIA's Apex"
PYRAMID = "the unrelated Pyramid package of the public index"
UNKNOWN = "an unknown package"

# The entry in pyproject.toml, and the one before it moved.
COMMANDS = ("_apex_command:main", "apex.cli.command_line:main")
FILES = {OURS: "_upstream", NVIDIA: "multi_tensor_apply", PYRAMID: "views.py"}  # of one alone

INSTALL = "install this project (`pip install .` in its folder, or its wheel)"


@dataclass(frozen=True)
class Found:
    """Something called apex: an importable package, or installed metadata, which has a version."""

    project: str
    where: str
    version: str | None = None


@dataclass(frozen=True)
class Installs:
    """What is called apex here; ``shadowed`` says whether a new Python would import another one."""

    running: str
    shadowed: bool
    distributions: tuple[Found, ...]
    packages: tuple[Found, ...]
    """The first is imported."""
    advice: tuple[str, ...]


def search(path: Sequence[str] | None = None) -> Installs:
    """Search an import path for everything called apex.

    Args:
        path: Folders in the order of the search; by default the current folder, where
            ``python -m`` and notebooks look first, and then ``sys.path``.
    """
    entries = [os.path.realpath(entry) for entry in path or [os.curdir, *sys.path]]
    running = str(Path(apex.__file__).resolve().parent)
    found = importlib.metadata.distributions(name="apex", path=entries)
    distributions = tuple(dict.fromkeys(map(_distribution, found)))
    packages = tuple(dict.fromkeys(_packages(entries)))
    shadowed = bool(packages) and packages[0].where != running
    advice = (*_package_advice(packages, running), *_distribution_advice(distributions))
    return Installs(running, shadowed, distributions, packages, advice)


def _distribution(item: importlib.metadata.Distribution) -> Found:
    def field(name: str) -> str:
        return " ".join(item.metadata.get_all(name) or ())

    where = str(Path(str(item.locate_file(""))).resolve())
    try:
        words = f"{field('Summary')} {field('Author')} {item.requires or ''}".lower()
        version, ours = field("Version"), any(e.value in COMMANDS for e in item.entry_points)
    except (AttributeError, OSError, TypeError):  # half removed: older Pythons take it amiss
        version, words, ours = "", "", False
    known = (
        OURS if ours else PYRAMID if "pyramid" in words else NVIDIA if "nvidia" in words else None
    )
    return Found(known or UNKNOWN, where, version or "of unknown version")


def _packages(entries: Sequence[str]) -> Iterator[Found]:
    for entry in entries:
        spec = importlib.machinery.PathFinder.find_spec("apex", [entry])
        if spec is None or spec.origin is None:  # a folder without __init__ shadows nothing
            continue
        where = Path(spec.origin).resolve()
        folder = where.parent if spec.submodule_search_locations is not None else where
        known = (project for project, file in FILES.items() if (folder / file).exists())
        yield Found(next(known, UNKNOWN), str(folder))


def _package_advice(packages: Iterable[Found], running: str) -> Iterator[str]:
    for number, package in enumerate(packages):
        if package.where == running:
            continue
        remedy = "is installed, too; Python imports this one. Uninstall it if you do not use it"
        if number == 0:
            remedy = (
                "is imported instead of this one if Python starts in this folder: start Python "
                "elsewhere, or rename it, uninstall it, or remove it from PYTHONPATH"
            )
        yield f"{package.where} ({package.project}) {remedy}"


def _distribution_advice(distributions: Sequence[Found]) -> Iterator[str]:
    for found in distributions:
        if found.project != OURS:
            yield (
                f"{found.where} holds the metadata of {found.project} {found.version}: `pip "
                f"uninstall apex` until nothing is left, then {INSTALL}"
            )
    if not distributions:
        yield f"programs that check whether apex is installed do not find it: {INSTALL}"
    elif distributions[0].project == OURS and distributions[0].version != apex.__version__:
        words = f"the metadata says {distributions[0].version} but the code is {apex.__version__}"
        yield f"{words}: {INSTALL} again"
