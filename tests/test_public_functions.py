"""What holds for the public functions of every operation of the catalogue."""

import pytest
import torch
from torch import Tensor

from apex.catalogue.ops import OPS
from apex.contrib.focal_loss import focal_loss
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.transformer.functional import fused_apply_rotary_pos_emb, fused_softmax

CALLS = [op for op in OPS if op.checked.small and op.name != "layer_norm, fast"]  # makes a layer


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's
@pytest.mark.parametrize("entry", CALLS, ids=lambda entry: entry.name)
@pytest.mark.slow
def test_a_call_is_one_graph_of_torch_compile(entry):
    leaves, rest = entry.inputs(entry.checked.small[0], torch.float32, torch.device("cpu"))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    torch._dynamo.reset()
    compiled = torch.compile(entry.ours, fullgraph=True, backend="aot_eager")
    y, expected = compiled(*leaves, *rest), entry.ours(*leaves, *rest)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(z.square().sum(), leaves) for z in (y, expected)]
    torch.testing.assert_close(*grads)


def script_cross_entropy(x: Tensor, index: Tensor):
    return SoftmaxCrossEntropyLoss.apply(x, index, 0.1, -1, True)


def script_focal_loss(x: Tensor, index: Tensor):
    return focal_loss(x, index, torch.ones(1), 6, 0.25, 2.0, 0.1)


def script_index_mul_2d(x: Tensor, index: Tensor):
    return index_mul_2d(x, x, index)


def script_rotary(x: Tensor, index: Tensor):
    freqs = torch.ones(8, 1, 1, 4)
    return fused_apply_rotary_pos_emb(x[:, None, None], freqs, False)


def script_softmaxes(x: Tensor, index: Tensor):
    y = fused_softmax.scaled_masked_softmax(x[None, None], x[None, None] > 0.5, 0.3)
    y = fused_softmax.generic_scaled_masked_softmax(y, None, 1.0)
    return fused_softmax.scaled_upper_triang_masked_softmax(y, None, 1.0)


CALLERS = [
    script_cross_entropy, script_focal_loss, script_index_mul_2d, script_rotary, script_softmaxes
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("caller", CALLERS)
def test_scripted_and_traced_programs_call_them(caller):
    """Sizes may be others than in the call that was traced."""
    x, index = torch.randn(8, 8, requires_grad=True), torch.arange(8) % 6
    for program in (torch.jit.script(caller), torch.jit.trace(caller, (x, index))):
        for size in (8, 6):
            given = x[:size, :size], index[:size]
            found, y = program(*given), caller(*given)
            torch.testing.assert_close(found, y)  # few logits run in float64, where not traced
            grads = [torch.autograd.grad(z.square().sum(), x)[0] for z in (found, y)]
            torch.testing.assert_close(*grads)
