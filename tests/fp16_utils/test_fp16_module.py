"""The float16 wrapper of the first releases."""

import typing

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from apex.fp16_utils.fp16util import FP16_Module, fp16_to_fp32, fp32_to_fp16


class Pair(typing.NamedTuple):
    x: torch.Tensor
    label: str


class Echo(torch.nn.Module):
    """Returns what it was called with."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, *inputs, **kwargs):
        return [*inputs, kwargs]


def test_conversions_keep_containers_and_other_dtypes():
    other = [torch.ones(1, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)]
    value = (torch.ones(2), [torch.ones(3), Pair(torch.ones(4), "x"), *other], {"a": 1}, None)
    half = fp32_to_fp16(value)
    assert type(half) is tuple
    assert type(half[1]) is list
    assert (half[0].dtype, half[1][0].dtype, half[1][1].x.dtype) == (torch.float16,) * 3
    assert type(half[1][1]) is Pair
    assert half[1][1].label == "x"
    assert all(new is old for new, old in zip(half[1][2:], other, strict=True))
    assert half[2:] == ({"a": 1}, None)
    back = fp16_to_fp32(half)
    assert (back[0].dtype, back[1][0].dtype, back[1][1].x.dtype) == (torch.float32,) * 3
    assert all(new is old for new, old in zip(back[1][2:], other, strict=True))


def test_packed_sequences():
    packed = fp32_to_fp16(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]))
    assert type(packed) is PackedSequence
    assert (packed.data.dtype, packed.batch_sizes.dtype) == (torch.float16, torch.int64)


def test_conversions_are_differentiated():
    x = torch.ones(2, requires_grad=True)
    (3 * fp16_to_fp32(fp32_to_fp16([x]))[0]).sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [3.0, 3.0])


def test_module():
    model = FP16_Module(Echo())
    assert [*model.state_dict()][:2] == ["module.norm.weight", "module.norm.bias"]
    assert model.module.norm.weight.dtype == torch.float16
    ids, keyword = torch.tensor([7]), torch.ones(1)
    seen = []
    model.module.register_forward_pre_hook(lambda module, args: seen.extend(args))
    (x, y), found_ids, kwargs = model((torch.ones(2), torch.ones(2)), ids, keyword=keyword)
    assert [x.dtype for x in seen[0]] == [torch.float16] * 2
    assert (x.dtype, y.dtype) == (torch.float32,) * 2
    assert found_ids is ids
    assert kwargs["keyword"] is keyword
