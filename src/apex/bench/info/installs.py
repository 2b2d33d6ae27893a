"""Whether something else called apex is installed here, and would be imported in our place.

Three projects share the name: this one, NVIDIA's Apex, and an unrelated Pyramid package, which
is what ``pip install apex`` fetches from the public index. Two questions, answered apart: which
distributions called apex have metadata here (programs ask for it by name), and which ``apex``
packages does the import path hold, in which order.
"""

import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import apex

__all__ = ["Distribution", "Installs", "Package", "look"]

OURS = "this project"
NVIDIA = "NVIDIA's Apex"
PYRAMID = "the unrelated Pyramid package of the public index"
UNKNOWN = "an unknown package"

COMMANDS = ("_apex_command:main", "apex.bench.cli:main")  # in pyproject.toml; before it moved

INSTALL = "install this project (`pip install .` in its folder, or its wheel)"


@dataclass(frozen=True)
class Distribution:
    """Installed metadata called apex."""

    version: str
    project: str
    where: str


@dataclass(frozen=True)
class Package:
    """An importable package called apex; ``wins`` says whether a new Python here would take it."""

    project: str
    where: str
    wins: bool


@dataclass(frozen=True)
class Installs:
    """What is called apex here; ``shadowed`` says whether another package would be imported."""

    running: str
    shadowed: bool
    distributions: tuple[Distribution, ...]
    packages: tuple[Package, ...]
    advice: tuple[str, ...]


def look(path: Sequence[str] | None = None) -> Installs:
    """Search an import path for everything called apex.

    Args:
        path: Folders in the order of the search; by default the current folder, where
            ``python -m`` and notebooks look first, and then ``sys.path``.
    """
    entries = [os.curdir, *sys.path] if path is None else list(path)
    running = Path(apex.__file__).resolve().parent
    distributions = _distributions(entries)
    packages = _packages(entries)
    others = [package for package in packages if Path(package.where) != running]
    shadowed = any(package.wins for package in others)
    return Installs(
        running=str(running),
        shadowed=shadowed,
        distributions=tuple(distributions),
        packages=tuple(packages),
        advice=(*_package_advice(others), *_distribution_advice(distributions)),
    )


def _distributions(entries: Sequence[str]) -> list[Distribution]:
    found = [
        _described(item)
        for entry in _unique(entries)
        for item in importlib.metadata.distributions(name="apex", path=[entry])
    ]
    return list(dict.fromkeys(found))


def _described(item: importlib.metadata.Distribution) -> Distribution:
    where = str(Path(str(item.locate_file(""))).resolve())
    try:
        version, project = _field(item, "Version"), _project_of(item)
    except (AttributeError, OSError, TypeError):  # half removed: older Pythons take it amiss
        version, project = "", UNKNOWN
    return Distribution(version or "of unknown version", project, where)


def _project_of(item: importlib.metadata.Distribution) -> str:
    """Tell the three projects apart by what only one of them declares."""
    if any(entry.value in COMMANDS for entry in item.entry_points):
        return OURS
    words = " ".join([_field(item, "Summary"), _field(item, "Author"), *(item.requires or ())])
    if "pyramid" in words.lower():
        return PYRAMID
    if "nvidia" in words.lower():
        return NVIDIA
    return UNKNOWN


def _field(item: importlib.metadata.Distribution, name: str) -> str:
    return " ".join(item.metadata.get_all(name) or ())


def _packages(entries: Sequence[str]) -> list[Package]:
    found: list[Package] = []
    for entry in _unique(entries):
        spec = importlib.machinery.PathFinder.find_spec("apex", [entry])
        if spec is None or spec.origin is None:  # a folder without __init__ shadows nothing
            continue
        where = Path(spec.origin).resolve()
        folder = where.parent if spec.submodule_search_locations is not None else where
        if str(folder) not in [package.where for package in found]:
            found.append(Package(_project_in(folder), str(folder), wins=not found))
    return found


def _project_in(folder: Path) -> str:
    """Tell whose package a folder holds by files that only one project has."""
    if (folder / "bench" / "cli.py").is_file():
        return OURS
    if (folder / "multi_tensor_apply").is_dir():
        return NVIDIA
    if (folder / "models.py").is_file() and (folder / "views.py").is_file():
        return PYRAMID
    return UNKNOWN


def _package_advice(others: Iterable[Package]) -> list[str]:
    return [
        f"{other.where} ({other.project}) "
        + (
            "is imported instead of this one if Python starts in this folder: start Python "
            "elsewhere, or rename it, uninstall it, or remove it from PYTHONPATH"
            if other.wins
            else "could be imported, too, but this one comes first: uninstall it if you do not "
            "need it"
        )
        for other in others
    ]


def _distribution_advice(distributions: Sequence[Distribution]) -> list[str]:
    advice = [
        f"{found.where} holds the metadata of {found.project} {found.version}: `pip uninstall "
        f"apex` until nothing is left, then {INSTALL}"
        for found in distributions
        if found.project != OURS
    ]
    if not distributions:
        advice.append(f"programs that check whether apex is installed do not find it: {INSTALL}")
    elif distributions[0].project == OURS and distributions[0].version != apex.__version__:
        advice.append(
            f"the metadata says {distributions[0].version} but the code is {apex.__version__}: "
            f"{INSTALL} again"
        )
    return advice


def _unique(entries: Iterable[str]) -> list[str]:
    """Resolve the folders and drop repetitions and what cannot be a folder."""
    return list(dict.fromkeys(os.path.realpath(entry) for entry in entries))
