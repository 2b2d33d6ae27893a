"""What is remembered of lists of tensors is forgotten when one of them is changed in any way."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apex.multi_tensor_apply.list_functions import multi_tensor_scale
from apex.ops.lists import metadata
from apex.ops.lists.metadata import of_metadata
from apex.ops.lists.tensor_lists import are_uniform, as_vector, uniform_numels
from apex.optimizers import FusedAdam
from tests.optimizers.common import PATHS, give_grads, on, same, started

SHAPES = ((4, 6), (4, 6), (5,))


def lists(count=2):
    return [[torch.randn(shape) for shape in SHAPES] for _ in range(count)]


def transposed(x):
    return x.t().contiguous().t()


def with_gaps(x):
    return torch.cat([x, x], 1)[:, ::2]


# name -> a tensor instead of one in a uniform list, and whether the list is uniform then
CHANGES = {
    "other memory": (torch.clone, True),
    "a view": (lambda x: torch.cat([x, x])[1:5], True),
    "requires_grad": (lambda x: x.clone().requires_grad_(), True),
    "dtype": (torch.Tensor.double, False),
    "strides": (transposed, False),
    "gaps": (with_gaps, False),
    "shape": (lambda x: x.reshape(6, 4), False),
    "size": (lambda x: x[:2], False),
    "negative bit": (torch._neg_view, False),
    "device": (lambda x: x.to("meta"), False),
    "layout": (torch.Tensor.to_sparse, False),
}
DATA = ("other memory", "a view", "dtype", "strides", "gaps", "shape", "size", "negative bit")


def check(columns, is_uniform):
    assert are_uniform(columns) is is_uniform
    assert (uniform_numels.__wrapped__(columns) is not None) is is_uniform


@pytest.mark.parametrize("name", CHANGES)
def test_another_tensor_is_noticed(name):
    new, is_uniform = CHANGES[name]
    columns = lists()
    check(columns, True)
    # neither the first, the one in the middle nor the last
    columns[1][1], old = new(columns[1][1]), columns[1][1]
    check(columns, is_uniform)
    columns[1][1] = old
    check(columns, True)


@pytest.mark.parametrize("name", DATA)
def test_other_data_of_a_tensor_are_noticed(name):
    new, is_uniform = CHANGES[name]
    columns = lists()
    check(columns, True)
    columns[1][1].data = new(columns[1][1].data)
    check(columns, is_uniform)


@pytest.mark.parametrize("change", [torch.Tensor.t_, lambda x: x.resize_(2, 3)])
def test_a_change_in_place_is_noticed(change):
    columns = lists()
    check(columns, True)
    change(columns[1][1])
    check(columns, False)


def test_nothing_is_computed_while_metadata_stays():
    calls = []

    @of_metadata
    def fact(columns, *more):
        calls.append(more)
        return len(calls)

    assert [fact(lists()), fact(lists()), fact(lists(), 7), fact(lists(), 7)] == [1, 1, 2, 2]
    assert [fact(lists(1)), fact([[], []]), fact([[], []])] == [3, 4, 5]  # nothing of nothing
    wrapped = [[torch.nn.Parameter(torch.randn(3)), torch.randn(3).as_subclass(Wrapper)]]
    assert [fact(wrapped), fact(wrapped)] == [6, 7]
    assert fact(lists()) == 1
    # lists that differ in the middle only, or by whether they are parameters, take turns
    others = [[column[0], torch.randn(6, 4), column[2]] for column in lists()]
    params = [[torch.nn.Parameter(x) for x in column] for column in lists()]
    first = [fact(others), fact(params)]
    for _ in range(3):
        assert [fact(lists()), fact(others), fact(params)] == [1, *first]


class Wrapper(torch.Tensor):
    """A subclass, which may have other memory and metadata than it shows."""


def test_lists_that_are_there_twice_are_remembered():
    calls = []

    @of_metadata
    def fact(columns):
        calls.append(columns)
        return len(calls)

    for expected in (1, 1):
        x, y = lists()
        assert fact([x, y, [*x]]) == expected
    for expected in (2, 2):
        x, y = lists()
        assert fact([x, y, [*y]]) == expected
    x, y = lists()
    assert [fact([x, y, y[:2]]), fact([x, y, [x[0], *y[1:]]])] == [3, 4]
    assert [fact([x[:1] * 2]), fact([x[:1] * 2])] == [5, 6]  # one tensor twice in a list


def test_the_last_lists_are_known_by_their_metadata_alone():
    """Lists of one length take turns: what is returned is that of each."""
    calls = []

    @of_metadata
    def fact(columns):
        calls.append(columns)
        return [x.dtype for column in columns for x in column]

    narrow, wide = [torch.zeros(2, 3).half()], [torch.zeros(2, 3)]
    for _ in range(3):
        assert fact([narrow]) == [torch.float16]
        assert fact([narrow]) == [torch.float16]
        assert fact([wide]) == [torch.float32]
    assert len(calls) == 2
    with_grad = [torch.zeros(2, 3).requires_grad_()]
    assert fact([with_grad]) == fact([with_grad]) == [torch.float32]
    assert len(calls) == 3


def test_what_is_remembered_of_changing_lists_is_limited(monkeypatch):
    monkeypatch.setattr(metadata, "LIMIT", 100)
    metadata._kept.cache_clear()
    for count in range(1, 60):
        check([[torch.zeros(2, 3)] + [torch.zeros(count) for _ in range(9)]], True)
        assert metadata._kept.cache_info().currsize <= 20  # two of each list


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
def test_tensors_of_which_torch_makes_no_guards():
    check([[torch.zeros(16)]], True)
    check([[torch.eye(4).to_sparse_csr()]], False)
    make_fx(lambda x: check([[x]], True), tracing_mode="symbolic")(torch.zeros(16))
    nested = torch.nested.nested_tensor([torch.zeros(7), torch.zeros(9)])
    with pytest.raises(RuntimeError, match="NestedTensorImpl"):
        are_uniform([[nested]])


def test_without_guards_of_torch(monkeypatch):
    monkeypatch.setattr(metadata, "_Guards", None)
    metadata._kept.cache_clear()
    columns = lists()
    assert are_uniform(columns)
    columns[1][1].t_()
    assert not are_uniform(columns)


# -- by those who use it ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_scaling_changed_lists(path):
    flag = torch.zeros(1, dtype=torch.int32)
    for new in (torch.clone, torch.Tensor.half, lambda x: x.reshape(6, 4), torch._neg_view):
        given, out = lists()
        for _ in range(2):
            with on(path):
                multi_tensor_scale(65536, flag, [given, out], 0.5)
        given[1].data = new(given[1].data)
        with on(path):
            multi_tensor_scale(65536, flag, [given, out], 0.5)
        assert same(out[1], given[1].resolve_neg().float().reshape(4, 6) * 0.5)
    given[1].data = given[1].data.t()
    with pytest.raises(RuntimeError, match="A tensor was not contiguous"):
        multi_tensor_scale(65536, flag, [given, out], 0.5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "new", [torch.clone, transposed, with_gaps, torch._neg_view, torch.Tensor.half]
)
def test_steps_on_changed_gradients(new, path, monkeypatch):
    """As if nothing had been remembered of the steps before."""
    results = []
    for guards in (metadata._Guards, None):
        monkeypatch.setattr(metadata, "_Guards", guards)
        metadata._kept.cache_clear()
        params, optimizer = started(FusedAdam, shapes=SHAPES, lr=0.02)
        for number in range(4):
            give_grads(params, number)
            if number == 2:
                params[1].grad.data = new(params[1].grad.data)  # torch 2.9: of any dtype only so
            with on(path):
                optimizer.step()
        results.append([param.detach() for param in params])
    assert same(*results)


@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_of_another_shape_is_refused(path):
    params, optimizer = started(FusedAdam, shapes=SHAPES)
    for number in range(2):
        give_grads(params, number)
        with on(path):
            optimizer.step()
    params[1].data = params[1].data.t().contiguous()
    with pytest.raises(RuntimeError, match="the gradient of a parameter has shape"), on(path):
        optimizer.step()


# -- vectors ---------------------------------------------------------------------------------------


def test_a_vector_has_the_memory_of_its_numbers_if_it_can():
    whole = torch.arange(5.0)
    numbers = whole.unbind()
    for column, shared in (
        (numbers, True),
        (numbers[1:3], True),
        (numbers[:1], True),
        (numbers[::-1], False),
        (numbers[::2], False),
        ([numbers[0], torch.tensor(7.0)], False),
    ):
        vector = as_vector(column)
        assert vector.tolist() == [x.item() for x in column]
        assert (vector.data_ptr() == column[0].data_ptr()) is shared
