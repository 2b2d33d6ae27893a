"""``amp.init``: its arguments in the orders of both years, and the casts it switches on."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _speech
from apex.amp.handle import AmpHandle, NoOpHandle
from tests.amp.casting.registrations import DECORATE, REGISTER
from tests.amp.levels import product

# -- arguments ------------------------------------------------------------------------------------


def allows_banned():
    try:
        loss = F.binary_cross_entropy(torch.ones(1).half(), torch.ones(1).half())
    except NotImplementedError:
        return False
    return loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),  # has_cache, verbose, scale (None: dynamic), allows_banned
    [
        ((), {}, (True, False, None, False)),
        # the order of 2018
        ((True, False), {}, (False, False, None, False)),
        ((True, True, True), {}, (True, True, None, False)),
        ((True, False, False, True), {}, (False, False, None, True)),
        ((True, False), {"verbose": True, "loss_scale": 128.0}, (False, True, 128.0, False)),
        ((1, True), {"allow_banned": 1}, (True, False, None, True)),
        # the order of 2025
        ((True, "dynamic"), {}, (True, False, None, False)),
        ((True, 1), {}, (True, False, 1.0, False)),
        ((True, "128", False, True, True), {}, (False, True, 128.0, True)),
        # by name
        ((), {"enable_caching": False}, (False, False, None, False)),
        ((), {"enabled": True, "loss_scale": 2.0, "verbose": True}, (True, True, 2.0, False)),
        ((), {"enable": True, "verbose": True}, (True, True, None, False)),  # a tutorial's name
    ],
)
def test_both_orders(monkeypatch, args, kwargs, expected):
    monkeypatch.setattr(_speech, "say", lambda *_: None)
    handle = amp.init(*args, **kwargs)
    assert type(handle) is AmpHandle
    scaler = handle._default_scaler
    scale = None if scaler.dynamic else scaler.loss_scale()
    assert (handle.has_cache, handle.verbose, scale, allows_banned()) == expected


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((False,), {}),
        ((False, True), {}),
        ((0, True, True), {}),
        ((), {"enabled": False}),
        ((), {"enable": False}),
    ],
)
def test_disabled(args, kwargs):
    amp.init()
    assert type(amp.init(*args, **kwargs)) is NoOpHandle
    assert product() == torch.float32


@pytest.mark.parametrize(
    ("error", "words", "args", "kwargs"),
    [
        (TypeError, "multiple values for keyword argument 'verbose'", (1, True, True), "verbose"),
        (TypeError, "multiple values for argument 'enabled'", (True, 1.0), "enabled"),
        (TypeError, "multiple values for argument 'enabled'", (True,) * 5, None),
        (TypeError, "takes from 0 to 5 positional", (True, 1.0, True, True, True, 1), None),
        (TypeError, "enabled was 'yes'; it must be True or False", ("yes",), None),
        (TypeError, "enable_caching was 'dynamic'", (True, "dynamic", "dynamic"), None),
        (TypeError, "verbose was 2.0", (True, True, 2.0), None),
        (TypeError, "allow_banned was 'x'", (True, True, True, "x"), None),
        (TypeError, "loss_scale was True; it must be 'dynamic' or a number", (), "loss_scale"),
        (TypeError, r"loss_scale was \[\]; allowed are 'dynamic' and a number", (True, []), None),
        (ValueError, "loss_scale was 'static'; allowed are", (True, "static"), None),
        (ValueError, "loss_scale was 0.0; it must be finite, above 0", (True, 0), None),
        (ValueError, "loss_scale was nan; it must be finite", (True, float("nan")), None),
        (TypeError, "unexpected keyword argument 'opt_level'", (), "opt_level"),
    ],
)
def test_wrong_arguments_change_nothing(error, words, args, kwargs):
    first = amp.init()
    amp.register_float_function(torch, "sigmoid")
    with pytest.raises(error, match=words):
        amp.init(*args, **({} if kwargs is None else {kwargs: True}))
    assert amp._amp_state.handle is first
    assert product() == torch.float16
    assert [*amp.amp._USER_CAST_REGISTRY] == [(torch, "sigmoid", "float")]


# -- the casts ------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch):
    said = []
    monkeypatch.setattr(_speech, "say", lambda line, *_: said.append(line))
    return said


def test_a_second_init_replaces_the_casts_of_the_first(lines):
    module = types.SimpleNamespace(own=lambda x, y: (x.dtype, y.dtype))
    first = amp.init(True, True, True)
    second = amp.init(verbose=True)
    assert product() == torch.float16
    assert lines == ["Float->Half (matmul)"] * 2  # once for each tensor, not once for each init
    amp.register_float_function(module, "own")
    third = amp.init()
    lines.clear()
    assert product() == torch.float16
    assert lines == []  # the log of the second is over
    x = torch.ones(2)
    assert module.own(x, x.half()) == (torch.float32, torch.float32)
    amp.init()
    assert module.own(x, x.half()) == (torch.float32, torch.float32)
    weight = nn.Parameter(torch.ones(()))
    with first.scale_loss(weight * 2, torch.optim.SGD([weight])) as scaled_loss:
        assert scaled_loss.item() == 2 * 65536  # earlier handles go on scaling
    for handle in (third, first, second):
        handle._deactivate()
        assert product() == torch.float16  # not theirs any more
    amp._amp_state.handle._deactivate()
    assert product() == torch.float32
    assert torch.is_autocast_enabled("cpu") is False


def test_an_init_after_initialize_and_the_other_way_round():
    model = amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)
    amp.init()
    assert product() == torch.float16
    assert model(torch.ones(1, 2)).dtype == torch.float32  # at its own level
    amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)
    assert product() == torch.float32


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_weight_used_several_times(enable_caching, lines):
    """Each use casts it anew, so no cast is stale and none has lost its way to the weight."""
    handle = amp.init(True, enable_caching, True, loss_scale=128.0)
    linear = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    x = torch.ones(1, 2)
    with torch.no_grad():
        linear.weight.fill_(0.5)
        assert linear(x).tolist() == [[1.0, 1.0]]
        linear.weight.fill_(1.0)
        assert linear(x).tolist() == [[2.0, 2.0]]
    lines.clear()
    out = linear(linear(x))
    assert lines == ["Float->Half (linear)"] * 3  # x, and the weight twice
    with handle.scale_loss(out.float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    weight = linear.weight.detach().clone().requires_grad_()
    (x @ weight.T @ weight.T).sum().backward()
    assert torch.equal(linear.weight.grad, weight.grad)
    lines.clear()
    with amp.autocast():
        out = linear(linear(x))
        assert lines == ["Float->Half (linear)"] * 2  # cached: once for each block
    (gradient,) = torch.autograd.grad(out.float().sum(), linear.weight)
    assert torch.equal(gradient, weight.grad)
    handle._clear_cache()
    handle.remove_cache(linear.weight)


# -- a backend of the user's own ------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECORATE)
def test_decorated_above_a_staticmethod(kind):
    for method in (staticmethod, classmethod):
        with pytest.raises(TypeError, match=f"a {method.__name__}; .*above @amp.{kind}_function"):
            DECORATE[kind](method(lambda *args: args))
    with pytest.raises(TypeError, match="fn was a NoneType; it must be a function"):
        DECORATE[kind](None)


@pytest.mark.parametrize("kind", REGISTER)
def test_a_registered_autograd_function(kind, lines):
    """The casts are a part of the graph, and the name in the log is that of its method."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            seen.append((x.dtype, weight.dtype))
            ctx.save_for_backward(x, weight)
            return (x.float() * weight.float()).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return (grad * weight).to(x.dtype), (grad * x).to(weight.dtype)

    def gradients():
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        weight = torch.tensor([3.0, 4.0], requires_grad=True)
        out = backend.Product.apply(x, weight.half())
        with amp.disable_casts():
            out.float().sum().backward()
        return x.grad.tolist(), weight.grad.tolist()

    backend, seen = types.SimpleNamespace(Product=Product), []
    REGISTER[kind](backend, "Product")
    assert gradients() == ([3.0, 4.0], [1.0, 2.0])  # it waits
    amp.init(verbose=True)
    lines.clear()
    assert gradients() == ([3.0, 4.0], [1.0, 2.0])
    assert lines == ["Float->Half (apply)" if kind == "half" else "Half->Float (apply)"]
    amp.reset()
    assert backend.Product is Product
    gradients()
    half, wide = torch.float16, torch.float32
    assert seen == [(wide, half), (half, half) if kind == "half" else (wide, wide), (wide, half)]


@pytest.mark.parametrize("kind", REGISTER)
def test_a_registered_method_of_a_layer_of_torch(kind):
    """As the refusal of a class advises; the layer's weights are float32."""
    REGISTER[kind](nn.Linear, "forward")
    amp.init()
    linear = nn.Linear(2, 2)
    nn.init.ones_(linear.weight)
    nn.init.ones_(linear.bias)
    got = linear(torch.ones(1, 2))
    assert got.dtype == (torch.float32 if kind == "float" else torch.float16)
    assert got.tolist() == [[3.0, 3.0]]


def test_a_registration_of_what_is_no_function():
    backend = types.SimpleNamespace(Cell=nn.RNNCell, number=3)
    with pytest.raises(TypeError, match=r"Cell is a class, not a function.*\.Cell, 'forward'\)"):
        amp.register_half_function(backend, "Cell")
    with pytest.raises(TypeError, match="number cannot be replaced: it is a int"):
        amp.register_half_function(backend, "number")
    slots = type("Slots", (), {"__slots__": ("call",)})()
    slots.call = before = lambda x: x
    with pytest.raises(TypeError, match="call cannot be replaced: it is a member_descriptor"):
        amp.register_half_function(slots, "call")
    assert slots.call is before
    with pytest.raises(ValueError, match="No function named FRUBackend in module"):
        amp.register_half_function(backend, "FRUBackend")
    amp.init()
