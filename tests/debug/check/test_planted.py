"""``apex check`` finds each planted mistake: its line, what was measured, and nothing else."""

import pytest

from apex.debug.check.mistakes import KINDS
from tests.debug.check.healthy import HEALTHY
from tests.debug.check.planted import HEAD, PLANTED, TAIL


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_its_twin_is_silent(check, name):
    check.finds(PLANTED[name])
    check.is_silent(PLANTED[name].program(twin=True))


def test_each_kind_is_planted():
    assert {one.kind for one in PLANTED.values()} == set(KINDS)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_is_silent_and_its_weights_have_the_same_bits(check, name):
    text = HEAD + HEALTHY[name] + TAIL  # which prints each weight with all its digits
    assert len(check.is_silent(text)) > 100
