"""A backward pass under vmap against one pass after the other."""

import torch


def assert_backward_under_vmap(output, leaves):
    """Check ``is_grads_batched``, ``torch.vmap`` and vmap in vmap over one backward pass."""
    grads = torch.randn(2, 2, *output.shape).to(output.dtype)

    def backward(grad, **options):
        return torch.autograd.grad(output, leaves, grad, retain_graph=True, **options)

    wanted = [torch.stack(each) for each in zip(*map(backward, grads.flatten(0, 1)), strict=True)]
    found = backward(grads.flatten(0, 1), is_grads_batched=True)
    torch.testing.assert_close(list(found), wanted)
    found = torch.vmap(backward)(grads.flatten(0, 1))
    torch.testing.assert_close(list(found), wanted)
    found = torch.vmap(torch.vmap(backward))(grads)
    torch.testing.assert_close([each.flatten(0, 1) for each in found], wanted)
