"""``apex.contrib.clip_grad``: torch's function, for all dtypes and without waiting."""

import pytest
import torch

from apex.contrib.clip_grad import clip_grad_norm_
from tests.multi_tensor_apply.common import FLOATS, PATHS, exact, joined, on, tensors
from tests.tolerance import assert_one_rounding

SHAPES = (1, 7, 0, 1030)


def parameters(kinds=(torch.float32,) * 4, scale=1.0):
    params = [torch.nn.Parameter(x) for x in tensors(SHAPES, kinds)]
    for param, grad in zip(params, tensors(SHAPES, kinds, 1, scale), strict=True):
        param.grad = grad
    return params


def grads(params):
    return [param.grad for param in params]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "norm_type", "limit"),
    [
        *((kind, 2, 0.5) for kind in (*FLOATS, torch.float64)),
        (torch.float32, 2.0, 1e4),
        (torch.float32, float("inf"), torch.tensor(0.5)),
        (torch.float64, 1.0, 0.5),
    ],
)
def test_against_float64(kind, norm_type, limit, path):
    params = parameters((kind,) * 4)
    before = exact(grads(params))
    norm = torch.linalg.vector_norm(joined(before), norm_type)
    coefficient = (limit / (norm + 1e-6)).clamp(max=1)
    with on(path):
        found = clip_grad_norm_(params, limit, norm_type)
    assert found.shape == ()
    assert_one_rounding(found, norm)
    if norm_type != 1.0:
        for grad, old in zip(grads(params), before, strict=True):
            wanted = coefficient * old
            assert_one_rounding(grad, wanted, interpreted=path == "triton")


@pytest.mark.parametrize("path", PATHS)
def test_mixed_dtypes(path):
    params = parameters((torch.float32, torch.float16, torch.float32, torch.bfloat16))
    before = exact(grads(params))
    norm = joined(before).norm()
    with on(path):
        assert_one_rounding(clip_grad_norm_(iter(params), 0.25), norm)
    for grad, old in zip(grads(params), before, strict=True):
        assert_one_rounding(grad, 0.25 / (norm + 1e-6) * old, interpreted=path == "triton")


def test_like_torch():
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params[1].grad = None
    norms = clip_grad_norm_(ours, 0.5), torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    assert_one_rounding(norms[0], norms[1].double())
    assert ours[1].grad is None
    alone = torch.nn.Parameter(torch.zeros(2))
    alone.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(alone, 1e4).item() == 5
    assert alone.grad.tolist() == [3.0, 4.0]  # within the limit
    assert clip_grad_norm_(alone, 1.0).item() == 5


def test_without_gradients():
    assert torch.equal(clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0), torch.tensor(0.0))
    assert clip_grad_norm_([], 1.0).item() == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_finite(path, bad):
    params = parameters()
    params[3].grad[700] = bad
    before = [grad.clone() for grad in grads(params)]
    with on(path):
        with pytest.raises(RuntimeError, match="norm of order 2.0 .* is non-finite"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        same = zip(before, grads(params), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in same)
        assert not clip_grad_norm_(params, 1.0).isfinite()
    assert not params[0].grad.any() or params[0].grad.isnan().all()


def test_nothing_waits():
    params = [torch.nn.Parameter(torch.zeros(3, device="meta", dtype=kind)) for kind in FLOATS]
    for param in params:
        param.grad = torch.ones_like(param)
    for norm_type in (2.0, float("inf")):
        assert clip_grad_norm_(params, 1.0, norm_type).device.type == "meta"


def test_sparse_gradients_take_the_slow_way():
    param = torch.nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.sparse_coo_tensor([[1]], [[3.0, 4.0]], (3, 2), check_invariants=True)
    try:
        theirs = torch.nn.utils.get_total_norm([param.grad])
    except (NotImplementedError, RuntimeError) as error:
        with pytest.raises(type(error)):
            clip_grad_norm_([param], 1.0)
    else:
        assert clip_grad_norm_([param], 1.0).item() == theirs.item()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [1.0, 3.0])
def test_other_norms_of_16_bits_are_float32(kind, norm_type):
    """torch's has the gradients' dtype: that of 100,000 float16 ones is inf, and clips to 0."""
    params = [torch.nn.Parameter(torch.ones(size, dtype=kind)) for size in (50_000, 50_000)]
    for param in params:
        param.grad = torch.ones_like(param)
    norm = clip_grad_norm_(params, 5e4, norm_type)
    assert norm.dtype == torch.float32
    exact_norm = torch.tensor(1e5, dtype=torch.float64) ** (1 / norm_type)
    assert_one_rounding(norm, exact_norm, added=100_000)
    assert params[0].grad.eq(0.5 if norm_type == 1 else 1).all()


@pytest.mark.parametrize("path", PATHS)
def test_complex_gradients_as_torch_clips_them(path):
    results = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        param = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        param.grad = torch.tensor([3 + 4j, 0, 12j])
        with on(path):
            norm = clip([param], 1.0)
        results.append((norm, param.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_refused():
    param = torch.nn.Parameter(
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    )
    param.grad = param.detach().clone()
    with pytest.raises(TypeError, match="clip_grad_norm_: parameter 0 is a nested tensor"):
        clip_grad_norm_([param], 1.0)
