"""``fused_index_mul_2d``: positional functions of compiled Apex."""

import fused_index_mul_2d
import pytest
import torch

from apex.ops import _runtime
from tests.tolerance import assert_one_rounding

KINDS = {"float": (torch.float32, torch.bfloat16, torch.float64), "half": (torch.float16,)}


def data(dtype):
    generator = torch.Generator().manual_seed(4)
    sizes = {"in1": 6, "in2": 70, "dy": 70, "gg1": 6, "gg2": 70}
    made = {key: torch.randn(n, 40, generator=generator).to(dtype) for key, n in sizes.items()}
    return made, torch.randint(5, (70,), generator=generator)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind in KINDS for dtype in KINDS[kind]], ids=str
)
def test_all_three_functions(kind, dtype, path):
    given, index = data(dtype)
    exact = {key: tensor.double().requires_grad_() for key, tensor in given.items()}
    functions = [
        getattr(fused_index_mul_2d, f"{kind}_{name}")
        for name in ("forward", "backward", "backward_backward")
    ]

    def empty(*keys):
        return [torch.full_like(given[key], torch.nan) for key in keys]

    y = exact["in1"][index] * exact["in2"]
    gradients = torch.autograd.grad(y, (exact["in1"], exact["in2"]), exact["dy"], create_graph=True)
    second = torch.autograd.grad(
        gradients, (exact["dy"], exact["in1"], exact["in2"]), (exact["gg1"], exact["gg2"])
    )
    in1, in2, dy = given["in1"], given["in2"], given["dy"]
    with _runtime.use(path):
        (out,), grads, seconds = empty("in2"), empty("in1", "in2"), empty("dy", "in1", "in2")
        assert functions[0](out, in1, in2, index) is None
        functions[1](*grads, dy, in1, in2, index)
        functions[2](*seconds, dy, given["gg1"], given["gg2"], in1, in2, index)
    for found, wanted in zip(
        [out, *grads, *seconds], [y, *gradients, *second], strict=True
    ):  # fmt: skip
        assert_one_rounding(found, wanted.detach(), interpreted=path == "triton", added=70)


def test_bad_input():
    given, index = data(torch.float32)
    out, in1, in2 = torch.zeros(70, 40), given["in1"], given["in2"]
    with pytest.raises(ValueError, match=r"forward: out has shape \[69, 40\] and in2 has \[70, 40"):
        fused_index_mul_2d.float_forward(out[1:], in1, in2, index)
    with pytest.raises(ValueError, match=r"backward: grad_in1 has shape \[70, 40\] and in1 has"):
        fused_index_mul_2d.float_backward(out, out, in2, in1, in2, index)
    with pytest.raises(IndexError, match=r"backward: idx1\[0\] is -1; allowed are 0 to 5"):
        fused_index_mul_2d.half_backward(in1.clone(), out, in2, in1, in2, index * 0 - 1)
    with pytest.raises(TypeError, match="out is torch.int64"):
        fused_index_mul_2d.float_forward(out.long(), in1, in2, index)
    assert not out.any()
