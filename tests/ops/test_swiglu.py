"""SwiGLU: what is special about it. The rest is in test_every_op.py."""

import pytest
import torch

from apex.mlp import swiglu
from apex.ops import _runtime
from tests.tolerance import assert_one_rounding


@pytest.fixture(params=["triton", "reference"])
def path(request):
    with _runtime.use(request.param):
        yield


def test_by_hand(path):
    """silu(0) = 0; a large gate multiplies, a large negative one closes."""
    gate = torch.tensor([0.0, 100.0, -200.0, float("nan")], requires_grad=True)
    up = torch.tensor([3.0, 3.0, 3.0, 3.0], requires_grad=True)
    y = swiglu(gate, up)
    y.backward(torch.ones(4))
    torch.testing.assert_close(y, torch.tensor([0.0, 300.0, 0.0, torch.nan]), equal_nan=True)
    expected = torch.tensor([1.5, 3.0, 0.0, torch.nan])  # silu'(0) = 1/2
    torch.testing.assert_close(gate.grad, expected, equal_nan=True)
    expected = torch.tensor([0.0, 100.0, 0.0, torch.nan])
    torch.testing.assert_close(up.grad, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_mixed_dtypes_are_promoted(path, first, second, result):
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(40, 50, generator=generator).to(t) for t in (first, second))
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    for y in (swiglu(gate, up), swiglu(gate.requires_grad_(), up.requires_grad_())):
        assert y.dtype == result
        assert_one_rounding(y, exact)
    y.sum().backward()
    assert (gate.grad.dtype, up.grad.dtype) == (first, second)


@pytest.mark.parametrize(
    ("up", "match"),
    [
        (None, "swiglu: up is a NoneType; pass a tensor"),
        (torch.ones(4), r"swiglu: up has shape \[4\] and gate has \[3, 4\]. Pass \[3, 4\]"),
        (torch.ones(3, 4, dtype=torch.int64), "swiglu: up is torch.int64; allowed are"),
        (torch.ones(3, 4, device="meta"), "swiglu: up is on meta and gate on cpu"),
    ],
)
def test_errors(up, match):
    with pytest.raises((TypeError, ValueError), match=match):
        swiglu(torch.ones(3, 4), up)
