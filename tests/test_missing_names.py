"""Names of Apex that are missing: what the errors say, and that the table is true."""

import importlib
import importlib.util
import json
import pathlib
import pickle
import re
import subprocess
import sys

import pytest
import torch

import apex
import apex.contrib.multihead_attn
import apex.contrib.optimizers
from apex import _missing
from apex._compat import IS_2_13

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
SURFACE = ROOT.parent / "shared" / "spec" / "surface.json"  # not everywhere
SECTIONS = {"Not yet": _missing.NOT_YET, "Out of scope": _missing.OUT_OF_SCOPE}
TABLE = {**_missing.NOT_YET, **_missing.OUT_OF_SCOPE}

FMHA = (
    f"apex.contrib.fmha is not in apex {apex.__version__} yet; "
    "use torch.nn.attention.varlen.varlen_attn (torch 2.9 lacks it)"
)
PYPROF = f"apex.pyprof is not in apex {apex.__version__}; use torch.profiler"


def error_of(statement):
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {"apex": apex})
    return caught.value


@pytest.mark.parametrize("name", TABLE)
def test_a_name_of_the_table_is_missing(name):
    """Remove the line of a name that has arrived."""
    owner, _, last = name.rpartition(".")
    assert importlib.util.find_spec(name) is None  # an error if its package is missing
    assert not hasattr(importlib.import_module(owner), last)


def test_no_name_is_in_both_parts():
    assert len(TABLE) == len(_missing.NOT_YET) + len(_missing.OUT_OF_SCOPE)


@pytest.mark.parametrize("name", TABLE)
def test_every_import_explains(name):
    owner, _, last = name.rpartition(".")
    plain, member = error_of(f"import {name}"), error_of(f"from {owner} import {last}")
    assert (type(plain), plain.name) == (ModuleNotFoundError, name)
    assert (type(member), member.name) == (ImportError, owner)  # the same class as Python's
    assert str(plain) == str(member)
    assert str(plain).startswith(f"{name} is not in apex {apex.__version__}")
    assert str(plain).endswith(f"; use {TABLE[name]}")


@pytest.mark.parametrize("name", TABLE)
def test_every_attribute_explains(name):
    assert type(error_of(name)) is AttributeError
    assert str(error_of(name)) == str(error_of(f"import {name}"))


def test_the_whole_text():
    assert str(error_of("import apex.contrib.fmha")) == FMHA
    assert str(error_of("import apex.pyprof")) == PYPROF


@pytest.mark.parametrize(
    "statement",
    [
        "import apex.contrib.fmha.models",
        "from apex.contrib.fmha import LSTM",
        "from apex.contrib.fmha.models import LSTM as Other",
        "__import__('importlib').import_module('.fmha', 'apex.contrib')",
        "__import__('importlib').import_module('apex.contrib.fmha.models')",
        "__import__('importlib.util').util.find_spec('apex.contrib.fmha.a')",  # imports the parent
    ],
)
def test_what_is_inside_a_missing_package(statement):
    error = error_of(statement)
    assert (type(error), error.name, str(error)) == (
        ModuleNotFoundError,
        "apex.contrib.fmha",
        FMHA,
    )


@pytest.mark.parametrize(
    ("statement", "use"),
    [
        ("import apex.pyprof.nvtx", "torch.profiler"),
        ("from apex.pyprof import nvtx", "torch.profiler"),
        ("from apex.pyprof.parse.parse import main", "torch.profiler"),
        ("from apex.amp.utils import cached_cast", "torch.autocast"),
        ("from apex.amp.rnn_compat import RNN_NAMES", "torch.autocast"),
        ("import apex.contrib.gpu_direct_storage.gds", "torch.cuda.gds"),
        ("from apex.distributed_testing import distributed_test_base", "torch.multiprocessing"),
    ],
)
def test_what_is_gone_for_good_names_the_modern_tool(statement, use):
    error = error_of(statement)
    assert type(error) is ModuleNotFoundError
    assert "; use " in str(error)
    assert " yet" not in str(error)
    assert use in str(error)


@pytest.mark.parametrize(
    ("statement", "use"),
    [
        ("from apex import pyprof", "torch.profiler"),
        ("apex.pyprof.nvtx.init()", "torch.profiler"),
        ("apex.amp.enable(verbose=True)", "apex.amp.init"),
        ("from apex.amp import register_half", "apex.amp.register_half_function"),
    ],
)
def test_what_is_gone_for_good_as_a_name(statement, use):
    assert str(error_of(statement)).endswith(f"is not in apex {apex.__version__}; use {use}")


def test_what_is_gone_for_good_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "apex.pyprof.parse", "net.sql"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert PYPROF in done.stderr


def test_among_others_that_exist():
    assert "register_half is not" in str(error_of("from apex.amp import initialize, register_half"))
    assert "fmha is not" in str(error_of("from apex.contrib import xentropy, fmha"))


def test_pickles_of_missing_classes():
    with pytest.raises(
        ModuleNotFoundError, match="apex.contrib.fmha is not in apex .* use torch.nn.attention"
    ):
        pickle.loads(b"capex.contrib.fmha.fmha\nFMHA\n.")


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("import apex.nonsense", "No module named 'apex.nonsense'"),
        ("import apex.optimizers.nonsense", "No module named 'apex.optimizers.nonsense'"),
        (
            "from apex.parallel import Nonsense",
            "cannot import name 'Nonsense' from 'apex.parallel'",
        ),
        ("apex.nonsense", "module 'apex' has no attribute 'nonsense'"),
        ("apex.contrib.nonsense", "module 'apex.contrib' has no attribute 'nonsense'"),
        ("import mlp_cuda_nonsense", "No module named 'mlp_cuda_nonsense'"),
        ("import fused_adam_cuda", "No module named 'fused_adam_cuda'"),  # see _missing
    ],
)
def test_other_names_have_pythons_own_errors(statement, text):
    assert str(error_of(statement)).startswith(text)
    assert "is not in apex" not in str(error_of(statement))


def test_the_finder_is_installed_once_and_last():
    """In a new process, because the import system of this one serves the other tests."""
    probe = """
import importlib, sys
before = list(sys.meta_path)
import apex
assert sys.meta_path == [*before, apex._missing.MissingNames]
importlib.reload(apex)
for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
    del sys.modules[name]
try:
    import nonsense
except ModuleNotFoundError:
    assert "apex" not in sys.modules  # the finder has looked at the name alone
try:
    import apex.contrib.fmha
except ModuleNotFoundError as error:
    assert "varlen_attn" in str(error)
assert len(sys.meta_path) == len(before) + 1
"""
    subprocess.run([sys.executable, "-c", probe], check=True)


TORCH_NAMES = sorted({name for use in TABLE.values() for name in re.findall(r"torch\.[\w.]+", use)})


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_what_to_use_is_in_torch(name):
    if name.startswith("torch.nn.attention.varlen") and not IS_2_13:
        pytest.skip("torch 2.13 has this name, 2.9 has not")
    found, done = torch, "torch"
    for part in name.split(".")[1:]:
        done = f"{done}.{part}"
        if not hasattr(found, part):
            importlib.import_module(done)
        found = getattr(found, part)


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")
@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_the_same_table(section):
    _, _, after = PAGE.read_text().partition(f"\n## {section}\n")
    rows = re.findall(r"^\| (`apex.+?) \| (.+) \|$", after.partition("\n## ")[0], re.MULTILINE)
    uses = {name: use.replace("`", "") for names, use in rows for name in names.split(", ")}
    assert {name.strip("`"): use for name, use in uses.items()} == SECTIONS[section]


@pytest.mark.skipif(not SURFACE.exists(), reason="the list of Apex's names is not here")
def test_every_name_of_apex_is_here_or_in_the_table():
    unexplained = []
    for entry in json.loads(SURFACE.read_text())["entries"]:
        path = entry["path"]
        if path.startswith("apex.") and not any(
            f"{path}.".startswith(f"{name}.") for name in TABLE
        ):
            module = importlib.import_module(entry["module"])
            name = entry["name"].partition(".")[0]  # of a class; its methods have tests elsewhere
            if name and not hasattr(module, name):
                unexplained.append(path)
    assert unexplained == []
