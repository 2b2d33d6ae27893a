"""``./dev kernels``: what it prints, and its exit code."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("rich")

import apex
from tools.kernels import __main__ as command
from tools.kernels import versions

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
SOURCE = pathlib.Path(apex.__file__).parent.parent
FOUND = {
    "kernel": "norm",
    "variant": "fp16",
    "target": "sm_90",
    "registers": 40,
    "spilled": 0,
    "shared": 128,
    "main_loads": {128: 2, 64: 1},
    "main_stores": None,
    "loads": {128: 2, 64: 1},
    "stores": {},
    "bytes_per_element": 4.5,
    "instructions": {"fma": 4.0, "alu": 3.5},
    "limits": {"H100": "memory", "H200": "alu 1.1"},
    "problems": (),
}

ROW = ["norm", "fp16", "sm_90", "40", "0", "128"]
ROW += ["2×128", "1×64", "2×128", "1×64", "4.5", "7.50"]
ROW += [
    "fma",
    "4.00",
    "alu",
    "3.50",
    "H100",
    "memory,",
    "H200",
    "alu",
    "1.1",
]  # no stores: no columns for them


ALL = """
import json, sys
from tools.kernels.__main__ import main
for words in json.loads(sys.argv[1]):
    print(main(["--json", *words]), flush=True)
"""


def _python(*words, **environment):
    """Run a process of its own."""
    path = {"PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path])}
    words = [sys.executable, "-W", "error", *words]
    environment = os.environ | path | environment
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def _one_line(capsys):
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.count("\n") == 1
    return errors


@pytest.fixture
def found(monkeypatch):
    """Make the inspection find what a test says, without compiling anything."""
    inspection = pytest.importorskip("tools.kernels.finding")

    def put(**changes):
        finding = inspection.Finding(**{**FOUND, **changes})
        monkeypatch.setattr(command, "_inspect", lambda targets, names: [finding])

    return put


@NEEDS_TRITON
@pytest.mark.slow
def test_it_compiles_in_spite_of_the_interpreter_and_what_is_unknown_gets_one_line_and_2():
    """It takes 3 s: a process that imports torch, as this one may interpret kernels."""
    cases = {
        ("--target", "sm90"): "sm90: unknown target; use sm_80, sm_90, sm_100, gfx942 or",
        ("--target", "sm_999"): "sm_999: this triton (",
        ("--target", "gfx999"): "gfx999: unknown target; of AMD there are gfx90a, gfx942",
        ("--kernel", "nonsense"): "--kernel nonsense: unknown; there are ",
        ("--kernel", "swigul"): "--kernel swigul: did you mean 'swiglu'? unknown; there are ",
    }
    words = [("--kernel", "segment_sums"), *cases]
    done = _python("-c", ALL, json.dumps(words), TRITON_INTERPRET="1")
    codes = "0\n" + "2\n" * len(cases)
    assert (done.returncode, done.stdout[-len(codes) :]) == (0, codes), done.stderr
    (line,) = json.loads(done.stdout.removesuffix(codes))["kernels"]
    assert (line["kernel"], line["target"], line["spilled"]) == ("segment_sums", "sm_90", 0)
    assert line["registers"] > 0
    assert line["problems"] == []
    lines = done.stderr.splitlines()
    assert len(lines) == len(cases)
    for said, message in zip(lines, cases.values(), strict=True):
        assert said.startswith(f"./dev kernels: {message}")


@NEEDS_TRITON
def test_a_triton_without_the_compiler_is_named(monkeypatch):
    compiling = pytest.importorskip("tools.kernels.compiler")
    monkeypatch.setattr(compiling, "backends", {})
    compiling.gpu.cache_clear()
    with pytest.raises(compiling.UnavailableError, match="no nvidia compiler for sm_90: pip inst"):
        compiling.gpu("sm_90")
    with pytest.raises(compiling.UnavailableError, match="no amd compiler for gfx942: pip inst"):
        compiling.gpu("gfx942")


def test_the_table(capsys, monkeypatch, found):
    monkeypatch.setenv("COLUMNS", "180")
    found()
    assert command.main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kernel", "variant", "target"] in [words[:3] for words in lines]
    assert ROW in lines


@NEEDS_TRITON
def test_at_the_80_columns_of_a_pipe_no_number_is_cut(capsys, monkeypatch, found):
    monkeypatch.delenv("COLUMNS", raising=False)
    found(kernel="cross_entropy_backward", variant="bf16 bf16 fp32 fp32 writes gradients")
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "Columns left out, too wide: by pipe, all loads, shared" in out


def test_a_problem_is_named_and_the_exit_code_1(capsys, found):
    found(problems=("x_ptr: 8 loads narrower than 128 bits",))
    assert command.main([]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "norm (fp16), sm_90: x_ptr: 8 loads narrower than 128 bits" in out
    assert command.main(["--json"]) == 1
    (line,) = json.loads(capsys.readouterr().out)["kernels"]
    assert line["problems"] == ["x_ptr: 8 loads narrower than 128 bits"]


def test_advice_is_printed_and_the_exit_code_0(capsys, found):
    found(target="sm_75", advice=("advice, as kernels are not made for sm_75: 8 bytes",))
    assert command.main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "norm (fp16), sm_75: advice, as kernels are not made for sm_75: 8 bytes" in out


def test_a_missing_triton_is_one_line_and_2(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main([]) == 2
    assert _one_line(capsys) == "./dev kernels: triton not installed: pip install triton\n"


def test_spills_and_registers_above_the_limit_of_a_kernel_are_named():
    limits, sound = {"norm": 40}, {**FOUND, "registers": 40}
    both = [sound, {**FOUND, "variant": "bf16", "registers": 41, "spilled": 8}]
    row = versions.judged(both, limits, "sm_90")
    spills = "spills 8 bytes, allowed are 0"
    assert (row["kernels"], row["most_registers"]) == (2, 41)
    assert row["spilled_bytes"] == {"norm bf16": 8}
    assert row["above_limits"] == {"norm bf16": f"{spills}, 41 registers, allowed are 40"}
    assert versions.judged(both[:1], limits, "sm_90")["above_limits"] == {}
    assert versions.judged(both, limits, "sm_80")["above_limits"] == {"norm bf16": spills}
    (kernel, most), *_ = versions.SPILLS.items()
    for more, is_above in ((0, False), (1, True)):
        row = versions.judged([{**FOUND, "kernel": kernel, "spilled": most + more}], {}, "sm_80")
        assert bool(row["above_limits"]) == is_above
        assert row["spilled_bytes"] == {f"{kernel} fp16": most + more}


@NEEDS_TRITON
def test_code_is_assembled_by_the_program_that_triton_takes(monkeypatch):
    """3.9 takes the other one for sm_90, too, whose PTX the first one refuses."""
    compiling = pytest.importorskip("tools.kernels.compiler")
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
    known = compiling.triton.knobs.nvidia
    if not hasattr(known, "ptxas_blackwell"):
        pytest.skip("this triton has one program for all")
    monkeypatch.setattr(nvidia, "get_ptxas", lambda architecture: known.ptxas_blackwell)
    assert compiling.assembler(90) == "ptxas-blackwell"
