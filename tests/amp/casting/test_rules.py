"""Registered and decorated functions, edited lists, the banned function."""

import copy
import types
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.casting import rules
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from tests.amp.casting.registrations import DECORATE, REGISTER
from tests.amp.levels import cast
from tests.amp.training import scaled_backward, started

UNTOUCHED = ["32 16", "16 16", "64 16"]


def start(level="O1"):
    return cast(level, nn.Linear(1, 1))


def test_when_registrations_hold():
    """From the next initialize that casts functions on, until reset; the last one counts."""
    amp.register_half_function(Own, "static")
    amp.register_promote_function(Own, "static")
    amp.register_float_function(Own, "static")
    for level in ("O0", "O1", "O2", "O1", "O3", "O5"):
        start(level)
        assert received(Own.static) == (RECEIVED["float"] if level == "O1" else UNTOUCHED)
    amp.reset()
    start()
    assert received(Own.static) == UNTOUCHED


# What a function under each annotation gets for (float, half), (half, half), (float64, half).
RECEIVED = {
    "half": ["16 16", "16 16", "64 16"],
    "float": ["32 32", "32 32", "64 32"],
    "promote": ["32 32", "16 16", "64 16"],
}
NAMES = {torch.float16: "16", torch.bfloat16: "16", torch.float32: "32", torch.float64: "64"}


def look(*args, **kwargs):
    """Say which types came in."""
    return " ".join(NAMES[value.dtype] for value in [*args, *kwargs.values()])


def received(function, half=torch.float16):
    x = torch.ones(2)
    return [
        function(x, x.to(half)),
        function(x.to(half), other=x.to(half)),
        function(x.double(), x.to(half)),
    ]


class Own:
    @staticmethod
    def static(*args, **kwargs):
        return look(*args, **kwargs)

    @classmethod
    def of_class(cls, *args, **kwargs):
        assert issubclass(cls, Own)
        return look(*args, **kwargs)

    def method(self, *args, **kwargs):
        assert isinstance(self, Own)
        return look(*args, **kwargs)


class Derived(Own):
    pass


# -- registrations --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("kind", REGISTER)
def test_registered_functions_of_the_users(kind, level):
    module = types.ModuleType("own")
    module.look = look
    bag = types.SimpleNamespace(look=look)
    REGISTER[kind](module, "look")
    REGISTER[kind](Own, "static")
    REGISTER[kind](Own, "of_class")
    REGISTER[kind](Own, "method")
    before = module.look, dict(vars(Own))
    start(level)
    half = torch.float16 if level == "O1" else torch.bfloat16
    for function in (module.look, Own.static, Own().static, Own.of_class, Own().method):
        assert received(function, half) == RECEIVED[kind]
    assert received(Derived().method, half) == RECEIVED[kind]
    assert bag.look is look
    amp.reset()
    assert before == (module.look, dict(vars(Own)))
    assert received(Own.static) == UNTOUCHED


def test_a_registration_on_a_derived_class_leaves_the_base_alone():
    amp.register_float_function(Derived, "method")
    start()
    assert received(Derived().method) == RECEIVED["float"]
    assert received(Own().method) == UNTOUCHED
    amp.reset()
    assert "method" not in vars(Derived)


def test_a_registration_holds_for_later_models():
    class Using(nn.Linear):
        def forward(self, x):
            return torch.sigmoid(super().forward(x)).dtype

    one = cast("O1", Using(2, 2))
    amp.register_float_function(torch, "sigmoid")
    two = cast("O1", Using(2, 2))
    x = torch.ones(1, 2)
    assert (one(x), two(x)) == (torch.float16, torch.float32)
    assert torch.sigmoid(x.half()).dtype == torch.float32


def test_the_users_rule_wins_over_the_list():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    exact, rounded = a.mm(b), a.half().mm(b.half())
    soft = a.half().softmax(-1)
    amp.register_float_function(torch, "mm")
    amp.register_half_function(F, "softmax")
    amp.register_half_function(torch.Tensor, "__add__")
    start()
    assert torch.equal(torch.mm(a, b), exact)
    assert torch.equal(a.mm(b), rounded)  # the method was not registered
    assert torch.equal(F.softmax(a, -1), soft)
    assert (a + a).dtype == torch.float16


def test_two_modules_of_one_name_do_not_meet():
    one, two = types.ModuleType("same"), types.ModuleType("same")
    one.look = two.look = look
    amp.register_half_function(one, "look")
    amp.register_float_function(two, "look")
    start()
    assert received(one.look) == RECEIVED["half"]
    assert received(two.look) == RECEIVED["float"]


def test_containers_of_arguments():
    start()
    other, seen = types.SimpleNamespace(a=1), []

    @amp.half_function
    def keep(*args):
        seen.extend(args)

    x = torch.ones(2)
    integers = torch.arange(2)
    keep([x, [x]], (x, integers), integers, {"x": x}, x.to_sparse(), "text", None, other, len)
    nested, mixed, same_integers, mapping, sparse, *others = seen
    assert nested[0].dtype == nested[1][0].dtype == torch.float16
    assert isinstance(mixed, tuple)
    assert [t.dtype for t in mixed] == [torch.float16, torch.int64]
    assert same_integers is integers
    assert mapping["x"].dtype == torch.float32
    assert sparse.dtype == torch.float16
    assert others == ["text", None, other, len]


def test_lists_and_tuples_of_arguments_keep_class_and_attributes():
    class Rows(list):
        def __init__(self, first, second):
            super().__init__([first, second])
            self.size = 2

    class Fixed(tuple):
        def __new__(cls, first, second):
            return super().__new__(cls, (first, second))

    class Named(typing.NamedTuple):
        x: torch.Tensor
        number: int

    start()
    given = [kind(torch.ones(2), 1) for kind in (Rows, Fixed, Named)]
    rows, *others = amp.half_function(lambda *args: args)(*given)
    for value, got in zip(given, (rows, *others), strict=True):
        assert type(got) is type(value)
        assert (got[0].dtype, got[1], value[0].dtype) == (torch.float16, 1, torch.float32)
    assert rows.size == 2


# -- decorators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECORATE)
def test_decorated_functions(kind):
    before = DECORATE[kind](look)
    assert before.__name__ == "look"
    assert before.__doc__ == "Say which types came in."
    assert before.__wrapped__ is look
    assert received(before) == UNTOUCHED
    handle = amp.init()
    after = DECORATE[kind](look)
    for function in (before, after):
        assert received(function) == RECEIVED[kind]
    with amp.disable_casts():
        assert received(before) == UNTOUCHED
    handle._deactivate()
    assert received(before) == UNTOUCHED
    start("O4")
    assert received(before, torch.bfloat16) == RECEIVED[kind]
    for end in (lambda: start("O0"), lambda: start("O2"), lambda: amp.init(enabled=False)):
        end()
        assert received(before) == UNTOUCHED


@pytest.mark.parametrize("kind", DECORATE)
def test_decorated_under_staticmethod_of_an_autograd_function(kind):
    class Scale(torch.autograd.Function):
        @staticmethod
        @DECORATE[kind]
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            return x * y

        @staticmethod
        @DECORATE[kind]
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return (grad * y).float(), None

    start()
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3)
    out = Scale.apply(x, y.half())
    assert out.dtype == (torch.float16 if kind == "half" else torch.float32)
    with amp.disable_casts():
        out.sum().backward()
    assert torch.equal(x.grad, y.half().float())


# -- edited lists ---------------------------------------------------------------------------------


@pytest.fixture
def _lists_as_shipped():
    spaces = [vars(module) for module in (functional_overrides, torch_overrides, tensor_overrides)]
    lists = [value for space in spaces for value in space.values() if isinstance(value, list)]
    saved = copy.deepcopy(lists)
    yield
    for value, shipped in zip(lists, saved, strict=True):
        value[:] = shipped


@pytest.mark.usefixtures("_lists_as_shipped")
def test_a_function_moved_to_another_list():
    # the edit that Tacotron 2 makes
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
    x = torch.randn(3, 4)
    half, wide = x.half().softmax(-1), x.half().float().softmax(-1)
    start()
    assert torch.equal(F.softmax(x, -1), half)
    assert torch.equal(F.softmax(x.half(), -1), half)
    assert torch.equal(torch.softmax(x.half(), -1), wide)  # on no list, so torch's
    with amp.disable_casts():
        assert torch.equal(F.softmax(x, -1), x.softmax(-1))


@pytest.mark.usefixtures("_lists_as_shipped")
def test_names_added_and_removed():
    torch_overrides.FP32_FUNCS.append("sigmoid")
    torch_overrides.FP16_FUNCS.remove("mm")
    torch_overrides.CASTS.append("maximum")
    tensor_overrides.FP32_FUNCS.append("tanh")
    torch_overrides.FP16_FUNCS.append("no_such_function")
    start()
    x = torch.randn(3, 3)
    assert torch.sigmoid(x.half()).dtype == torch.float32
    assert torch.mm(x, x).dtype == torch.float32
    assert torch.mm(x.half(), x.half()).dtype == torch.float16
    assert x.mm(x).dtype == torch.float16
    assert torch.maximum(x.half(), x).dtype == torch.float32
    assert x.half().tanh().dtype == torch.float32
    torch_overrides.FP32_FUNCS.append("sin")  # waits for the next initialize
    assert torch.sin(x.half()).dtype == torch.float16
    start()
    assert torch.sin(x.half()).dtype == torch.float32


@pytest.mark.usefixtures("_lists_as_shipped")
def test_edits_of_the_lists_hold_with_bfloat16():
    functional_overrides.BANNED_FUNCS.append(("huber_loss", "not with 16 bits"))
    functional_overrides.FP32_FUNCS.append("silu")
    start("O4")
    x = torch.rand(4).bfloat16()
    with pytest.raises(NotImplementedError, match="not with 16 bits"):
        F.huber_loss(x, torch.rand(4))
    assert F.silu(x).dtype == torch.float32
    assert F.softplus(x).dtype == torch.bfloat16  # on the list as shipped


def test_banned_does_not_hold_where_casts_are_off():
    p, target = torch.rand(4).half(), torch.rand(4).half()
    native = F.binary_cross_entropy(p, target)
    start()
    with amp.disable_casts():
        assert torch.equal(F.binary_cross_entropy(p, target), native)
    start("O2")
    assert torch.equal(F.binary_cross_entropy(p, target), native)


# -- the banned function --------------------------------------------------------------------------


def test_banned():
    start()
    p, target = torch.rand(4), torch.rand(4)
    for call in (F.binary_cross_entropy, nn.BCELoss()):
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            call(p.half(), target)
        with pytest.raises(NotImplementedError, match="allow_banned=True"):
            call(p, target.half())
        assert call(p, target).dtype == torch.float32
    start("O4")
    with amp.autocast(dtype=torch.float16), pytest.raises(NotImplementedError, match="allow_ban"):
        nn.BCELoss()(p.half(), target)
    with torch.autocast("cpu", torch.bfloat16):
        native = F.binary_cross_entropy(p.bfloat16(), target)
    assert native.dtype == torch.float32
    assert torch.equal(nn.BCELoss()(p.bfloat16(), target), native)


@pytest.mark.parametrize("kind", ["float", "half"])
def test_registrations_of_listed_functions_hold_with_bfloat16(kind):
    REGISTER[kind](F, "interpolate")
    start("O4")
    image = torch.rand(1, 1, 2, 2)
    wanted = {"float": torch.float32, "half": torch.bfloat16}[kind]
    assert F.interpolate(image.bfloat16(), scale_factor=2).dtype == wanted
    assert F.interpolate(image, scale_factor=2).dtype == wanted


def test_the_two_ways_out_that_the_message_names():
    amp.register_float_function(torch, "sigmoid")
    model = cast("O1", nn.Linear(3, 1))
    p = torch.sigmoid(model(torch.randn(4, 3)))
    assert p.dtype == torch.float32
    F.binary_cross_entropy(p, torch.rand(4, 1)).backward()
    amp.register_float_function(F, "binary_cross_entropy")
    start()
    assert F.binary_cross_entropy(torch.rand(4).half(), torch.rand(4)).dtype == torch.float32


# -- reset ----------------------------------------------------------------------------------------


def attributes():
    spaces = (torch, F, torch.Tensor, nn.functional, Own, Derived)
    return {(space, name): value for space in spaces for name, value in vars(space).items()}


def test_reset_restores_every_attribute():
    before = attributes()
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(F, "relu")
    amp.register_promote_function(torch.Tensor, "where")
    amp.register_float_function(torch.Tensor, "__matmul__")
    amp.register_float_function(Own, "static")
    amp.register_float_function(Derived, "of_class")
    start()
    amp.register_half_function(torch, "sigmoid")
    start()
    amp.init()
    changed = {key for key, value in attributes().items() if before.get(key) is not value}
    assert (torch, "sigmoid") in changed
    amp.reset()
    after = attributes()
    assert after.keys() == before.keys()
    assert all(after[key] is value for key, value in before.items())
    assert rules._patches == {}


def test_rules_work_in_an_unpickled_model(tmp_path):
    class Using(nn.Softmax):
        def forward(self, x):
            return super().forward(x), torch.sigmoid(x), nn.functional.local_response_norm(x, 3)

    globals()["Using"] = Using  # for pickle to find
    Using.__qualname__ = "Using"
    amp.register_float_function(torch, "sigmoid")
    torch.save(cast("O1", Using(-1)), tmp_path / "model.pt")
    amp.reset()
    model = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [t.dtype for t in model(torch.ones(2, 3, 4).half())] == [torch.float32] * 3


def test_a_registration_after_initialize_is_warned_of():
    """In the loop that it misses; a model that registers before its own ``initialize`` is fine."""
    model, optimizer = started("O1", nn.Linear(2, 2))
    amp.register_float_function(torch, "sigmoid")
    loss = torch.ones((), requires_grad=True)
    with pytest.warns(UserWarning, match=r"torch.sigmoid was registered after amp.initialize"):
        scaled_backward(loss, optimizer)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scaled_backward(loss, optimizer)
    assert torch.sigmoid(torch.ones(1).half()).dtype == torch.float32


class Criterion(nn.Module):
    """A model with a function that is registered by its class (espnet)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.loss(self.linear(x))

    def loss(self, logits):
        self.seen = logits.dtype
        return logits.float().sum()


LATE = "Criterion.loss was registered after amp.initialize"


def late_registration():
    """A training that began before its function was registered."""
    model, optimizer = started("O1", Criterion())
    amp.register_float_function(Criterion, "loss")
    return model, optimizer


def test_a_registration_after_initialize_holds_from_the_next_init_on():
    """In the model that was there before, too."""
    model, optimizer = late_registration()
    with pytest.warns(UserWarning, match=LATE) as caught:
        scaled_backward(model(torch.ones(1, 2)), optimizer)
    assert {warning.filename for warning in caught} == {scaled_backward.__code__.co_filename}
    assert model.seen == torch.float16
    amp.init()
    scaled_backward(model(torch.ones(1, 2)), optimizer)
    assert model.seen == torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_registration_that_only_a_later_initialize_has_seen_is_warned_of(level):
    """O0 and O2 cast no functions, so that nothing is registered in this thread any more."""
    model, optimizer = late_registration()
    started(level, nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=LATE):
        scaled_backward(model(torch.ones(1, 2)), optimizer)
    assert model.seen == torch.float16


def test_a_registration_for_another_model_is_not_warned_of():
    model, optimizer = started("O1", nn.Linear(2, 2))
    amp.register_float_function(Criterion, "loss")
    other, second = started("O1", Criterion())
    for one, its in ((model, optimizer), (other, second)):
        scaled_backward(one(torch.ones(1, 2)).sum(), its)
    assert other.seen == torch.float32


def test_a_custom_function_is_annotated_in_torchs_way_or_in_ours():
    class Strict(torch.autograd.Function):
        """Refuses mixed types, as compiled kernels do."""

        @staticmethod
        def forward(ctx, x, weight):
            if x.dtype != weight.dtype:
                raise TypeError(f"{x.dtype} {weight.dtype}")
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    torchs_way = torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)

    class Torchs(Strict):
        forward = staticmethod(torchs_way(Strict.forward))
        backward = staticmethod(torch.amp.custom_bwd(Strict.backward, device_type="cpu"))

    weight, x = torch.randn(3, 3), torch.randn(2, 3).half()
    start()
    with pytest.raises(TypeError, match="float16"):
        Strict.apply(x, weight)
    assert Torchs.apply(x, weight).dtype == torch.float32
    assert amp.half_function(Strict.apply)(x, weight).dtype == torch.float16
    assert amp.float_function(Strict.apply)(x, weight).dtype == torch.float32
