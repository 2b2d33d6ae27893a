"""The wheel, installed where nothing is but torch and what torch needs."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists() or sys.platform == "win32", reason="not in a checkout"
)

PROGRAM = """
import amp_C, fused_layer_norm_cuda, torch
from apex import amp
from apex.optimizers import FusedAdam
model = torch.nn.Linear(8, 8)
optimizer = FusedAdam(model.parameters())
model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
for _ in range(3):
    loss = model(torch.ones(4, 8)).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
print(loss.item() < 1e9)
from apex.commands import command_line as cli
from apex.commands.info import speeds
speeds.SIZES, speeds.SECONDS = {"cpu": (8, 1)}, 0
print(cli.main(["info"]))
"""


PACKAGES = """
RNN _compat _upstream amp catalogue commands contrib debug fp16_utils fused_dense hub kernels mlp
multi_tensor_apply normalization ops optimizers parallel patching reparameterization transformer
"""  # by name: a folder that pyproject.toml has forgotten is left out without a word


def _needed(name, found):
    """Put the distribution and what it requires, without extras, into ``found``."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return
    try:
        found[key] = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # for another system
        return
    for line in found[key].requires or ():
        if "extra ==" not in line and key not in ("triton",):
            _needed(re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0], found)


@pytest.fixture(scope="module")
def python(wheel, once, tmp_path_factory):
    """The Python of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("bare")
    return pathlib.Path(once("bare", lambda: str(_environment(wheel, folder))))


def _environment(wheel, folder):
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    found = {}
    _needed("torch", found)
    found.pop("triton", None)
    entries = set()  # modules and folders; several distributions have parts in "nvidia"
    for distribution in found.values():
        top = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
        entries |= {pathlib.Path(distribution.locate_file(name)) for name in top - {"__pycache__"}}
    for entry in entries:
        (packages / entry.name).symlink_to(entry)
    path = folder / "env/bin/python"
    words = [sys.executable, "-m", "pip", "--python", path, "install", "--quiet", "--no-deps"]
    words += ["--no-compile", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(words, check=True)
    return path


def _run(*words):
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd="/")
    return done.returncode, done.stdout, done.stderr


def _install_lines():
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^    pip install (\S+)", text.partition("## Install")[2], re.MULTILINE)[:3]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a clone")
@pytest.mark.parametrize("line", _install_lines(), ids=["folder", "git", "wheel"])
def test_an_install_line_of_readme_works_without_a_network(line, wheel, tmp_path):
    """They take 4 to 6 s: git's clone, pip's build and a process of Python each."""
    if line.endswith(".whl"):
        assert line == wheel.name
        place = str(wheel)
    else:
        place = {".": str(ROOT)}.get(line) or f"git+file://{ROOT}"
        assert line in (".", "git+file:///path/of/the/clone")
    words = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    words += ["--quiet", "--no-index", "--disable-pip-version-check", "--target", tmp_path, place]
    # git refuses a clone that belongs to somebody else, as in some containers
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    subprocess.run(words, check=True, env={**os.environ, **git})
    program = "import apex, amp_C; print(apex.__file__); import apex.commands, apex.optimizers"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, check=True, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert pathlib.Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_modules_of_compiled_apex_are_at_the_top(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name for name in names if "/" not in name}
    modules = {file.name for file in (ROOT / "src/extension_modules").glob("*.py")}
    assert {"amp_C.py", "apex_C.py"} <= modules == top
    folders = {name.partition("/")[0] for name in set(names) - top if "dist-info" not in name}
    public = {name.removesuffix(".py") for name in modules if not name.startswith("_")}
    assert folders == {"apex", *(f"{name}-stubs" for name in public)}


def test_all_packages_are_in_it_and_no_tools_of_developers(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    ours = [name for name in names if name.startswith("apex/") and name.endswith(".py")]
    assert {name.split("/")[1] for name in ours if name.count("/") > 1} == {*PACKAGES.split()}
    files = {file.relative_to(ROOT / "src").as_posix() for file in ROOT.glob("src/apex/**/*.py")}
    assert set(ours) == files
    assert [name for name in ours if "inspect" in name or "/cases/" in name] == []


def test_it_trains_says_what_is_there_and_warns_of_nothing(python):
    """It takes 4 s: the wheel, its environment, and a process that imports torch."""
    ignored = "ignore:Failed to initialize NumPy:UserWarning"  # torch's own, of the missing NumPy
    code, out, errors = _run(python, "-W", "error", "-W", ignored, "-c", PROGRAM)
    assert (code, errors) == (0, "")
    assert out.startswith("True\n")
    assert out.endswith("\n0\n")
    assert str(python.parent.parent) in out


@pytest.mark.slow
def test_what_an_extra_brings_is_one_line(python):
    """It takes 2 s: the installed command imports torch."""
    code, out, errors = _run(python.parent / "apex", "bench", "--quick")
    assert (code, out) == (2, "")
    assert errors.startswith("apex bench: ")
    assert " not installed: pip install " in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_the_self_test_starts_processes_where_numpy_is_missing(python, tmp_path):
    """It takes 4 s: the command and its process import torch, which warns without the filter."""
    words = ["--only", "rms norm, bf16, forward", "--json", tmp_path / "f.json"]
    code, out, errors = _run(python.parent / "apex", "selftest", *words)
    assert (code, "Warning" in errors) == (0, False), errors
    assert "2 checks in" in out


def test_ctrl_c_during_the_imports_is_one_line(capsys, monkeypatch):
    import _apex_command

    class Interrupted:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "apex.commands.command_line":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "apex.commands.command_line", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert _apex_command.main() == 130
    assert capsys.readouterr().err == "apex: interrupted\n"
