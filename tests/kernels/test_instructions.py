"""Instructions by pipe: what is counted, and a budget for each case."""

import json
import pathlib
import sys

import pytest

pytest.importorskip("triton")

import triton

from tests.kernels.test_compiled import compiled
from tools.kernels import finding
from tools.kernels.instructions import RATES, Counts, Instruction, counted, limits

# Case -> thread instructions for each byte on sm_90, as measured; record.py writes it.
BUDGETS = pathlib.Path(__file__).with_name("instructions.json")
# Releases of Triton differ by a few per cent; one more instruction for every five is seen.
MORE = 1.15
# Where 3.5 needs more than that, as measured.
TRITON_3_5 = {
    "axpby fp32 fp32 fp32": 1.04,
    "group_norm moments bf16 1000 channels": 5.53,
    "scale fp32 bf16": 1.1,
    "scale fp32 fp32": 0.75,
    "scale fp32 fp32 norms": 0.95,
    "scale bf16 fp32 unscale": 1.96,
    "scale fp32 unscale": 0.83,
}
TRITON_3_5 |= {
    f"layer_norm add up {columns} {kind} {kind} {kind}{more}": 1.06
    for kind in ("fp32", "bf16")
    for columns, more in ((1000, ""), (8192, ""), (16384, ""), (4096, " from output"))
}


def _sums(found):
    return {
        f"{line['kernel']} {line['variant']}": round(sum(line["instructions"].values()), 2)
        for line in found
        if line["instructions"] is not None
    }


def _above(found, budgets):
    return {case: number for case, number in found.items() if number > MORE * budgets.get(case, 0)}


@pytest.mark.slow
def test_no_case_has_more_instructions_than_its_budget(hopper):
    """A new case has none: write the file anew, and look at what changed."""
    found = _sums(hopper)
    assert len(found) > 150
    others = TRITON_3_5 if triton.__version__.startswith("3.5.") else {}
    assert _above(found, json.loads(BUDGETS.read_text()) | others) == {}


@pytest.mark.slow
def test_a_fifth_more_instructions_is_seen(planted):
    names = ("sound row", "row with a fifth more")
    sound, more = (planted[name]["instructions"] for name in names)
    assert 1.15 * sound < more < 1.4 * sound


def test_goals():
    """What a H100 has time for, and less for three."""
    for case, number in json.loads(BUDGETS.read_text()).items():
        kernel, _, words = case.partition(" ")
        goal = {"scaled_softmax": 8, "group_norm": 5.5}.get(kernel, RATES["H100"].issue)
        goal = 6.5 if kernel.startswith("cross_entropy") else goal
        if not (
            kernel == "focal_loss"
            or (kernel in ("sgd", "muon_move") and "stochastic" in words)
            or " odd " in f" {words}"  # an access for each element
        ):
            assert number <= goal, case


# --- the counter ------------------------------------------------------------------------------


def code(text):
    """Instructions of 16 bytes each; ``@`` is a predicate, ``> 3`` a jump to instruction 3."""
    found = []
    for number, line in enumerate(text.split(";")):
        name, _, target = line.strip().partition(" > ")
        jump = int(target) * 16 if target else None
        found.append(Instruction(number * 16, name[0] == "@", name.lstrip("@"), jump))
    return found


def test_a_path_without_wide_accesses_and_one_with_a_call_are_not_the_fast_one():
    masked = "@BRA > 6; LDG.E.128; FADD; MUFU.EX2; STG.E.128; EXIT; @LDG.E.U16; @STG.E.U16; EXIT"
    (count,) = counted(code(masked), 128)
    assert count == Counts(
        {"other": 2, "lsu": 2, "fma": 1, "mufu": 1}, loaded=128, stored=128, looped=False
    )
    slow = "LDG.E.128; @BRA > 4; MOV; CALL.REL.NOINC; FADD; IMAD.MOV.U32; EXIT"
    (count,) = counted(code(slow), 128)
    assert count.pipes == {"lsu": 1, "other": 2, "fma": 1, "imad": 1}


def test_loops_that_move_tiles_are_counted_once_around():
    (one, two) = counted(
        code(
            "S2R; LDG.E.128; FMNMX; @BRA > 1; ISETP.NE.AND; @BRA > 4;"
            "LDG.E.LTC128B.128; FFMA; FFMA; STG.E.128; @BRA > 6; EXIT"
        ),
        128,
    )
    assert sorted([one.stored, two.stored]) == [0, 128]
    first, second = sorted([one, two], key=lambda count: count.stored)
    assert first == Counts({"lsu": 1, "alu": 1, "other": 1}, 128, 0, True)
    assert second == Counts({"lsu": 2, "fma": 2, "other": 1}, 128, 128, True)


def test_limits_by_hand():
    """132 multiprocessors at 1.755 GHz, 128 instructions a cycle, over 3.35 TB/s are 8.85."""
    assert RATES["H100"].issue == pytest.approx(8.851, abs=1e-3)
    assert RATES["H200"].issue == pytest.approx(6.178, abs=1e-3)
    assert RATES["A100"].pipes["fma"] == pytest.approx(4.777, abs=1e-3)
    assert limits("sm_90", {"fma": 4.0, "alu": 2.0}) == {"H100": "memory", "H200": "memory"}
    assert limits("sm_90", {"fma": 1.0, "alu": 4.0}) == {"H100": "memory", "H200": "alu 1.3"}
    assert limits("sm_90", {"mufu": 2.0}) == {"H100": "mufu 1.8", "H200": "mufu 2.6"}
    assert limits("sm_80", {"fma": 5.0, "imad": 1.0}) == {"A100": "fma 1.3"}
    assert limits("gfx942", {"fma": 5.0}) == {}


# --- the file ---------------------------------------------------------------------------------


def record(names):
    """Write the budgets anew: of all operations, or of those named; returns what was found."""
    known = dict.fromkeys(case.name for case in finding.cases())
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{unknown[0]} is no operation with kernels: choose {', '.join(known)}")
    kept = {
        case: number
        for case, number in json.loads(BUDGETS.read_text()).items()
        if names and case.partition(" ")[0] not in names
    }
    found = compiled("sm_90", "every", *names)
    BUDGETS.write_text(json.dumps(kept | _sums(found), indent=0, sort_keys=True) + "\n")
    return found


def test_the_budgets_of_one_operation_are_recorded_and_the_others_kept(monkeypatch, tmp_path):
    here = sys.modules[__name__]
    asked = []

    def found(*words):
        asked.append(words)
        return [{"kernel": "scale", "variant": "fp32", "instructions": {"fma": 1.0, "alu": 0.5}}]

    monkeypatch.setattr(here, "compiled", found)
    monkeypatch.setattr(here, "BUDGETS", tmp_path / "instructions.json")
    budgets = {"scale fp32": 2.0, "scale gone": 1.0, "scaled_softmax fp32": 3.0}
    BUDGETS.write_text(json.dumps(budgets))
    record(["scale"])
    assert json.loads(BUDGETS.read_text()) == {"scale fp32": 1.5, "scaled_softmax fp32": 3.0}
    record([])
    assert json.loads(BUDGETS.read_text()) == {"scale fp32": 1.5}
    assert asked == [("sm_90", "every", "scale"), ("sm_90", "every")]
    with pytest.raises(SystemExit, match="scales is no operation with kernels: choose adagrad, "):
        record(["scales"])
