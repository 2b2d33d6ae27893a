"""``apex.contrib.group_norm``: the layer and functions; what is computed: tests/ops."""

import pytest
import torch
import torch.nn.functional as F

from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm.group_norm import (
    cuda_group_norm_nhwc_one_pass,
    cuda_group_norm_nhwc_two_pass,
    cuda_group_norm_v2_nhwc,
    get_cc_and_sm_count,
    torch_group_norm,
)
from tests.tolerance import assert_one_rounding


def test_layer_is_a_drop_in():
    layer = GroupNorm(4, 8, 1e-3, dtype=torch.float64, act="SiLU")
    theirs = torch.nn.GroupNorm(4, 8, 1e-3, dtype=torch.float64)
    torch.nn.init.normal_(theirs.weight)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, 5, dtype=torch.float64)
    assert torch.equal(layer(x), F.silu(theirs(x)))
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.ones_like(layer.weight))
    assert repr(layer) == "GroupNorm(4, 8, eps=0.001, affine=True, act=silu)"
    assert repr(GroupNorm(4, 8)) == "GroupNorm(4, 8, eps=1e-05, affine=True)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layer_keeps_dtype_and_layout(dtype):
    x = torch.randn(2, 8, 3, 4).to(dtype).contiguous(memory_format=torch.channels_last)
    y = GroupNorm(4, 8, act="silu")(x)
    assert (y.dtype, y.is_contiguous(memory_format=torch.channels_last)) == (dtype, True)
    assert_one_rounding(y.detach(), F.silu(F.group_norm(x.double(), 4)))
    plain = GroupNorm(4, 8, affine=False)
    assert list(plain.parameters()) == []
    assert_one_rounding(plain(x), F.group_norm(x.double(), 4))


def test_scripted_and_traced():
    layer, x = GroupNorm(2, 4, act="silu"), torch.randn(2, 4, 3, 3)
    assert torch.equal(torch.jit.script(layer)(x), layer(x))
    assert torch.equal(torch.jit.script(torch.nn.Sequential(layer))(x), layer(x))
    assert torch.equal(torch.jit.trace(layer, x)(x), layer(x))

    def functions(x: torch.Tensor, weight: torch.Tensor):
        y = cuda_group_norm_nhwc_two_pass(x, 2, weight, weight, 1e-5)
        return y, torch_group_norm(x, 2, weight, None, 1e-5, "swish")

    weight = torch.rand(4)
    for found, y in zip(torch.jit.script(functions)(x, weight), functions(x, weight), strict=True):
        assert torch.equal(found, y)


def test_lists_of_the_original():
    assert (torch.float16, torch.float32) in GroupNorm.SUPPORTED_DTYPES
    assert len(GroupNorm.SUPPORTED_DTYPES) == 9
    assert (1024, 320) in GroupNorm.GN_V2_SUPPORTED_CHANNELS
    assert len(GroupNorm.GN_V2_SUPPORTED_CHANNELS) == 14
    assert {16, 32} == GroupNorm.SUPPORTED_GROUPS
    assert get_cc_and_sm_count() != ((0, 0), 0) or not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("capability", "count", "enough"),
    [((10, 0), 148, True), ((10, 0), 132, False), ((9, 0), 132, False)],
)
def test_the_fewest_multiprocessors_by_compute_capability(capability, count, enough):
    """As programs ask, with both numbers of ``get_cc_and_sm_count``."""
    fewest = GroupNorm.GN_V2_SUPPORTED_LOWER_BOUND_SM_COUNT
    assert (capability in fewest and count >= fewest[capability]) == enough


@pytest.mark.parametrize(
    "function",
    [cuda_group_norm_nhwc_one_pass, cuda_group_norm_nhwc_two_pass, cuda_group_norm_v2_nhwc],
)
def test_functions_of_the_original(function):
    x, (weight, bias) = torch.randn(2, 8, 3, 4), torch.randn(2, 8)
    y = function(x, 4, weight, bias, 1e-5, "silu")
    assert y.is_contiguous(memory_format=torch.channels_last)
    exact = torch_group_norm(x.double(), 4, weight.double(), bias.double(), 1e-5, "silu")
    assert_one_rounding(y, exact)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: GroupNorm(3, 8), "num_channels must be divisible by num_groups; got 8 and 3"),
        (lambda: GroupNorm(0, 8), "divisible by num_groups; got 8 and 0"),
        (lambda: GroupNorm(2, 8, act="relu"), "act is 'relu'; allowed are 'silu'"),
        (
            lambda: GroupNorm(2, 8)(torch.ones(2, 6, 1, 1)),
            r"weight has shape \[8\] and input has 6",
        ),
    ],
    ids=["odd groups", "no groups", "act", "channels"],
)
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()
