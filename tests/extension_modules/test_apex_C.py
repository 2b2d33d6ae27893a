"""``apex_C``: one tensor from many, and back."""

import apex_C
import pytest
import torch


def test_flatten_and_back():
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 4), torch.randn(5).view(5, 1)]
    flat = apex_C.flatten(tensors)
    assert torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in tensors]))
    back = apex_C.unflatten(flat, tensors)
    assert isinstance(back, list)
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(back, tensors, strict=True))
    back[0].zero_()  # views
    assert torch.equal(flat[:6], torch.zeros(6))
    assert torch.equal(flat[6], tensors[1])


def test_one_tensor_alone_is_viewed():
    """As in torch's own helper, which the original calls."""
    tensor = torch.ones(1, 3)
    flat = apex_C.flatten([tensor])
    assert flat.shape == (3,)
    assert flat.data_ptr() == tensor.data_ptr()


def test_too_short():
    with pytest.raises(RuntimeError, match="needs 4 elements; flat has 3"):
        apex_C.unflatten(torch.ones(3), [torch.ones(4)])
