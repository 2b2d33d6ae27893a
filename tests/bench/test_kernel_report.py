"""Tables, CSV, plots, page and schema of `apex bench kernels`, from rows made by hand."""

import csv
import dataclasses
import json
import math
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image
from scipy import stats

from apex.bench.kernels import report as kernel_report
from apex.bench.kernels import rows as kernel_rows
from apex.bench.kernels.model import Model
from apex.bench.kernels.rows import FORMAT, Report, Row
from apex.bench.output import files
from tests.bench import made
from tests.bench.test_page import HOSTILE, TRY, Elements, browse, browser, found_in

SCHEMA = json.loads((Path(kernel_rows.__file__).parent / "kernels.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
SPEEDS = {"torch fused": 1.25, "torch foreach": 3.2, "torch foreach, no check": 0.5}
OPS = ("adam", "sgd", "axpby", "layer_norm_both")


def _row(op="adam", provider="apex", shapes="tiny", **changes):
    ours, speed = provider == "apex", SPEEDS.get(provider)
    ms = 2.0 * (speed or 1) * (1 + OPS.index(op))
    values = {
        "op": op, "provider": provider, "ours": ours, "shapes": shapes, "dtype": "float32",
        "tensors": 1000, "elements": 50500, "repeats": 30, "threads": 2, "huge_pages": False,
        "p20_ms": 0.9 * ms, "p50_ms": ms, "p80_ms": 1.2 * ms, "host_ms": 0.1, "speed": speed,
        "speed_low": speed and 0.9 * speed, "speed_high": speed and 1.1 * speed,
        "bytes_per_element": 28.0, "gb_s": 1.4 / ms,
    }  # fmt: skip
    return Row(**{**values, **changes})


def _report(rows=None, **changes):
    if rows is None:
        rows = [
            _row(op, name, shapes)
            for shapes in ("tiny", "small")
            for op in OPS
            for name in ("apex", *SPEEDS)
        ]
        rows[0] = dataclasses.replace(rows[0], model=Model("sm_90", 8.0, 1, {"list_kernel": 4}))
        failed = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms", "speed", "speed_low", "speed_high"))
        rows[2] = dataclasses.replace(rows[2], **failed, problem="RuntimeError: not today")
    values = {
        "environment": {
            **made.CPU,
            "versions": {**made.CPU["versions"], "platform": "Linux", "timm": None,
                         "liger_kernel": None},
            "copy_gb_s": None,
        },
        "options": {"op": [*OPS], "shapes": ["tiny", "small"], "dtype": ["float32"],
                    "repeats": 30, "full": False, "device": "cpu", "model": None},
        "complete": True,
        "missing": {"timm": ["lamb: timm loop"]},
        "notes": {"ms": "by the host clock"},
    }  # fmt: skip
    return Report(**{**values, **changes}, rows=tuple(rows))


def _show(of, folder, name="kernels.json"):
    files.save(kernel_report.content(of), folder / name)
    kernel_report.show(of, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    _show(_report(), folder)
    return folder


@pytest.fixture(scope="module")
def text(folder):
    return (folder / "kernels.html").read_text(encoding="utf-8")


# --- statistics ----------------------------------------------------------------------------------


def test_our_speed_and_its_interval_are_of_the_logarithms_of_paired_turns():
    random = np.random.default_rng(0)
    busy = np.exp(random.standard_normal(11))  # the machine: the same for both of a turn
    ours, theirs = busy, 3 * busy * np.exp(0.01 * random.standard_normal(11))
    found = kernel_rows._speed(ours.tolist(), theirs.tolist())
    logs = np.log(theirs / ours)
    low, high = stats.t.interval(0.95, 10, logs.mean(), stats.sem(logs))
    assert found["speed"] == pytest.approx(math.exp(logs.mean()))
    assert found["speed_low"] == pytest.approx(math.exp(low))
    assert found["speed_high"] == pytest.approx(math.exp(high))
    assert found["speed_high"] / found["speed_low"] < 1.05  # unpaired it would be 3


def test_fewer_than_three_turns_have_a_speed_and_no_interval():
    assert kernel_rows._speed([1.0, 4.0], [2.0, 2.0]) == {"speed": pytest.approx(1.0)}
    assert kernel_rows._speed([], [2.0, 2.0]) == {}  # ours failed


# --- table, CSV, plots ---------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 250])
def test_tables_fit_the_terminal(columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    _show(_report(), tmp_path)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    for part in ("tiny: 1,000 tensors, 50,500 elements, float32", "2.00×", "8.00"):
        assert part in " ".join(shown.split())
    assert ("Columns left out" in shown) == (columns < 250)
    assert ("4 / SM" in shown) == (columns == 250)  # dropped before the interval
    assert ("1.82–2.22" in shown) == (columns > 60)
    for part in ("adam, tiny, float32, torch foreach: RuntimeError: not today.", "timm: not inst"):
        assert part in " ".join(shown.split())


def test_csv_has_a_line_for_each_row_with_plain_numbers(folder):
    with (folder / "kernels.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    rows = _report().rows
    assert len(found) == len(rows)
    for record, row in zip(found, rows, strict=True):
        for name in record.keys() - {"model_bytes", "model_launches"}:
            value = getattr(row, name)
            assert record[name] == ("" if value is None else str(value))
    assert found[0]["model_bytes"] == "8.0"
    speeds = {"speed", "speed_low", "speed_high"}  # the JSON file's
    assert {*vars(rows[0])} - {*found[0]} == {"ours", "model", *speeds}
    second = found[1]
    assert [float(second[f"ratio{end}"]) for end in ("", "_low", "_high")] == [
        pytest.approx(1 / (1.25 * times)) for times in (1, 1.1, 0.9)
    ]


def test_plots_have_a_bar_and_a_whisker_for_each_comparison(folder, tmp_path):
    names = {f"kernels-{shapes}-float32" for shapes in ("tiny", "small")}
    drawn = {path.name for path in folder.glob("*") if path.suffix in (".png", ".svg")}
    assert drawn == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    for name in names:
        assert (imread(folder / f"{name}.png")[..., :3] < 0.95).any(-1).mean() > 0.01
        svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
        missing = 1 if "tiny" in name else 0  # the one that failed
        for speed in SPEEDS.values():
            count = 4 - missing if speed == 3.2 else 4
            assert svg.count(f">{1 / speed:.2f}<") == count
        assert "Thinking Machine CM-5" in svg


def test_plots_of_an_earlier_run_go_away_and_other_files_stay(tmp_path):
    for name in ("kernels-wide-bfloat16.png", "kernels-notes.png", "other-one-float32.svg"):
        (tmp_path / name).write_text("old")
    _show(_report(), tmp_path)
    assert not (tmp_path / "kernels-wide-bfloat16.png").exists()
    assert (tmp_path / "kernels-notes.png").exists()
    assert (tmp_path / "other-one-float32.svg").exists()


def test_files_are_named_after_the_json_file(tmp_path):
    _show(_report([_row(), _row(provider="torch fused")]), tmp_path, "epyc.json")
    assert {path.name for path in tmp_path.iterdir()} == {
        "epyc.json", "epyc.csv", "epyc.html", "epyc-tiny-float32.png", "epyc-tiny-float32.svg",
    }  # fmt: skip
    assert 'download="epyc.json"' in (tmp_path / "epyc.html").read_text(encoding="utf-8")


# --- the page ------------------------------------------------------------------------------------


def test_a_sceptic_finds_what_is_needed(text):
    elements = Elements(text)
    assert not elements.open
    assert all(link.startswith(("#", "data:")) for link in elements.links)
    said = " ".join(" ".join(sum(elements.text.values(), [])).split())
    for fact in ("Thinking Machine CM-5", "2.13.0", "30 turns", "95 % confidence interval",
                 "by the host clock", "tiny: 1,000 tensors", "1.82–2.22", "not today",
                 "not installed (pip install --no-deps timm)", "lamb: timm loop",
                 "below 1 ours is faster", "4 / SM"):  # fmt: skip
        assert fact in said
    assert "INCOMPLETE" not in said
    [raw] = re.findall(r'<script type="application/json" id="raw">(.*?)</script>', text, re.DOTALL)
    assert json.loads(raw) == files.jsonable(kernel_report.content(_report()))


def test_an_interrupted_run_is_marked(tmp_path, capsys):
    _show(_report([_row()], complete=False), tmp_path)  # nothing to compare with: no plot
    page = (tmp_path / "kernels.html").read_text(encoding="utf-8")
    assert "INCOMPLETE" in page[: page.index("<main>")]
    assert "INCOMPLETE" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.svg"))


def test_hostile_texts_are_only_text(tmp_path):
    rows = [_row(), _row(provider="torch fused", problem=f"ValueError: {HOSTILE}")]
    _show(_report(rows, missing={HOSTILE: [HOSTILE]}), tmp_path)
    elements = Elements((tmp_path / "kernels.html").read_text(encoding="utf-8"))
    assert elements.tags.count("script") == 2
    assert "b" not in elements.tags


@browser
def test_the_page_in_a_browser(text, tmp_path):
    shot, tried = tmp_path / "page.png", tmp_path / "tried.html"
    trial = TRY.replace("ms per step", "ms")
    tried.write_text(text.replace("</body>", f"{trial}</body>"), encoding="utf-8")
    said = browse(tried, tmp_path, f"--screenshot={shot}", "--window-size=1200,3000")
    assert len(said) == 1, said  # no error, no warning: only what TRY says
    found = found_in(said[0])
    ms = [float(cell) for cell in found["before"]["order"] if cell != "—"]
    assert found["up"]["order"][-1] == found["down"]["order"][-1] == "—"  # the one that failed
    assert [float(cell) for cell in found["up"]["order"][:-1]] == sorted(ms) != ms
    assert [float(cell) for cell in found["down"]["order"][:-1]] == sorted(ms, reverse=True)
    assert found["download"] == "blob:"
    assert not found["wide"]
    assert len(found["sizes"]) == 2
    assert all(width > 350 and height > 200 for width, height in found["sizes"])
    image = np.asarray(Image.open(shot).convert("RGB")).reshape(-1, 3)
    for colour in ("D55E00", "009E73"):  # torch fused, torch foreach
        provider = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
        assert (np.abs(image - provider).max(1) < 4).sum() > 1000, colour


# --- the schema ----------------------------------------------------------------------------------


def test_the_schema_names_the_format():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format"]["const"] == FORMAT
    assert SCHEMA["$id"] == "urn:" + FORMAT.replace(" ", ":")


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (Report, {**SCHEMA, "required": SCHEMA["required"][1:]}),
        (Row, SCHEMA["$defs"]["row"]),
        (Model, SCHEMA["$defs"]["model"]),
    ],
)
def test_the_schema_has_the_fields_of_the_classes(kind, schema):
    names = sorted(field.name for field in dataclasses.fields(kind))
    assert sorted(schema["required"]) == names
    assert sorted(schema["properties"].keys() - {"format"}) == names
    assert schema["additionalProperties"] is False


def test_what_is_written_is_valid_and_other_types_are_not(folder):
    content = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    VALIDATOR.validate(content)
    for value in ({}, ["x"], -1.5):
        for kind in (content, content["rows"][0]):
            for name, good in kind.items():
                kind[name] = value
                number = value == -1.5 and SCHEMA["$defs"]["row"]["properties"].get(name) in (
                    {"$ref": "#/$defs/numberOrNull"},
                )
                free = value == {} and name in ("missing", "notes")
                assert VALIDATOR.is_valid(content) == (number or free), name
                kind[name] = good
