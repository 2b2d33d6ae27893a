"""The command that writes what kernels are compared with."""

import json

from tests.kernels import launches, record, test_instructions
from tools.kernels import versions


def test_a_new_kernel_is_added_to_every_table(monkeypatch, tmp_path):
    for module, name in (
        (test_instructions, "BUDGETS"), (launches, "FILE"), (versions, "LIMITS"), (record, "PAGE"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, tmp_path / name)
    test_instructions.BUDGETS.write_text("{}")
    versions.LIMITS.write_text(json.dumps({"scale": 40}))
    record.PAGE.write_text(f"# Page\n\n{record.HEAD}| `gone` | 1 | 1 | measured |\n\nText.\n")
    case = {"variant": "fp32", "instructions": {"fma": 1.0}}
    found = [
        {**case, "kernel": "scale", "registers": 60},
        {**case, "kernel": "lion", "registers": 33},
    ]
    monkeypatch.setattr(test_instructions, "compiled", lambda *words: found)
    monkeypatch.setattr(launches, "calls", lambda: [("lion", lambda: None)])
    record.main(["scale", "lion"])
    assert json.loads(versions.LIMITS.read_text()) == {"lion": 40, "scale": 40}  # known ones stay
    assert json.loads(test_instructions.BUDGETS.read_text()) == {
        "lion fp32": 1.0,
        "scale fp32": 1.0,
    }
    assert json.loads(launches.FILE.read_text()) == {"lion": []}
    head, text = record.PAGE.read_text().split("\n\nText.")
    assert head == f"# Page\n\n{record.HEAD}" + "\n".join(record.lines())
    assert text == "\n"
