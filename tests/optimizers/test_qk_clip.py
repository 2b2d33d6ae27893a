"""``qk_clip_`` and ``max_attention_logits`` beside logits in float64."""

import pytest
import torch
from torch.distributed.tensor import DTensor, init_device_mesh

from apex.optimizers import FusedAdam, max_attention_logits, qk_clip, qk_clip_
from tests.tolerance import ATTENTION_LOGITS, errors_in_eps

HEADS, DIM, WIDTH, LENGTH = 4, 8, 16, 12
SCALE = DIM**-0.5


def _random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _logits(x, query, key, groups):
    """The logits ``(batch, heads, queries, keys)`` of weights and biases, in float64."""
    q, k = (
        (x @ w.double().T + b.double()).unflatten(-1, (-1, DIM)).transpose(1, 2)
        for w, b in (query, key)
    )
    return q @ k.repeat_interleave(HEADS // groups, 1).mT * SCALE


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_logits_of_a_head_are_scaled_to_the_threshold(groups, dtype):
    x = _random(3, LENGTH, WIDTH)
    fused = _random((HEADS + groups) * DIM, WIDTH + 1, seed=1).to(dtype)
    fused[:DIM] *= 5
    parts = fused.requires_grad_().detach().split([HEADS * DIM, groups * DIM])
    query, key = ((part[:, 1:], part[:, 0]) for part in parts)
    before = _logits(x, query, key, groups).detach()
    largest = before.amax((0, 2, 3))
    threshold = float(largest.sort().values[1:3].mean())
    factor = qk_clip_(query, list(key), largest.to(dtype), threshold=threshold, key_heads=groups)
    exact = (threshold / largest.to(dtype).double()).clamp(max=1.0)
    assert (exact < 1.0).tolist().count(True) == 2
    assert errors_in_eps(factor, exact) <= ATTENTION_LOGITS
    after, expected = _logits(x, query, key, groups), before * exact.view(-1, 1, 1)
    for head in range(HEADS):
        assert errors_in_eps(after[:, head], expected[:, head], dtype) <= ATTENTION_LOGITS


def test_other_heads_keep_their_bits_and_without_a_large_logit_nothing_is_written():
    query, key = (_random(HEADS * DIM, WIDTH, seed=n).float().requires_grad_() for n in (1, 2))
    before = query.detach().clone(), key.detach().clone(), query._version
    largest = torch.tensor([99.0, 100.0, torch.inf, torch.nan])
    assert qk_clip_(query, key, largest).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert query._version == before[2]
    assert qk_clip_(query, key, torch.tensor([99.0, 400.0, -5.0, 0.0])).tolist() == [1, 0.25, 1, 1]
    for now, then in zip((query, key), before, strict=False):
        expected = then.clone()
        expected[DIM : 2 * DIM] *= 0.5
        assert torch.equal(now, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("piece", [1, 2**24, 3 * 2 * HEADS * LENGTH])
def test_the_largest_logit_of_each_head(is_causal, groups, piece, monkeypatch):
    monkeypatch.setattr(qk_clip, "PIECE", piece)
    query, key = _random(2, HEADS, LENGTH, DIM), _random(2, groups, LENGTH, DIM, seed=1)
    logits = query @ key.repeat_interleave(HEADS // groups, 1).mT
    if is_causal:
        logits[..., ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()] = -torch.inf
    exact = logits.amax((0, 2, 3))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for scale in (None, 2.0):
            given = query.to(dtype), key.to(dtype)
            found = max_attention_logits(*given, is_causal=is_causal, scale=scale)
            expected = exact * (scale or SCALE)
            assert found.dtype == torch.promote_types(dtype, torch.float32)
            assert errors_in_eps(found, expected, dtype) <= ATTENTION_LOGITS
    found = max_attention_logits(query[0], key[0], is_causal=is_causal)
    assert errors_in_eps(found, logits[0].amax((1, 2)) * SCALE) <= ATTENTION_LOGITS


MASTERS = {"master_weights": True, "capturable": True}


@pytest.mark.parametrize("options", [MASTERS, {"storage": "low_bits"}], ids=str)
def test_masters_and_low_bits_follow(options):
    """The step after a clip starts from the clipped weight."""
    query, key = (torch.nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = FusedAdam([query, key], lr=2.0**-12, weight_decay=0.0, **options)
    for _ in range(2):
        query.grad = key.grad = torch.ones_like(query)
        optimizer.step()
        qk_clip_(query, key, torch.tensor([50.0, 400.0]))
    assert query[:2].eq(1.0).all()
    assert query[2:].eq(0.25).all()


def test_a_distributed_weight_is_refused(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        weight = DTensor.from_local(torch.ones(4, 2), init_device_mesh("cpu", (1,)))
        with pytest.raises(
            TypeError,
            match="a weight is a DTensor; pass a plain tensor with the rows of whole heads",
        ):
            qk_clip_(weight, weight, torch.ones(2))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key_heads": 2}, "2 key heads do not divide 3 heads"),
        ({"threshold": 0.0}, "threshold was 0.0; pass a number above 0"),
        ({}, r"the rows of a weight of shape \(4, 2\) are not divisible by 3 heads"),
    ],
)
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(ValueError, match="query has 2 dimensions and key 3; pass "):
        max_attention_logits(torch.ones(5, 2), torch.ones(2, 5, 2))
    with pytest.raises(ValueError, match=said):
        qk_clip_(torch.ones(6, 2), torch.ones(4, 2), torch.ones(3), **options)
    with pytest.raises(ValueError, match="max_attention_logits: 2 key heads do not divide 3 heads"):
        max_attention_logits(torch.ones(3, 5, 2), torch.ones(2, 5, 2))


def test_factors_of_narrow_logits_are_float32():
    """A head below the threshold keeps its logits, and its group's key is scaled."""
    query, key = torch.ones(2, 1), torch.ones(1, 1)
    logits = torch.tensor([200.0, 1.0], dtype=torch.bfloat16)
    wide = [torch.ones(2, 1), torch.ones(1, 1)]
    found = qk_clip_(query, key, logits, key_heads=1)
    assert torch.equal(found, qk_clip_(*wide, logits.float(), key_heads=1))
    assert torch.equal(query, wide[0])
