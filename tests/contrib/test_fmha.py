"""``apex.contrib.fmha`` and ``fmhalib`` against attention composed in float64."""

from types import SimpleNamespace

import fmhalib
import pytest
import torch

from apex import _compat
from apex.contrib.fmha import FMHA, FMHAFun
from apex.contrib.fmha.fmha import attention
from tests.tolerance import (
    ATTENTION_GRADIENTS,
    PRODUCTS,
    TORCH_IN_FLOAT64,
    assert_close_in_rms,
    assert_close_to_largest,
    each,
)

HEADS, SIZE = 2, 8
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = [[5, 3, 3, 0, 1], [4], [0], []]


def data(lengths, dtype, behind=2):
    """qkv with tokens behind the last sequence, ends, and the gradient of the output."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    shape = (int(ends[-1]) + behind, 4, HEADS, SIZE)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x[:, :3].to(dtype), ends, x[:, 3].to(dtype)


def exact(qkv, ends, dy, keep=None, scale=1.0):
    """Output and gradient, for dropout with a mask of each sequence."""
    qkv, found = qkv.detach().double().requires_grad_(), []
    for i, (start, stop) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        q, k, v = qkv[start:stop].permute(1, 2, 0, 3)
        p = (q @ k.mT * SIZE**-0.5).softmax(-1)
        p = p if keep is None else p * keep[i, :, : stop - start, : stop - start] * scale
        found.append((p @ v).transpose(0, 1))
    y = torch.cat([*found, qkv[int(ends[-1]) :, 0] * 0])
    return y.detach(), torch.autograd.grad(y, qkv, dy.double())[0]


def agree(found, wanted):
    dtype = found[0].dtype
    if not wanted[0].any():
        assert not any(x.any() for x in found)
    elif dtype == torch.float64:
        each(assert_close_to_largest, found, wanted, TORCH_IN_FLOAT64)
    else:
        assert_close_in_rms(found[0], wanted[0], PRODUCTS[dtype])
        assert_close_in_rms(found[1], wanted[1], ATTENTION_GRADIENTS[dtype])


def test_where_all_is_dropped_output_and_gradient_are_zero():
    qkv, ends, dy = data([5, 3], torch.float32)
    y = attention(qkv.requires_grad_(), ends, 1.0, 5, True)
    assert not y.any()
    assert not torch.autograd.grad(y, qkv, dy)[0].any()


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sequences_of_any_length(lengths, dtype):
    """What is behind the last one gets 0, and takes no part."""
    qkv, ends, dy = data(lengths, dtype)
    config = SimpleNamespace(
        hidden_size=HEADS * SIZE, num_attention_heads=HEADS, attention_probs_dropout_prob=0.5
    )
    flat = qkv.flatten(1).requires_grad_()
    y = FMHA(config)(flat, ends, 5, is_training=False)
    found = (y.detach(), torch.autograd.grad(y, flat, dy.flatten(1))[0])
    wanted = [x.flatten(1) for x in exact(qkv, ends, dy)]
    assert (y.shape, y.dtype) == (wanted[0].shape, dtype)
    agree(found, wanted)
    y, probabilities = fmhalib.fwd(qkv, ends, 0.5, 6, False, False, True, None)
    assert probabilities.shape == (len(lengths), HEADS, 6, 6)
    dqkv, _, dkv = fmhalib.bwd_nl(dy, qkv, probabilities, ends, 0.0, 6, True)
    assert torch.equal(dkv[:, 0], dqkv[:, 1:])
    agree((y.flatten(1), dqkv.flatten(1)), wanted)


def test_dropout_of_the_compiled_module():
    """The sign bit of a probability tells that it was dropped, also if it is 0."""
    qkv, ends, dy = data([5, 3], torch.float64)
    qkv[0, 0] *= 1e4
    args = (qkv, ends, 0.4, 5, True, True, False)
    y, signed = fmhalib.fwd(*args, torch.Generator().manual_seed(1))
    keep = ~signed.signbit()
    wanted = exact(qkv, ends, dy, keep, 1 / 0.6)
    agree((y, fmhalib.bwd(dy, qkv, signed, ends, 0.4, 5, False)[0]), wanted)
    assert 0.1 < 1 - keep[:1].double().mean() < 0.6
    assert (signed == 0).logical_and(~keep).any()
    again = fmhalib.fwd(*args, torch.Generator().manual_seed(1))
    assert torch.equal(again[1], signed)
    assert not fmhalib.fwd(qkv, ends, 1.0, 5, True, False, False, None)[0].any()


def test_calls_of_2020():
    """Without ``is_nl`` and ``zero_tensors``; the gradient as a batch of equal lengths."""
    qkv, ends, dy = data([4, 4], torch.float64, behind=0)
    new = fmhalib.fwd(qkv, ends, 0.4, 4, True, False, False, torch.Generator().manual_seed(1))
    for function in (fmhalib.fwd, fmhalib.fwd_nl):
        old = function(qkv, ends, 0.4, 4, True, torch.Generator().manual_seed(1))
        assert all(map(torch.equal, old, new))
    given = (qkv, new[1], ends, 0.4, 4)
    wanted = fmhalib.bwd_nl(dy, *given, False)
    batch = dy.view(2, 4, *dy.shape[1:])
    assert all(map(torch.equal, fmhalib.bwd(batch, *given), wanted[:2]))
    assert all(map(torch.equal, fmhalib.bwd_nl(batch, *given), wanted))
    y, probabilities = fmhalib.fwd(qkv, ends, 0.0, 4, True, None)
    agree((y, fmhalib.bwd(dy, qkv, probabilities, ends, 0.0, 4)[0]), exact(qkv, ends, dy))


def test_dropout_is_reproducible_and_its_gradient_that_of_the_same_one():
    """Also of the autograd function, whose backward may be called again."""
    qkv, ends, dy = data([5, 5, 3], torch.float64)
    leaf, found = qkv.requires_grad_(), []
    for function in (attention, FMHAFun.apply, Own.apply):
        torch.manual_seed(5)
        y = function(leaf, ends, 0.3, 5, True, False)
        grads = [torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for _ in range(2)]
        found.append((y.detach(), *grads))
    assert torch.equal(found[0][1], found[0][2])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert not torch.equal(found[0][0], attention(leaf, ends, 0.3, 5, True))
    # A direction in which the output is linear: the values, with the probabilities as they were.
    torch.manual_seed(5)
    shifted = qkv.detach() + torch.tensor([0.0, 0.0, 1.0])[:, None, None]
    change = attention(shifted, ends, 0.3, 5, True) - found[0][0]
    torch.testing.assert_close((change * dy).sum(), found[0][1][:, 2].sum())


class Own(FMHAFun):
    """With a forward of its own, which calls Apex's."""

    forward = staticmethod(FMHAFun.forward)


def test_one_call_for_all_sequences_where_torch_has_it(monkeypatch):
    """In place of the kernel, which needs a GPU, the definition; what is passed to it."""
    qkv, ends, dy = data([5, 3, 0], torch.float32)
    leaf, calls = qkv.requires_grad_(), []

    def varlen(x, given, longest):
        calls.append((len(x), given.tolist(), longest))
        monkeypatch.setattr(_compat, "has_varlen_attention", lambda x: False)
        return attention(x, given, 0.0, longest, True)

    wanted = attention(leaf, ends, 0.0, 6, True)
    monkeypatch.setattr(_compat, "has_varlen_attention", lambda x: True)
    monkeypatch.setattr(_compat, "varlen_attention", varlen)
    y = attention(leaf, ends, 0.5, 6, False)
    assert calls == [(8, [0, 5, 8, 8], 5)]
    assert torch.equal(y, wanted)
    grads = [torch.autograd.grad(each, leaf, dy)[0] for each in (y, wanted)]
    assert torch.equal(*grads)


@pytest.mark.exhaustive  # 2 s
@pytest.mark.skipif(not _compat.IS_2_13, reason="needs torch 2.13")
def test_the_call_for_all_sequences_has_the_arguments_of_torchs():
    """Shapes alone: without memory it runs anywhere."""
    qkv = torch.empty(8, 3, HEADS, SIZE, dtype=torch.half, device="meta", requires_grad=True)
    y = _compat.varlen_attention(qkv, torch.empty(4, dtype=torch.int64, device="meta"), 5)
    assert (y.shape, y.dtype) == ((8, HEADS, SIZE), torch.half)
    (dqkv,) = torch.autograd.grad(y, qkv, torch.empty_like(y))
    assert dqkv.shape == qkv.shape


def test_autocast_casts_all_tokens():
    qkv, ends, _ = data([5, 3], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(qkv, ends, 0.0, 5, True)
    assert torch.equal(y, attention(qkv.bfloat16(), ends, 0.0, 5, True))


def test_second_derivatives_with_the_composed_kernel():
    qkv, ends, _ = data([3, 2], torch.float64, behind=0)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            lambda x: attention(x, ends, 0.0, 3, True), qkv[:, :, :1, :2].requires_grad_()
        )


def test_what_is_refused():
    qkv, ends, _ = data([5, 3], torch.float32)
    for given, said in (
        ((qkv, ends, 0.1, 4, True), "max_s is 4 and the longest sequence has 5"),
        ((qkv, ends + 1, 0.1, 5, True), r"cu_seqlens is \[1, 6, 9\] for 10 tokens"),
        ((qkv[:7], ends, 0.1, 5, True), r"cu_seqlens is \[0, 5, 8\] for 7 tokens"),
        ((qkv, ends.flip(0) - 8, 0.1, 5, True), r"cu_seqlens is \[0, -3, -8\]"),
        ((qkv, ends[:0], 0.1, 5, True), r"cu_seqlens is \[\] for 10"),
        ((qkv, ends.float(), 0.1, 5, True), "cu_seqlens is torch.float32"),
        ((qkv.flatten(1), ends, 0.1, 5, True), r"qkv has shape \[10, 48\]"),
        ((qkv, ends, 1.5, 5, True), "p_dropout is 1.5"),
    ):
        with pytest.raises(ValueError, match=said):
            attention(*given)
        with pytest.raises(ValueError, match=f"fmhalib.fwd: {said}"):
            fmhalib.fwd(*given, False, False, None)
    with pytest.raises(ValueError, match="zero_tensors is None"):
        attention(qkv, ends, 0.1, 5, True, None)
    with pytest.raises(ValueError, match=r"dout has shape \[9, 2, 8\]"):
        fmhalib.bwd(qkv[:9, 0], qkv, torch.zeros(2, HEADS, 5, 5), ends, 0.0, 5, False)
    with pytest.raises(ValueError, match=r"softmax has shape \[1, 2, 5, 5\]"):
        fmhalib.bwd(qkv[:, 0], qkv, torch.zeros(1, HEADS, 5, 5), ends, 0.0, 5, False)
    config = SimpleNamespace(hidden_size=7, num_attention_heads=2, attention_probs_dropout_prob=0.0)
    with pytest.raises(ValueError, match="hidden_size is 7 and num_attention_heads 2"):
        FMHA(config)
