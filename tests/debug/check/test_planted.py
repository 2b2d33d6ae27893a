"""``apex check`` finds each planted mistake: its line, what was measured, and nothing else."""

import pytest

from apex._mistakes import KINDS
from tests.debug.check.healthy import HEALTHY
from tests.debug.check.planted import HEAD, PLANTED, TAIL


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_its_twin_is_silent(check, name):
    planted = PLANTED[name]
    true, output = check.plainly(planted.program(true=True))
    found = check(planted.program())
    assert [(one["kind"], one["line"]) for one in found["found"]] == [
        (planted.kind, planted.line())
    ]
    (one,) = found["found"]
    true = true[one["first_step"]] if isinstance(true, dict) else true
    assert planted.measured.format(*true) in one["measured"]
    assert one["fix"] == KINDS[planted.kind].fix
    assert (check.code, found["status"]) == (3, "found")
    assert (found["exit"], check.out) == ((1, "") if planted.fails else (0, output))

    _, output = check.plainly(planted.program(twin=True))
    twin = check(planted.program(twin=True))
    assert (twin["found"], check.code, twin["failed_rules"]) == ([], 0, [])
    assert check.out == output


def test_each_kind_is_planted():
    assert {one.kind for one in PLANTED.values()} == set(KINDS)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_is_silent_and_its_weights_have_the_same_bits(check, name):
    text = HEAD + HEALTHY[name] + TAIL  # which prints each weight with all its digits
    _, output = check.plainly(text)
    found = check(text)
    assert (found["found"], check.code, found["failed_rules"]) == ([], 0, [])
    assert check.out == output
    assert len(output) > 100
