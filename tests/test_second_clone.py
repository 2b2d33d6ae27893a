"""pytest tests the tree that it stands in, whatever clone the environment's install is of."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHOW = """
import importlib.util, apex
print(apex.__file__)
print(importlib.util.find_spec("amp_C").origin)  # which imports torch
print(importlib.util.find_spec("_apex_command").origin)
"""
OWN_PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}  # as some tests hand on their own
BY = {"python": ["-c", SHOW], "multiproc": ["-m", "apex.parallel.multiproc", "show.py"]}
BY["torchrun"] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "show.py"]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists() or sys.platform == "win32", reason="not in a checkout"
)


@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("python", {}),
        ("python", OWN_PATH),
        pytest.param("multiproc", {}, marks=pytest.mark.slow),
        pytest.param("torchrun", {}, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_a_test_starts_has_this_tree(way, more, tmp_path):
    """In another folder; ranks begin with that of their script, not with the test's."""
    (tmp_path / "show.py").write_text(SHOW)
    done = subprocess.run(
        [sys.executable, *BY[way]], cwd=tmp_path, env={**os.environ, **more}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    files = done.stdout.splitlines()
    assert len(files) == 3, done.stderr
    assert [file for file in files if not pathlib.Path(file).is_relative_to(ROOT / "src")] == []


@pytest.fixture(scope="module")
def clones(tmp_path_factory):
    """Another clone, and the Python of an environment with an editable install of this one."""
    folder = tmp_path_factory.mktemp("clones")
    clone, environment = folder / "another clone", folder / "environment"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", clone / "src", ignore=ignored)
    (clone / "tests").mkdir()
    here = pathlib.Path(__file__).name
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", f"tests/{here}"):
        shutil.copyfile(ROOT / name, clone / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    editable = [ROOT / "src", ROOT / "src/extension_modules"]  # what hatchling writes
    others = sysconfig.get_path("purelib")  # with pytest and torch
    (packages / "_apex.pth").write_text("\n".join(map(str, [*editable, others])))
    return clone, environment / "bin/python"


def run(clones, *words, begin="", **more):
    """Run the tests above in the other clone, from a shell without variables of this suite."""
    clone, python = clones
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    program = f"{begin}\nimport sys, pytest; sys.exit(pytest.main())"
    words = ["-q", "-n0", "-p", "no:cacheprovider", *words, "-k", "this_tree"]
    done = subprocess.run(
        [python, "-c", program, *words], cwd=clone, env={**environment, **more}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_the_environment_is_of_this_clone(clones):
    """Or the tests below would show nothing."""
    clone, python = clones
    words = [python, "-Ic", "import apex; print(apex.__file__)"]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True, check=True)
    assert pathlib.Path(done.stdout.strip()).is_relative_to(ROOT)


def test_another_clone_is_tested_in_its_own_folder(clones):
    """It takes 2 s: a copy of the source, and a process of pytest, which imports torch."""
    code, out = run(clones, "--quick")
    assert (code, "2 passed" in out) == (0, True), out


@pytest.mark.slow
def test_every_way_to_start_a_process_with_another_clones_path_in_the_shell(clones):
    """It takes 6 s, for the imports of torch in the ranks and what starts them."""
    code, out = run(clones, "--full", PYTHONPATH=str(ROOT / "src"))
    assert (code, "4 passed" in out) == (0, True), out


def test_an_apex_that_was_imported_before_from_elsewhere_is_an_error(clones):
    code, out = run(clones, begin="import apex")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"`import apex` gives {ROOT / 'src/apex/__init__.py'}: start pytest in a new " in out
