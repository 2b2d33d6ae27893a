"""The table of settings: launches with and without rows, what a row may say, who reads it when."""

import ast
import dataclasses
import itertools
import json
import pathlib
import re
import warnings

import pytest
import torch

pytest.importorskip("triton")

import triton

from apex.catalogue.entry import DTYPES, Checked
from apex.commands.selftest import ops as checks
from apex.commands.selftest.check import Setting
from apex.kernels import _measured, _settings, partial_sums, row_norms, swiglu
from apex.ops import _runtime
from tests.kernels import launches

PLACE = ("a card", triton.__version__, torch.__version__.split("+")[0])
INTERPRETED = Setting(torch.device("cpu"), "kernels")
KEY = ("rms_norm_forward", "bfloat16", (4096,))
CHOICE = {"whole": 1, "elements": 8192, "warps": 16}


def row(key=KEY, choice=CHOICE, place=PLACE, **other):
    named = dict(zip(("card", "triton", "torch"), place, strict=True))
    about = dict(zip(("op", "dtype", "size"), (*key[:2], [*key[2]]), strict=True))
    return {**named, **about, "choice": choice, **other}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write a table for a card that this process has."""
    file = tmp_path / "settings.json"
    monkeypatch.setattr(_settings, "FILE", file)
    monkeypatch.setattr(_settings, "here", lambda: PLACE)
    monkeypatch.setattr(_settings, "_table", None)

    def write(*rows, text=None):
        file.write_text(json.dumps(rows) if text is None else text)
        monkeypatch.setattr(_settings, "_table", None)

    return write


def forward(columns=4096, dtype=torch.bfloat16):
    x, weight = launches.meta(512, columns, dtype=dtype), launches.meta(columns, dtype=dtype)
    (line,) = launches.launched(
        lambda: row_norms.forward(x, weight, None, (columns,), 1e-5, False, dtype)
    )
    return line


FORMULA = "row_norm_forward [512, 1, 1] [512, 8192] CENTERED=False ROWS=1 BLOCK=4096 num_warps=8 enable_fp_fusion=True"  # noqa: E501
MEASURED = "row_norm_forward [256, 1, 1] [512, 8192] CENTERED=False ROWS=2 BLOCK=4096 num_warps=16 enable_fp_fusion=True"  # noqa: E501


# -- without rows --------------------------------------------------------------------------------


def test_with_an_empty_table_every_launch_is_what_it_was():
    """As recorded before there was a table: grids, numbers, constants, warps."""
    recorded = json.loads(launches.FILE.read_text())
    with _settings.use():
        found = {name: launches.launched(call) for name, call in launches.calls()}
    assert found == recorded
    assert sum(map(len, recorded.values())) > 300


def test_the_table_of_the_package_is_good_and_sorted():
    rows = _measured.check_all(_settings.FILE, _settings.check)
    keys = [(row["card"], row["triton"], row["torch"], *_settings.key_of(row)) for row in rows]
    assert keys == sorted(set(keys))
    assert all(row["ms"]["choice"] < row["ms"]["formula"] for row in rows)  # one was measured


def test_a_process_without_a_gpu_reads_no_table(table, monkeypatch):
    table(text="no JSON")
    monkeypatch.setattr(_settings, "here", lambda: None)
    assert forward() == FORMULA


# -- rows ----------------------------------------------------------------------------------------


def test_a_row_of_this_card_triton_and_torch_is_taken(table):
    table(row())
    assert forward() == MEASURED
    assert forward(4104) != forward()
    assert "ROWS=1 BLOCK=4096 num_warps=8" in forward(dtype=torch.float16)


@pytest.mark.parametrize("part", range(3))
def test_a_row_of_another_card_triton_or_torch_is_not_taken(part, table):
    other = [*PLACE]
    other[part] += "1"
    table(row(place=other))
    assert forward() == FORMULA
    table(row(place=other), row())
    row_norms._of_forward.cache_clear()
    assert forward() == MEASURED


@pytest.mark.parametrize(
    ("names", "found"), [(["x", "x"], ("x", *PLACE[1:])), (["x", "y"], None), ([], None)]
)
def test_a_card_is_what_all_gpus_of_the_process_are(names, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    _settings.here.cache_clear()
    assert _settings.here() == found


def test_a_row_is_looked_up_once_for_a_family(table, monkeypatch):
    """Not in a launch; and the file is read once for the process."""
    table(row())
    asked, read = [], []
    original, content = row_norms.setting, _measured.content
    monkeypatch.setattr(
        row_norms, "setting", lambda *a, **k: (asked.append(a), original(*a, **k))[1]
    )
    monkeypatch.setattr(_measured, "content", lambda file: (read.append(file), content(file))[1])
    for columns in (4096, 4096, 768, 768, 4096):
        forward(columns)
    assert [size for _, _, size in asked] == [(4096,), (768,)]
    assert len(read) == 1


def test_in_a_block_other_rows_are_taken_and_what_is_asked_for_is_noted(table):
    table(row())
    other = {"whole": 0, "elements": 1024, "warps": 2}
    assert forward() == MEASURED
    with _settings.use([row(choice=other, place=("x", "y", "z"))]) as asked:
        assert "row_norm_forward_wide" in forward()
        with _settings.use():
            assert forward() == FORMULA
        assert "row_norm_forward_wide" in forward()
    assert asked == {KEY: {"whole": 1, "elements": 4096, "warps": 8}}
    assert forward() == MEASURED


def test_what_asks_for_settings_is_forgotten_when_they_change():
    """Each function that calls `setting`, or is given what one returned, is kept by `kept`."""
    kept = {function.__wrapped__ for function in _settings._kept}
    source = {}
    for name in ("cross_entropy", "group_norm", "rotary", "row_norms", "scaled_softmax", "swiglu"):
        module = getattr(__import__(f"apex.kernels.{name}").kernels, name)
        source[name] = module
        cached = {value for value in vars(module).values() if hasattr(value, "cache_clear")}
        own = {value.__wrapped__ for value in cached if value.__module__ == module.__name__}
        assert own <= kept, name
    assert len(source) == 6


def test_a_constant_that_a_test_patches_is_taken_at_once_and_leaves_nothing():
    """By conftest.py; a launcher keeps what it derived of the constant."""
    before = partial_sums._segments(2, False).constants
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_sums, "PARTIALS", 4)
        assert partial_sums._segments(2, False).constants == (2, False, 4)
    assert partial_sums._segments(2, False).constants == before


def _assigned(tree):
    """What a file assigns to names that it has from `apex.kernels`: ``kernels.TILE = 8``."""
    names, found = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("apex.kernels"):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and "importorskip('apex.kernels" in ast.unparse(node):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((ast.unparse(node.value), node.attr))
    return [f"{name}.{attribute}" for name, attribute in found if name in names]


def test_tests_change_constants_by_patches_alone():
    """An assignment would be left to later tests, with what launchers derived of it."""
    assert _assigned(ast.parse("from apex.kernels import a as b\nb.C = b.d(e.f)")) == ["b.C"]
    program = "b = pytest.importorskip('apex.kernels.b')\nb.C += 1"
    assert _assigned(ast.parse(program)) == ["b.C"]
    sources = [file.read_text("utf-8") for file in pathlib.Path(__file__).parents[1].rglob("*.py")]
    trees = [ast.parse(source) for source in sources if "apex.kernels" in source]
    assert [found for tree in trees for found in _assigned(tree)] == []


# -- bad rows ------------------------------------------------------------------------------------

BAD = {
    "There is no operation 'rms'": {"op": "rms"},
    "dtype is 'bf16'; it must be one of bfloat16, float16, float32": {"dtype": "bf16"},
    "size is [4096, 4096]; it must be a list of columns": {"size": [4096, 4096]},
    "size is 4096": {"size": 4096},
    "choice is {'warps': 4}; it must have whole, elements, warps": {"choice": {"warps": 4}},
    "elements is 6144; it must be a power of 2": {"choice": {**CHOICE, "elements": 6144}},
    "elements is '8192'; it must be an integer": {"choice": {**CHOICE, "elements": "8192"}},
    "warps is 64; it must be an integer from 1 to 32": {"choice": {**CHOICE, "warps": 64}},
    "8192 elements are more than 64 for each of 32 threads": {"choice": {**CHOICE, "warps": 1}},
    "a tile of 2048 elements has no whole row of 4096": {"choice": {**CHOICE, "elements": 2048}},
    "a block of 8192 elements is longer than a row": {"choice": {**CHOICE, "whole": 0}},
    "a tile of 256 elements is less than 512 wide": {
        "op": "rms_norm_weight_sums",
        "choice": {"width": 512, "elements": 256, "warps": 4, "programs": 4},
    },
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_row_is_refused_by_tools_and_left_out_with_a_warning_by_a_training(said, table):
    """A training goes on as without it, and other rows are taken."""
    bad = {**row(), **BAD[said]}
    good = row(key=("rms_norm_forward", "bfloat16", (768,)), choice={**CHOICE, "elements": 1024})
    table(bad, good)
    with pytest.raises(ValueError, match=re.escape(said)):
        _measured.check_all(_settings.FILE, _settings.check)
    with pytest.warns(RuntimeWarning, match=re.escape(said)):
        assert forward() == FORMULA
    assert "ROWS=1 BLOCK=1024 num_warps=16" in forward(768)


@pytest.mark.parametrize(("text", "said"), [("[", "Expecting value"), ("3", "not a list of rows")])
def test_a_damaged_file_is_a_warning_for_a_training(text, said, table):
    table(text=text)
    with pytest.warns(
        RuntimeWarning, match=rf"settings.json is damaged.* cannot be read: .*{said}"
    ):
        assert forward() == FORMULA
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forward(768)  # once


# -- results -------------------------------------------------------------------------------------

WITHOUT = ("focal_loss", "linear_cross_entropy", "index_mul_2d")  # no settings of their own
WIDE = Checked(((2, 8200),), ())  # just wide enough for blocks: the interpreter is slow
TUNED = [
    dataclasses.replace(op, checked=WIDE) if "wide" in op.name else op
    for op in checks.CHECKED
    if not op.name.startswith(WITHOUT)
]


def others(op, dtype, backward):
    """Pairs of rows: what the formulas ask for, cut by the first candidates, and by the last."""
    with _settings.use() as asked, _runtime.use("triton"):
        list(checks._op(op, dtype, backward, INTERPRETED))
    found = [
        [choices[place] for choices in (_settings.around(*one) for one in asked.items())]
        for place in (0, -1)
    ]
    return [[row(key, choice) for key, choice in zip(asked, one, strict=True)] for one in found]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", TUNED, ids=lambda op: op.name)
@pytest.mark.slow
def test_results_of_other_settings_are_those_of_float64(op, backward):
    dtype = DTYPES[op.dtypes[0]]
    for rows in others(op, dtype, backward):
        for one in rows:
            _settings.check(one)
        with _settings.use(rows), _runtime.use("triton"):
            found = list(checks._op(op, dtype, backward, INTERPRETED))
        assert found
        assert [one for one in found if not one.right] == []


def test_every_operation_of_the_table_is_asked_for():
    with _settings.use() as asked:
        for _, call in launches.calls():
            launches.launched(call)
    kinds = itertools.product(("layer", "rms"), ("backward_from_output",))
    rest = {f"{kind}_norm_{of}" for kind, of in kinds}
    assert {op for op, _, _ in asked} | rest == {*_settings.OPS}
    assert all(len(size) == len(_settings.OPS[op].size) for op, _, size in asked)
    assert all({*formula} == {*_settings.OPS[op].choice} for (op, _, _), formula in asked.items())


def test_candidates_are_good_different_and_around_the_formula():
    with _settings.use() as asked:
        for _, call in launches.calls():
            launches.launched(call)
    for (op, dtype, size), formula in asked.items():
        candidates = _settings.around((op, dtype, size), formula)
        for choice in candidates:
            _settings.check(row((op, dtype, size), choice))
            changed = {name for name in formula if choice[name] != formula[name]}
            tile = {"elements", "warps"}
            assert changed
            assert len(changed - tile) + bool(changed & tile) <= 1 or "whole" in changed
        assert formula not in candidates
        assert len({json.dumps(choice) for choice in candidates}) == len(candidates)
    wide = _settings.around(KEY, asked_formula := asked[KEY])
    assert {choice["whole"] for choice in wide} == {0, 1}
    assert asked_formula["warps"] == 8


def test_swiglu_with_another_block_has_the_same_bits():
    """Each element by itself: a row changes no bit."""
    gate, up = torch.randn(3, 700), torch.randn(3, 700)
    first = swiglu.forward(gate, up)
    choice = {"elements": 256, "warps": 2}
    with _settings.use([row(("swiglu_forward", "float32", ()), choice)]):
        assert torch.equal(swiglu.forward(gate, up), first)
