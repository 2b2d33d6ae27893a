"""The table that the tools of 2026 were tried on: all ten right, no alarm on the healthy ones."""

import pytest

from tests.debug.table import TABLE


@pytest.mark.parametrize("program", TABLE, ids=lambda program: program.__name__)
def test_names_cause_operation_module_and_direction(program):
    report = program()

    expected = TABLE[program]
    if expected is None:
        assert report is None
        return
    operation = report.operation and report.operation.removeprefix("aten.").partition(".")[0]
    assert (report.cause, operation, report.module, report.direction) == expected
    assert report.sentence.endswith(".")
    assert len(report.sentence.splitlines()) == 1
