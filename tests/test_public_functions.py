"""What holds for the public functions of every operation of the catalogue."""

import pytest
import torch

from apex.bench.catalogue.ops import OPS

CALLS = [op for op in OPS if op.small and op.name != "layer_norm, fast"]  # makes a layer


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize("entry", CALLS, ids=lambda entry: entry.name)
def test_a_call_is_one_graph_of_torch_compile(entry):
    leaves, rest = entry.inputs(entry.small[0], torch.float32, torch.device("cpu"))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    torch._dynamo.reset()
    compiled = torch.compile(entry.ours, fullgraph=True, backend="aot_eager")
    y, expected = compiled(*leaves, *rest), entry.ours(*leaves, *rest)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(z.square().sum(), leaves) for z in (y, expected)]
    torch.testing.assert_close(*grads)
