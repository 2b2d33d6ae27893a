import dataclasses
import json
import math
import re
import zipfile
from pathlib import Path

import hatchling.builders.wheel
import jsonschema
import pytest

from apex.bench.training import results
from apex.bench.training.results import FORMAT, Cell, Report, Run, read, write
from tests.bench.reports import cell, report, run

SCHEMA = json.loads((Path(results.__file__).parent / "schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
ODD = (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, -0.0)


def _full():
    """A report in which every field has a value, and numbers that JSON does not have."""
    rich = run(
        cell("O1", 3, tf32=False, lr=1e-3),
        accuracy=98.5,
        error="line\nbreak",
        step_ms=ODD,
        losses=ODD,
        scales=(65536.0, 32768.0),
        host_ms=0.1 + 0.2,
        replay_ms=math.nan,
        joules=1 / 7,
        peak_process_bytes=5,
        flops=10**15,
        moved_bytes=3,
    )
    largest = {"task": "digits", "level": "O1", "batch": 640, "limit_bytes": 2**30, "error": None}
    return report(
        rich,
        run(cell("O0"), status="out of memory", peak_tensor_bytes=None),
        largest=(largest,),
        ceilings={"flops fp32": 1e12 / 3, "bytes": 1e10},
    )


@pytest.fixture
def file(tmp_path):
    write(_full(), tmp_path / "results.json")
    return tmp_path / "results.json"


def _valid(content):
    VALIDATOR.validate(content)


def _bits(value):
    """Text that is the same only for the same bits; nan is not equal to itself."""
    return repr(json.loads(json.dumps(dataclasses.asdict(value))))


def _objects(content):
    """Every object of a report that may not have other fields."""
    return [content, content["plan"][0], content["runs"][0], content["runs"][0]["cell"]]


def test_the_schema_is_one_and_names_the_format():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format"]["const"] == FORMAT
    assert SCHEMA["$id"] == "urn:" + FORMAT.replace(" ", ":")


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (Report, {**SCHEMA, "required": SCHEMA["required"][1:]}),
        (Run, SCHEMA["$defs"]["run"]),
        (Cell, SCHEMA["$defs"]["cell"]),
    ],
)
def test_the_schema_has_the_fields_of_the_classes(kind, schema):
    names = [field.name for field in dataclasses.fields(kind)]
    assert sorted(schema["required"]) == sorted(names)
    assert sorted(schema["properties"].keys() - {"format"}) == sorted(names)
    assert schema["additionalProperties"] is False


def test_what_is_written_is_valid_and_comes_back_to_the_last_bit(file):
    _valid(json.loads(file.read_text()))
    assert _bits(read(file)) == _bits(_full())
    assert isinstance(read(file).runs[0].step_ms, tuple)


@pytest.mark.parametrize("of", range(4))
def test_missing_and_further_fields_are_refused_by_schema_and_reader(file, of):
    for name in list(_objects(json.loads(file.read_text()))[of]):
        content = json.loads(file.read_text())
        del _objects(content)[of][name]
        _refused(content, file)
    content = json.loads(file.read_text())
    _objects(content)[of]["more"] = 1
    _refused(content, file)


def _refused(content, file):
    with pytest.raises(jsonschema.ValidationError):
        _valid(content)
    bad = file.with_name("bad.json")
    bad.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(str(bad))) as error:
        read(bad)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", [None, 1.5, -1, True, "1.5", "\nlines", [], ["x"], [[1.0]], {}, {"a": []}]
)
def test_what_the_reader_takes_is_what_the_schema_takes(file, value):
    """In the place of every field; ranges and the environment's fields are the schema's alone."""
    content = json.loads(file.read_text())
    bad = file.with_name("bad.json")
    for of, kind in enumerate(_objects(content)):
        for name, good in kind.items():
            if name == "environment" or (of, name) == (0, "largest"):
                continue
            kind[name] = value
            errors = list(VALIDATOR.iter_errors(content))
            wrong = [e for e in errors if e.validator != "minimum"]
            bad.write_text(json.dumps(content))
            if wrong:
                with pytest.raises(ValueError, match=re.escape(str(bad))) as error:
                    read(bad)
                assert "\n" not in str(error.value)
            else:
                read(bad)
            kind[name] = good


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "7",
        "null",
        '{"format": "apex bench 1"}',
        '{"runs": []}',
        "\x00",
    ],
)
def test_what_is_no_report_gets_one_line(file, text):
    file.write_text(text)
    with pytest.raises(ValueError, match="is not a report that apex bench writes") as error:
        read(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_was_cut_off_gets_one_line(file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="is not a report"):
        read(file)
    file.write_bytes(whole.replace(b"O1", b"\xff\xfe"))
    with pytest.raises(ValueError, match="is not a report"):
        read(file)


def test_the_schema_is_in_the_wheel(tmp_path):
    root = Path(__file__).parents[2]
    builder = hatchling.builders.wheel.WheelBuilder(str(root))
    (wheel,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        assert json.loads(archive.read("apex/bench/training/schema.json")) == SCHEMA
