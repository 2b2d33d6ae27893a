"""``fused_rotary_positional_embedding``: positional functions of compiled Apex."""

import fused_rotary_positional_embedding as rope
import pytest
import torch

from apex.transformer import functional


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


FREQS = random(6, 1, 1, 8)
ROWS, COLUMNS = FREQS[:2].transpose(0, 1), FREQS[:3].transpose(0, 1)
PLACES = ROWS.cos(), ROWS.sin(), COLUMNS.cos(), COLUMNS.sin()
BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "function", "shape", "args"),
    [
        ("", functional.fused_apply_rotary_pos_emb, (6, 2, 3, 12), (FREQS, True)),
        ("", functional.fused_apply_rotary_pos_emb, (6, 2, 3, 12), (FREQS, False)),
        (
            "_cached",
            functional.fused_apply_rotary_pos_emb_cached,
            (6, 2, 3, 12),
            (FREQS.cos(), FREQS.sin(), True),
        ),
        ("_thd", functional.fused_apply_rotary_pos_emb_thd, (6, 3, 12), (BOUNDS, FREQS)),
    ],
)
def test_both_ways(name, function, shape, args, dtype):
    t, dy = random(*shape, dtype=dtype).requires_grad_(), random(*shape, seed=1, dtype=dtype)
    expected = function(t, *args)
    y = getattr(rope, f"forward{name}")(t, *args)
    grad = getattr(rope, f"backward{name}")(dy, *args)
    assert not y.requires_grad
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(grad, *torch.autograd.grad(expected, t, dy))
    assert args[-1] is not True or grad.transpose(0, 1).is_contiguous()


def test_images_have_rows_and_columns_as_dimensions():
    t, dy = random(2, 2, 3, 4, 16).requires_grad_(), random(2, 2, 3, 4, 16, seed=1)
    expected = functional.fused_apply_rotary_pos_emb_2d(t.flatten(1, 2), 2, 3, *PLACES)
    assert torch.equal(rope.forward_2d(t, *PLACES), expected)
    (wanted,) = torch.autograd.grad(expected, t, dy.flatten(1, 2))
    found = rope.backward_2d(dy, *PLACES)
    assert found.shape == (2, 6, 4, 16)
    torch.testing.assert_close(found.view(2, 2, 3, 4, 16), wanted)


def test_bad_input():
    with pytest.raises(ValueError, match=r"the images are \[2, 6, 3, 16\]. Pass \[b, ih, iw, h, d"):
        rope.forward_2d(random(2, 6, 3, 16), *PLACES)
    with pytest.raises(TypeError, match=r"the images are NoneType. Pass \[b, ih, iw, h, d"):
        rope.backward_2d(None, *PLACES)
