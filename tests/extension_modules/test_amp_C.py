"""``amp_C``: what its functions have in common: names, refusals, flags, no waits, no uploads."""

import amp_C
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.multi_tensor_apply.common import PATHS, exact, joined, no_flag, on, tensors
from tests.tolerance import assert_one_rounding

NUMBERS = {  # what follows the lists, and how many lists there are
    "multi_tensor_scale": (2, (1.0,)),
    "multi_tensor_axpby": (3, (1.0, 1.0, -1)),
    "multi_tensor_l2norm": (1, (False,)),
    "multi_tensor_l2norm_mp": (1, (False,)),
    "multi_tensor_l2norm_scale": (2, (1.0, False)),
    "multi_tensor_unscale_l2norm": (1, (1.0, False)),
    "multi_tensor_sgd": (3, (0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)),
    "multi_tensor_adam": (4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)),
    "multi_tensor_adam_capturable": (4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, 1.0)),
    "multi_tensor_adam_capturable_master": (5, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, 1.0)),
    "multi_tensor_adagrad": (3, (0.1, 1e-8, 0, 0.0)),
    "multi_tensor_novograd": (
        3, (torch.ones(2), 0.1, 0.9, 0.99, 1e-8, 1, 1, 0.0, 1, 0, 2)
    ),
    "multi_tensor_lamb": (4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 0, 1.0, 1.0, None)),
    "multi_tensor_lamb_mp": (
        4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 0, 1.0, 1.0, None, 0.0, 1.0)
    ),
    "multi_tensor_lamb_stage1_cuda": (5, (torch.ones(2), 1, 0.9, 0.99, 1e-8, 1.0, 1.0)),
    "multi_tensor_lamb_stage2_cuda": (2, (torch.ones(2), torch.ones(2), 0.1, 0.1, None)),
}  # fmt: skip
ALL = sorted(NUMBERS)


def call(name, lists, flag=None):
    flag = no_flag() if flag is None else flag
    numbers = [x.clone() if isinstance(x, torch.Tensor) else x for x in NUMBERS[name][1]]
    return getattr(amp_C, name)(65536, flag, lists, *numbers)


def lists_for(name, shapes=(3, 4), **how):
    return [tensors(shapes, seed=seed, **how) for seed in range(NUMBERS[name][0])]


def test_every_function_is_here():
    assert sorted(amp_C.__all__) == sorted([*ALL, "update_scale_hysteresis"])


def test_another_number_of_arguments():
    with pytest.raises(TypeError, match=r"multi_tensor_scale\(\) takes 4 arguments .* got 3"):
        amp_C.multi_tensor_scale(65536, no_flag(), [tensors((3,))] * 2)


@pytest.mark.parametrize("name", ALL)
def test_lists_that_do_not_fit(name):
    lists = lists_for(name)
    for wrong in (lists * 3, []):
        with pytest.raises(RuntimeError, match=r"tensor_lists\.size\(\) != depth"):
            call(name, wrong)
    with pytest.raises(RuntimeError, match=r"tensor_lists\[0\]\.size\(\) is not > 0"):
        call(name, [[] for _ in lists])
    bad = [list(column) for column in lists]
    bad[0][0] = torch.zeros(3, 2).t()
    with pytest.raises(RuntimeError, match=r"A tensor was not contiguous\."):
        call(name, bad)
    bad[0][0] = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"\"{name}\" not implemented for 'Int'"):
        call(name, bad)
    bad = [list(column) for column in lists]
    bad[-1][1] = torch.zeros(4, device="meta")
    with pytest.raises(RuntimeError, match="not on the same device as the first tensor"):
        call(name, bad)


@pytest.mark.parametrize("name", [name for name in ALL if NUMBERS[name][0] > 1])
def test_sizes_that_do_not_fit(name):
    lists = lists_for(name)
    with pytest.raises(RuntimeError, match="Size mismatch among tensor lists"):
        call(name, [*lists[:-1], lists[-1][:1]])
    lists[-1][1] = torch.zeros(5)
    with pytest.raises(RuntimeError, match="Size mismatch: .* has 5 elements; .* has 4"):
        call(name, lists)
    lists[-1][1] = torch.zeros(2, 5)[:, :2].t()  # the layout comes first
    with pytest.raises(RuntimeError, match="not contiguous"):
        call(name, lists)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_refused(name, layout):
    """A strided one would be compared with a dense one, which ends the process."""
    dense = [torch.ones(3) for _ in range(5)]
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)
    lists = [[*dense] for _ in range(NUMBERS[name][0])]
    if name != "multi_tensor_novograd" and "stage" not in name:  # which want a number for each
        call(name, lists)
    lists[-1][1] = nested
    number = len(lists) - 1
    with pytest.raises(TypeError, match=f"{name}, list {number}: tensor 1 is a nested tensor"):
        call(name, lists)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ALL)
def test_empty_tensors_are_passed_over_wherever_they_are(name, path):
    """In the original an empty last tensor kept those before it from being computed."""
    results = []
    for shapes in ((5, 0), (0, 5)):
        lists, flag = lists_for(name, shapes, scale=1.0), no_flag()
        if NUMBERS[name][0] == 1:
            lists[0][shapes.index(5)][2] = float("nan")
        else:
            for column in lists:
                column[shapes.index(5)].copy_(torch.linspace(0.1, 1, 5))
        with on(path):
            call(name, lists, flag)
        results.append((flag.item(), [column[shapes.index(5)] for column in lists]))
    assert results[0][0] == results[1][0] == (NUMBERS[name][0] == 1)
    if NUMBERS[name][0] > 1:
        assert all(map(torch.equal, results[0][1], results[1][1]))
        before = torch.linspace(0.1, 1, 5)
        writes = name not in ("multi_tensor_scale", "multi_tensor_l2norm_scale")  # by 1
        assert not writes or not all(torch.equal(x, before) for x in results[0][1])


@pytest.mark.parametrize("name", ALL)
def test_only_empty_tensors(name):
    call(name, lists_for(name, (0, 0)))


@pytest.mark.parametrize("name", ALL)
def test_nothing_waits(name):
    """On the meta device every reading raises."""
    lists = [[x.to("meta") for x in column] for column in lists_for(name)]
    flag = no_flag(device="meta")
    numbers = list(NUMBERS[name][1])
    keep = {"multi_tensor_sgd": (0, 3, 7), "multi_tensor_scale": (0,)}
    on_device = keep.get(name, ())
    for index in on_device:
        numbers[index] = torch.tensor(numbers[index], device="meta")
    if "capturable" in name or name == "multi_tensor_lamb_mp":
        for index in (0, 4, -1):
            numbers[index] = torch.tensor(numbers[index], device="meta")
    if "lamb" in name and "stage" not in name:
        numbers[9] = torch.tensor(numbers[9], device="meta")
    numbers = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in numbers]
    getattr(amp_C, name)(65536, flag, lists, *numbers)


def test_nothing_waits_for_the_scale():
    one, count = torch.ones(1, device="meta"), torch.ones(1, device="meta", dtype=torch.int32)
    assert amp_C.update_scale_hysteresis(one, count, count, one, 2.0, 0.5, 3, 2) is one


@pytest.mark.parametrize("two", [torch.tensor(2.0), torch.tensor([2]), 2, "numpy"])
def test_numbers_may_be_anything_that_is_one(two):
    if two == "numpy":
        two = pytest.importorskip("numpy").float32(2)
    x, out = tensors((4,)), tensors((4,))
    amp_C.multi_tensor_scale(1, no_flag(), [x, out], two)
    assert torch.equal(out[0], 2 * x[0])


def test_parameters_that_require_gradients_are_written():
    params = [torch.ones(3, requires_grad=True)]
    amp_C.multi_tensor_scale(1, no_flag(), [params, params], 0.5)
    assert params[0].tolist() == [0.5] * 3


@pytest.mark.parametrize("flag", [torch.zeros(()), torch.zeros(1, dtype=torch.uint8)])
def test_the_flag_may_have_any_dtype_and_is_never_cleared(flag):
    amp_C.multi_tensor_scale(1, flag, [[torch.tensor([float("inf")])], tensors((1,))], 1.0)
    assert flag.item() == 1
    amp_C.multi_tensor_scale(1, flag, [tensors((1,)), tensors((1,))], 1.0)
    assert flag.item() == 1
    with pytest.raises(RuntimeError, match="noop_flag is empty"):
        amp_C.multi_tensor_scale(1, torch.zeros(0), [tensors((1,)), tensors((1,))], 1.0)


@pytest.mark.parametrize("path", PATHS)
def test_channels_last(path):
    """One format at a position, or two: elements go by their index."""
    plain = tensors((2 * 3 * 4 * 5,))[0].view(2, 3, 4, 5)
    last = plain.contiguous(memory_format=torch.channels_last)
    for x in (plain, last):
        for out in (torch.zeros_like(plain), torch.zeros_like(last)):
            with on(path):
                amp_C.multi_tensor_scale(1, no_flag(), [[x], [out]], 2.0)
            assert torch.equal(out, 2 * plain)


class Uploads(TorchDispatchMode):
    """Notes what is copied from the host's memory, all of it pageable, to the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if str(operation).startswith(("aten._to_copy.", "aten.copy_.")):
            source = [x for x in args if isinstance(x, torch.Tensor)][-1]
            if source.device.type == "cpu" and out.device.type == "meta":
                self.found.append(source)
        return out


def test_an_upload_is_noted():
    with Uploads() as uploads:
        torch.ones(3).to("meta", non_blocking=True)
    assert len(uploads.found) == 1


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_uploaded(name):
    """Not for two dtypes or empty tensors, nor for numbers and a flag that are on the host."""
    kinds = (torch.float16, torch.float32, torch.float16, torch.float16)
    if name == "multi_tensor_sgd":  # wants one in all of its lists
        kinds = (torch.float16,) * 4
    lists = [tensors((3, 4, 0, 5), kinds) for _ in range(NUMBERS[name][0])]
    lists = [[x.to("meta") for x in column] for column in lists]
    numbers = [
        torch.ones(4, device="meta") if isinstance(number, torch.Tensor) else number
        for number in NUMBERS[name][1]
    ]
    floats = [torch.tensor(number) if type(number) is float else number for number in numbers]
    for given, flag in ((numbers, no_flag(device="meta")), (floats, no_flag())):
        if flag.is_cpu and name in REPORTING:
            continue  # a flag on the host that is set there waits
        with Uploads() as uploads:
            getattr(amp_C, name)(65536, flag, lists, *given)
        assert uploads.found == []


REPORTING = {name for name in ALL if "norm" in name or "novograd" in name} | {
    "multi_tensor_scale", "multi_tensor_axpby"
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_inside_of_what_is_compiled(path):
    """Addresses and launches are nothing to trace."""

    def function(x, out, flag):
        doubled = [2 * tensor for tensor in x]
        amp_C.multi_tensor_scale(65536, flag, [doubled, out], 0.5)
        return amp_C.multi_tensor_l2norm(65536, flag, [out], True)[0] + 1

    x, out = tensors((3, 4)), tensors((3, 4), seed=1)
    with on(path):
        norm = torch.compile(function, backend="eager")(x, out, no_flag())
    assert all(map(torch.equal, x, out))
    assert_one_rounding(norm, joined(exact(x)).norm().reshape(1) + 1)
