"""What happens to a model: its containers, weights, copies and state dict."""

import array
import collections
import copy
import dataclasses
import functools
import typing

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from apex import amp
from tests.amp.levels import HALF, LEVELS, MODEL, assert_same, cast, train_step
from tests.amp.training import same, sgd, started
from tests.checkpoints import reloaded

COMPUTES = {"O0": torch.float32, **HALF, **MODEL}


class Point(typing.NamedTuple):
    x: torch.Tensor
    label: str = "here"


class Edge(typing.NamedTuple):
    source: torch.Tensor
    to: torch.Tensor  # a field, not a method that casts


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    rest: list = dataclasses.field(default_factory=list)
    note: str = "note"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    inner: Batch | None = None


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """Fields as keys and as attributes, and copied as Hugging Face's ``ModelOutput`` is."""

    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name, value):
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __delitem__(self, *args, **kwargs):
        raise TypeError

    def __reduce__(self):
        make, _, *rest = super().__reduce__()
        return make, tuple(getattr(self, f.name) for f in dataclasses.fields(self)), *rest


class Pair(tuple):
    __slots__ = ()


class WithTo:
    """A custom batch."""

    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return WithTo(self.x.to(dtype))


class Tagged(list):
    tag = "tag"


def assert_same_state(left, right):
    assert list(left) == list(right)
    assert_same(left.values(), right.values())


class Echo(nn.Linear):
    """Returns what it was given and remembers it."""

    def __init__(self):
        super().__init__(2, 2)

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return args[0] if args else kwargs


# -- containers -----------------------------------------------------------------------------------

WIDE = torch.tensor([1.0, 2.0])
CONTAINERS = {
    "tensor": (lambda x: x, lambda v: v),
    "list": (lambda x: [x, 1, "s"], lambda v: v[0]),
    "tuple": (lambda x: (None, x), lambda v: v[1]),
    "nested": (lambda x: {"a": [(x,)]}, lambda v: v["a"][0][0]),
    "namedtuple": (lambda x: Point(x), lambda v: v.x),
    "namedtuple with a field to": (lambda x: Edge(x, x), lambda v: v.to),
    "dataclass": (lambda x: Batch(x), lambda v: v.x),
    "inner dataclass": (lambda x: Frozen(None, Batch(None, [x])), lambda v: v.inner.rest[0]),
    "frozen dataclass": (lambda x: Frozen(x), lambda v: v.x),
    "OrderedDict": (lambda x: collections.OrderedDict(b=x, a=x), lambda v: v["b"]),
    "defaultdict": (lambda x: collections.defaultdict(list, x=x), lambda v: v["x"]),
    "UserDict": (lambda x: collections.UserDict(x=x), lambda v: v["x"]),
    "ModelOutput": (lambda x: ModelOutput(logits=x), lambda v: v.logits),
    "list subclass": (lambda x: Tagged([x]), lambda v: v[0]),
    "tuple subclass": (lambda x: Pair([x]), lambda v: v[0]),
    "set": (lambda x: {x, "s"}, lambda v: next(i for i in v if i != "s")),
    "deque": (lambda x: collections.deque([x], maxlen=3), lambda v: v[0]),
    "PackedSequence": (
        lambda x: pack_padded_sequence(x.reshape(2, 1, 1), [2]),
        lambda v: v.data.flatten(),
    ),
    "object with to": (WithTo, lambda v: v.x),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_type(name):
    make, get = CONTAINERS[name]
    model = cast("O2", Echo())
    value = make(WIDE)
    for output in (model(value), model(named=value)["named"]):
        args, kwargs = model.seen
        inside = args[0] if args else kwargs["named"]
        assert type(inside) is type(value)
        assert get(inside).dtype == torch.float16
        assert type(output) is type(value)
        assert get(output).dtype == torch.float32
        assert torch.equal(get(output), WIDE)
    assert get(value).dtype == torch.float32  # the caller's own is left as it was


def test_containers_keep_what_else_they_carry():
    model = cast("O2", Echo())
    own = Tagged([WIDE])
    own.tag = "own"
    assert model(own).tag == "own"
    assert model(collections.defaultdict(list, x=WIDE)).default_factory is list
    assert list(model(collections.OrderedDict(b=WIDE, a=WIDE))) == ["b", "a"]
    assert model(collections.deque([WIDE], maxlen=3)).maxlen == 3
    assert model(Point(WIDE, "there")).label == "there"
    output = model(ModelOutput(logits=WIDE))
    assert output["logits"] is output.logits
    assert dict(output).keys() == {"logits"}


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_has_nothing_to_cast_comes_through_identical(level):
    model = cast(level, Echo())
    ready = torch.ones(2) if level == "O0" else torch.arange(2)
    for value in (
        torch.arange(3),
        torch.ones(2, dtype=torch.complex64),
        [ready, 1],
        (ready, None),
        {"a": [ready], "b": "s"},
        *(Point(ready), Frozen(ready), Batch(ready), ModelOutput(logits=ready)),
        *(collections.deque([1]), {1, 2}, torch.Size([1, 2]), (i for i in "ab"), iter([1])),
        *({}.keys(), "text", b"bytes", array.array("f", [1.0]), numpy.ones(2), numpy.float32(1)),
        *(torch.float32, None, 1.5, len, nn.Linear, nn.Linear(1, 1)),
    ):
        assert model(value) is value
        assert model.seen[0][0] is value


def test_a_generator_of_tensors_is_passed_on():
    (tensor,) = cast("O2", Echo())(t for t in [WIDE])
    assert tensor is WIDE


def test_float64_inputs_are_narrowed_and_float64_outputs_kept():
    class Double(Echo):
        def forward(self, x):
            self.seen = x.dtype
            return x.double()

    model = cast("O2", Double())
    assert model(WIDE.double()).dtype == torch.float64
    assert model.seen == torch.float16


class Weighted(Echo):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear, self.rnn = nn.Linear(3, 3, dtype=dtype), nn.GRU(3, 2, dtype=dtype)

    def forward(self, x, packed=None):
        super().forward(x)
        self.packed = packed
        self.rnn(packed if packed is not None else x)
        return self.linear(x)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_float64_inputs_of_a_narrower_model_compute_where_functions_are_cast(level):
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    packed = pack_padded_sequence(x, torch.tensor([2, 2, 1, 1]))
    model = cast(level, Weighted())
    half = model(x.float())
    out = model(x, packed=packed)
    assert torch.equal(out, half)
    assert model.seen[0][0].dtype == model.packed.data.dtype == torch.float32
    out.float().sum().backward()
    assert x.grad.dtype == torch.float64
    # float64 is left alone where the weights are float64, or where there are none
    assert cast(level, Weighted(torch.float64))(x, packed=packed).dtype == torch.float64
    assert cast(level, nn.Identity())(x) is x


# -- weights --------------------------------------------------------------------------------------


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.linear.weight
        self.norm, self.plain = nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)
        self.bare = nn.BatchNorm1d(2, track_running_stats=False)
        self.layer, self.group = nn.LayerNorm(2), nn.GroupNorm(1, 2)
        self.instance = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.loose = nn.Parameter(torch.ones(2))
        self.register_buffer("floats", torch.ones(2))
        self.register_buffer("doubles", torch.ones(2, dtype=torch.float64))
        self.register_buffer("integers", torch.arange(2))
        self.register_buffer("flags", torch.tensor([True]))
        self.register_buffer("imaginary", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        x = self.tied(self.linear(x)) * self.loose
        for norm in (self.norm, self.plain, self.bare):
            x = norm(x)
        return self.group(self.layer(x))


def dtypes(model):
    return {
        name: tensor.dtype
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.is_floating_point()
    }


@pytest.mark.parametrize("keep", [None, True, False, "True", "False"])
@pytest.mark.parametrize("level", MODEL)
def test_which_weights_are_cast(level, keep):
    model = Zoo()
    parameters = dict(model.named_parameters())
    saved = {name: value.dtype for name, value in model.state_dict().items()}
    cast(level, model, keep_batchnorm_fp32=keep)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    kept = level != "O3" if keep is None else keep in (True, "True")
    for name, dtype in dtypes(model).items():
        if name == "doubles":
            assert dtype == torch.float64
        elif kept and name.split(".")[0] in ("norm", "plain", "bare"):
            assert dtype == torch.float32, name
        else:
            assert dtype == MODEL[level], name
    assert model.integers.dtype == torch.int64
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert model.flags.dtype == torch.bool
    assert model.imaginary.dtype == torch.complex64
    assert model.absent is None
    assert model.tied.weight is model.linear.weight
    assert model(torch.randn(3, 2)).dtype == torch.float32
    assert {name: value.dtype for name, value in model.state_dict().items()} == saved


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_which_weights_are_not(level):
    model = Zoo()
    parameters = list(model.parameters())
    state = copy.deepcopy(model.state_dict())
    cast(level, model)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert_same_state(model.state_dict(), state)


def test_batchnorm_stays_float32_and_inside_of_a_model_takes_and_gives_half():
    model = cast("O2", nn.BatchNorm1d(2))
    assert model.weight.dtype == torch.float32
    assert model(torch.randn(3, 2).half()).dtype == torch.float32
    seen = []
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_forward_hook(
        lambda module, args, out: seen.append((args[0].dtype, out.dtype))
    )
    cast("O2", model)(torch.randn(3, 2))
    assert seen == [(torch.float16, torch.float16)]


class Counting(nn.Linear):
    def __init__(self, count):
        super().__init__(2, 2)
        self.register_buffer("count", count)

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("level", LEVELS)
def test_shared_buffers_keep_their_identity(level):
    count = torch.zeros(2)
    model = nn.Sequential(Counting(count), Counting(count))
    cast(level, model)
    model(torch.ones(1, 2))
    assert model[0].count is model[1].count is count
    assert count.dtype == MODEL.get(level, torch.float32)
    amp.reset()
    model(torch.ones(1, 2))
    assert model[0].count is model[1].count is count
    assert count.dtype == torch.float32
    assert count.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_without_parameters(level):
    model = cast(level, nn.Softmax(-1))
    half = torch.ones(2, 3).half()
    # O4 computes as torch.autocast does, which casts no softmax on a CPU.
    assert model(half).dtype == (torch.float16 if level == "O4" else torch.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_of_the_users_meet_casts_as_they_were_registered(level):
    seen = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    cast(level, model)
    assert "forward" not in vars(model)
    assert type(model) is nn.Linear
    model.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    out = model(WIDE[None])
    inside = MODEL.get(level, torch.float32)
    assert seen == [inside, COMPUTES[level], out.dtype]


def test_a_meta_model():
    for level in LEVELS:
        model = cast(level, nn.Linear(2, 2, device="meta"))
        assert model(torch.ones(1, 2, device="meta")).device.type == "meta"


# -- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, reloaded])
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_runs_its_own_weights_at_its_level(level, duplicate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1))
    make = functools.partial(sgd, lr=0.5)
    model, optimizer = started(level, model, make, loss_scale=128.0)
    x = torch.randn(4, 2)
    train_step(model, optimizer, x)
    want = model(x)
    twin = duplicate(model)
    cast("O0" if level == "O1" else "O1", nn.Linear(1, 1))
    assert twin(x).dtype == want.dtype
    assert torch.equal(twin(x), want)
    twin.load_state_dict({name: torch.zeros_like(v) for name, v in twin.state_dict().items()})
    assert torch.equal(twin(x)[:, 0], twin(x)[:, 1])
    assert torch.equal(model(x), want)
    before = copy.deepcopy(model.state_dict())
    twin, optimizer = started(level, twin, make, loss_scale=128.0)
    train_step(twin, optimizer, x)
    assert twin[0].weight.any()
    assert_same_state(model.state_dict(), before)
    assert all(v.dtype == torch.float32 for v in twin.state_dict().values())


@pytest.mark.parametrize("level", LEVELS)
def test_traced(level):
    model = cast(level, nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Softmax(-1)))
    model.eval()
    x = torch.randn(2, 1, 5, 5)
    traced = torch.jit.trace(model, x)
    for ambient in (level, "O0"):  # a trace holds its casts, and follows the thread's as well
        cast(ambient, nn.Linear(1, 1))
        want, got = model(x), traced(x)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("level", LEVELS)
def test_functional_call_uses_the_weights_it_is_given(level):
    model = cast(level, nn.Linear(2, 2))
    x = torch.randn(3, 2)
    model(x)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.func.functional_call(model, zeros, (x,)).count_nonzero() == 0


# -- state dict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_state_dict_holds_the_masters(level):
    model = nn.Linear(3, 3)
    weight = model.weight.detach().clone()
    model, optimizer = started(level, model, functools.partial(sgd, lr=0.5))
    state = model.state_dict()
    assert torch.equal(state["weight"], weight)
    for _ in range(3):
        train_step(model, optimizer, torch.randn(4, 3))
        masters = list(amp.master_params(optimizer))
        assert same(state.values(), masters)  # the masters themselves
        assert same(model.state_dict().values(), masters)
        assert torch.equal(model.weight, masters[0].to(MODEL[level]))
        assert not torch.equal(model.weight.float(), masters[0])


@pytest.mark.parametrize("level", MODEL)
def test_state_dict_of_a_part_and_with_keep_vars(level):
    model = cast(level, nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
    assert model[1].state_dict()["0.weight"].dtype == torch.float32
    assert model[1][0].state_dict(prefix="p.")["p.weight"].dtype == torch.float32
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


def test_a_partial_load_leaves_the_rest_alone():
    model, optimizer = started("O2", nn.Linear(3, 3))
    bias = model.state_dict()["bias"]
    weight = torch.randn(3, 3)
    model.load_state_dict({"weight": weight}, strict=False)
    assert_same_state(dict(model.state_dict()), {"weight": weight, "bias": bias})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"weight": torch.randn(2, 3), "bias": bias})
    assert_same_state(dict(model.state_dict()), {"weight": weight, "bias": bias})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


class OnlyToDevices:
    def to(self, device):
        if not isinstance(device, str):
            raise TypeError(device)
        return self


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_inputs_that_hold_themselves_or_can_only_go_to_a_device(level):
    class Double(nn.Module):
        def forward(self, batch):
            return batch["x"] * 2

    batch = {"x": torch.ones(2)}
    batch["self"] = batch
    assert torch.equal(cast(level, Double())(batch), torch.full((2,), 2.0))
    only = OnlyToDevices()
    assert cast(level, Echo())(only) is only


def test_modules_that_take_no_hooks_or_have_no_shape_are_refused_at_once():
    with pytest.raises(TypeError, match="TorchScript"):
        cast("O2", torch.jit.script(nn.Linear(2, 2)))
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match=r"'0.weight' has no shape yet"):
        cast("O2", lazy)
    assert not torch.is_autocast_enabled("cpu")
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    model = cast("O2", model)
    assert model(torch.ones(1, 2)).dtype == torch.float32
