"""What is computed is the same under any default device and default dtype of torch.

Programs set them for their models, those of 2018 to 2020 by `set_default_tensor_type`. Only
parameters of modules that a program makes follow them. `meta` stands for a GPU.
"""

import pytest
import torch

from apex import amp
from apex.ops.lists import stages
from tests.default_programs import MODULES, PROGRAMS, default

OTHERS = ("meta", torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def described(tensor):
    """Device, dtype, shape and bits."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return str(tensor.device), tensor.dtype, tensor.shape, bits


def run_under(name, other):
    program = PROGRAMS[name]()
    next(program)
    with default(other):
        found = next(program)
    amp.reset()
    return [*map(described, found)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_default_changes_a_bit(name):
    usual = run_under(name, None)
    for other in OTHERS:
        assert run_under(name, other) == usual, other


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_a_program_makes_follow_the_defaults(name):
    make, _ = MODULES[name]
    with default("meta"):
        module = make()
    floats = [x for x in module.state_dict().values() if x.is_floating_point()]
    assert floats
    assert {x.device.type for x in floats} == {"meta"}
    with default(torch.float64):
        module = make()
    assert {x.dtype for x in module.state_dict().values() if x.is_floating_point()} == {
        torch.float64
    }


def test_ranks_with_and_without_gradients_send_one_dtype():
    """A float64 message of one rank and a float32 one of another would hang or mix bits."""
    kind, params = stages.Kind(2), [torch.ones(2), torch.ones(3)]
    part = torch.ones(1, 2)
    with default(torch.float64):
        found = [stages._all_places(parts, params, kind) for parts in ([([0], part)], [])]
    assert [one.dtype for one in found] == [torch.float32] * 2
