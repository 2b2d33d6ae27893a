"""Where the modules are in what is installed."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
MODULES = {file.name for file in (ROOT / "src/extension_modules").glob("*.py")}


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not in a checkout")
def test_the_wheel_has_them_at_the_top(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name for name in names if "/" not in name}
    assert {"amp_C.py", "apex_C.py"} <= MODULES == top
    folders = {name.partition("/")[0] for name in set(names) - top if "dist-info" not in name}
    public = {name.removesuffix(".py") for name in MODULES if not name.startswith("_")}
    assert folders == {"apex", *(f"{name}-stubs" for name in public)}
