"""From how many elements on a GPU takes kernels: the table, and what a program prefers."""

import datetime
import json
import re
import subprocess
import sys
import threading

import pytest
import torch

import apex.ops
from apex.ops import _runtime, _thresholds
from apex.ops._op import UNSURE
from apex.ops.losses import cross_entropy
from apex.ops.norms import row_norms
from tests.test_dev import ROOT

ROWS = json.loads(_thresholds.FILE.read_text("utf-8"))
OP = row_norms.OP


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_where_its_numbers_come_from(name):
    row = ROWS[name]
    assert row.keys() == {"gpu", "wall", "card", "torch", "triton", "date", "derived"}
    # Kernels cost the host more than torch's functions, so waiting pays later or at once.
    assert 1 <= row["gpu"] <= row["wall"]
    assert all(re.fullmatch(r"[\w .+-]+", row[key]) for key in ("card", "torch", "triton"))
    datetime.date.fromisoformat(row["date"])
    assert row["derived"] is None or re.fullmatch(r"\w[\w ,.-]+", row["derived"])


def lines():
    """The table of the page, which tests/kernels/record.py writes."""
    for name, row in ROWS.items():
        marks = "measured" if row["derived"] is None else f"derived, {row['derived']}"
        yield f"| `{name}` | {row['gpu']:,} | {row['wall']:,} | {marks} |"


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "which-kernel.md").read_text("utf-8")
    for line in lines():
        assert line in page, line


def test_a_bad_row_is_left_out_with_a_warning(tmp_path, monkeypatch):
    """As rows of kernels' settings are: both tables have one loader."""
    file = tmp_path / "thresholds.json"
    file.write_text(json.dumps({"rotary": {"gpu": 1}, "swiglu": ROWS["swiglu"]}))
    monkeypatch.setattr(_thresholds, "FILE", file)
    monkeypatch.setattr(_thresholds, "_rows", {})
    with pytest.warns(
        RuntimeWarning, match="rotary: wall is None; it must be an integer of 1 or more"
    ):
        assert _thresholds.threshold("rotary") is None
    assert _thresholds.threshold("swiglu").wall == ROWS["swiglu"]["wall"]


def test_waiting_is_the_default():
    assert all(_thresholds.threshold(name).least == row["wall"] for name, row in ROWS.items())


def test_a_preference_holds_from_now_on_or_in_a_block():
    wall, gpu = ROWS["row_norm"]["wall"], ROWS["row_norm"]["gpu"]
    with apex.ops.prefer("gpu"):
        assert OP.threshold.least == gpu
        with apex.ops.prefer("wall"):
            assert OP.threshold.least == wall
        assert OP.threshold.least == gpu
        apex.ops.prefer("wall")  # not a block: until somebody says otherwise
        assert OP.threshold.least == wall
    assert OP.threshold.least == wall
    with pytest.raises(KeyError, match="inside"), apex.ops.prefer("gpu"):
        raise KeyError("inside")
    assert OP.threshold.least == wall


def test_a_preference_holds_in_every_thread():
    """A checkpointed forward runs again in a thread of autograd, and has to take the same path."""
    seen = []
    with apex.ops.prefer("gpu"):
        thread = threading.Thread(target=lambda: seen.append(OP.threshold.least))
        thread.start()
        thread.join()
    assert seen == [ROWS["row_norm"]["gpu"]]


def test_a_preference_before_an_operation_is_imported():
    code = (
        "import sys, apex.ops; apex.ops.prefer('gpu'); assert 'torch' not in sys.modules\n"
        "from apex.ops.norms.row_norms import OP; print(OP.threshold.least)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == ROWS["row_norm"]["gpu"]


@pytest.mark.parametrize("clock", ["GPU", "host", 1])
def test_another_clock_is_refused(clock):
    with pytest.raises(ValueError, match=r'allowed are "wall" and "gpu"'):
        apex.ops.prefer(clock)


def test_calls_that_need_a_kernel_prefer_nothing():
    for clock in ("gpu", "wall"):
        with apex.ops.prefer(clock):
            assert row_norms.MEMORY_EFFICIENT.threshold.least == 1


def test_small_is_what_the_definition_computes():
    """The short question and the whole choice of path agree on everything that is small."""
    few, many = torch.ones(2, 3), torch.ones(cross_entropy.SMALL // 4 + 1, 4)
    choose = cross_entropy.OP.choose
    assert choose(few) is choose(few.double()) is choose(few[:0]) is None
    assert choose(many) is cross_entropy.OP.pieces.eager
    assert choose(few.tolist()) is UNSURE
    with torch.autocast("cpu", torch.bfloat16):
        assert choose(few) is UNSURE
    torch.vmap(lambda x: x * (choose(x) is None or 1 / 0))(few)  # as without a transform
    torch.vmap(lambda x: x * (choose(x) is UNSURE or 1 / 0))(many[None])
    torch.jit.trace(lambda x: x * (choose(x) is UNSURE or 1 / 0), (few,), check_trace=False)
    with _runtime.use("triton"):
        assert choose(few).__name__ == "apex.kernels.cross_entropy"
