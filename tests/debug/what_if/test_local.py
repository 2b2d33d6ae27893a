"""The local rule: a fault accuses the layer that has it; the model is what it was."""

import copy
import itertools
import math
import random
import signal
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from apex.debug import what_if
from apex.debug.what_if.tracing import EXACT, ProductCall
from tests.tolerance import COSINE

ON = {"device": "cpu", "dtype": torch.float32}


class Scores(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, q, k, v):
        return (q @ k.transpose(-1, -2) * self.factor).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, factor=0.25, width=16):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.scores, self.drop = Scores(factor), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.scores(self.q(x), self.k(x), self.v(x)))


def network(factor=0.25, channel=1.0):
    """Attention, then two linear layers with a batch norm; ``channel`` 0 between them is larger."""
    torch.manual_seed(0)
    layers = [Attention(factor), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(6))
    with torch.no_grad():
        model[1].weight[0] *= channel
        model[1].bias[0] *= channel
        model[3].weight[:, 0] /= channel
    return model


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batches(number=8):
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(number, 8, 6, 16, generator=generator, **ON)
    y = torch.randint(4, (number, 8, 6), generator=generator, device="cpu")
    return list(zip(x, y, strict=True))


def found(result, state="not safe"):
    return {form: [one.name for one in result.states(form, state)] for form in result.formats}


def test_a_healthy_network_is_safe():
    result = what_if(network(), loss, batches())
    assert found(result, "safe") == dict.fromkeys(
        ("float16", "bfloat16", "e4m3"), ["0.q", "0.k", "0.v", "0.scores", "1", "3"]
    )
    assert [one.kind for one in result.layers][2:5] == ["Linear", "Scores", "Linear"]
    assert result.unseen == []


def test_attention_without_scaling_is_found_and_nobody_else():
    model = network(factor=40.0)
    assert found(what_if(model, loss, batches())) == {
        "float16": [], "bfloat16": ["0.scores"], "e4m3": ["0.scores"],
    }  # fmt: skip


def test_an_outlier_channel_overflows_float16_and_drowns_the_others_in_e4m3():
    result = what_if(network(channel=1e6), loss, batches())
    assert found(result) == {"float16": ["1", "3"], "bfloat16": [], "e4m3": ["1", "3"]}
    verdict = result.layers[4].verdicts["float16"]
    assert verdict.inf > 0
    assert "its result reaches" in verdict.why
    assert "float16 ends at 65504" in verdict.why
    assert list(result.large) == ["1", "2"]


def test_the_loss_scale_is_the_largest_that_no_gradient_overflows():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.ones(1, 1, **ON)
    for factor, scale in ((1.0, 2.0**15), (3.0, 2.0**14), (2.0**-30, 2.0**24), (2.0**20, 2.0**-5)):
        result = what_if(model, lambda m, b, f=factor: (m(b) * f).sum(), [x] * 8)
        assert result.ranges.scale == scale
        assert result.ranges.gradient == factor


def test_the_gradient_of_what_a_product_multiplies_bounds_the_loss_scale():
    """Of 4.0, which the factor between the products makes small before the first one gets it."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(4.0)
    listed = [torch.ones(1, 1, **ON)] * 8
    for formats in (["float16"], ["bfloat16"]):
        result = what_if(model, lambda m, x: m[1](m[0](x) / 64).sum(), listed, formats=formats)
        assert result.ranges.gradient == 4.0
        assert result.ranges.scale == 2.0**13


def test_a_later_batch_that_asks_for_a_smaller_scale_judges_the_others_again():
    model = nn.Linear(1, 1, bias=False)
    x, factors = torch.ones(1, 1, **ON), [2.0**-42] * 7 + [1.0]
    result = what_if(model, lambda m, b: (m(x) * b).sum(), factors, formats=["float16"])
    assert result.ranges.scale == 2.0**15
    worst = result.layers[0].verdicts["float16"]
    assert (worst.state, worst.batch, worst.result) == ("not safe", 0, "weight gradient")
    assert result.ranges.small == (7, 8)


def _penalised(model, batch):
    """A loss with a gradient penalty, whose backward reads the weights a second time."""
    x = batch[0].clone().requires_grad_()
    outputs = model(x).square().sum()
    (gradient,) = torch.autograd.grad(outputs, x, create_graph=True)
    return outputs + 100 * gradient.square().sum()


def _reversed(model, batch):
    """A loss whose program changes gradients by hooks on tensors that products gave."""
    h = model[0](batch[0])
    h.register_hook(lambda gradient: -10 * gradient)
    return F.cross_entropy(model[1](F.relu(h, inplace=True)).flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("of", [_penalised, _reversed])
def test_gradients_that_the_program_differentiates_or_changes(of, monkeypatch):
    """What a product gives in float32 comes from the pass where that is the same as alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    result = what_if(model, of, batches())
    assert found(result, "safe")["bfloat16"] == ["0", "1"]
    monkeypatch.setattr(ProductCall, "exact", lambda piece: piece.run(EXACT))
    alone = what_if(model, of, batches())
    for one, other in zip(result.layers, alone.layers, strict=True):
        for form, verdict in one.verdicts.items():
            assert verdict.cosine == pytest.approx(other.verdicts[form].cosine, abs=COSINE)


def test_a_healthy_network_is_passed_once_a_batch():
    """And not again for suspects, of which it has none; its scale is that of the first batch.

    The first batch also runs at O4 and O5, and in float32 beside them.
    """
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss(model, batch)

    what_if(network(), counted, batches(), formats=["bfloat16", "e4m3"])
    assert len(calls) == 8 + 3
    calls.clear()
    what_if(network(), counted, batches(), formats=["e4m3"])  # of which there is no level
    assert len(calls) == 8


def test_a_product_is_computed_in_the_pass_and_once_in_a_format():
    torch.manual_seed(0)
    model, products = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                products.append(func)
            return func(*args, **(kwargs or {}))

    with Count():
        what_if(model, loss, batches(), formats=["e4m3"])
    # forward, and backward of four weights and three inputs, of 8 batches: in float32 and in the
    # format; the first layer's input needs no gradient
    assert len(products) == (4 + 4 + 3) * 8 * 2


class Every(nn.Module):
    """One of each kind of layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.conv = nn.Embedding(5, 8, sparse=True), nn.Conv1d(8, 8, 3, padding=1)
        self.lstm = nn.LSTM(8, 8, batch_first=True, num_layers=2, dropout=0.5)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head, self.unused = nn.Linear(8, 5), nn.Linear(3, 3)
        self.own = nn.Parameter(torch.randn(8, 8, **ON) / 3)

    def forward(self, x):
        h = self.conv(self.embedding(x).transpose(1, 2)).transpose(1, 2)
        h = self.lstm(h)[0]
        h = self.attention(h, h, h, need_weights=False)[0] + F.linear(h, self.own)
        return self.head(h)


def test_every_kind_of_layer_is_judged():
    torch.manual_seed(0)
    data = [torch.randint(5, (4, 6), device="cpu") for _ in range(8)]
    model = Every()
    result = what_if(model, lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), data)
    names = ["", "embedding", "conv", "lstm", "attention", "head"]
    assert [one.name for one in result.layers] == names
    assert found(result, "safe")["bfloat16"] == names
    assert result.unseen == ["unused"]
    # what a policy can name: not the model itself; an attention for its out_proj
    assert [one.keep for one in result.layers] == [None, *names[1:]]


class Hidden(nn.Module):
    """Its gradients are computed by a forward inside of the backward."""

    def __init__(self, *, checkpoints):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.checkpoints = checkpoints
        with torch.no_grad():
            self.inner.weight[0] *= 1e6

    def forward(self, x):
        x = self.first(x)
        again = partial(checkpoint, use_reentrant=True) if self.checkpoints else lambda f, x: f(x)
        return self.head(again(self.inner, x) * 1e-6)


@pytest.mark.parametrize("formats", [["float16", "bfloat16"], ["bfloat16"]])
def test_a_reentrant_checkpoint_is_judged_as_without(formats):
    """torch.autograd.grad refuses it; its weights have no gradient before the backward."""
    both = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = Hidden(checkpoints=checkpoints)
        model.head.weight.grad = torch.ones(4, 16, **ON)
        both.append(what_if(model, loss, batches(), formats=formats))
        assert torch.equal(model.head.weight.grad, torch.ones(4, 16, **ON))
        assert model.first.weight.grad is None
    plain, again = both
    assert again.unseen == []
    assert again.answer == plain.answer
    for one, other in zip(plain.layers, again.layers, strict=True):
        for form, verdict in one.verdicts.items():
            assert other.verdicts[form].state == verdict.state
            assert other.verdicts[form].cosine == pytest.approx(verdict.cosine, abs=COSINE)
    assert found(again)["bfloat16"] == []


@torch.library.custom_op("apex_tests::multiplied", mutates_args=())
def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A kernel of the program's own."""
    return x @ weight


multiplied.register_autograd(
    lambda ctx, gradient: (
        gradient @ ctx.saved_tensors[1].T,
        ctx.saved_tensors[0].flatten(0, -2).T @ gradient.flatten(0, -2),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Uses(nn.Module):
    """Matrices that are only added, normalised, or multiplied where nothing shows it."""

    def __init__(self, *, hides):
        super().__init__()
        self.place, self.head = nn.Parameter(torch.randn(6, 16, **ON)), nn.Linear(16, 4)
        self.start = nn.Parameter(torch.randn(1, 1, 16, **ON))
        self.own = nn.Parameter(torch.randn(16, 16, **ON) / 4)
        self.hides = hides

    def forward(self, x):
        x = torch.cat([self.start.expand(len(x), -1, -1), x[:, 1:]], 1) + self.place[:6]
        weight = self.own.t() / self.own.square().sum().sqrt()
        x = multiplied(x, weight) if self.hides else x @ weight
        return self.head(x)


@pytest.mark.parametrize("hides", [False, True])
def test_matrices_that_no_product_has_are_seen_where_torch_uses_them(hides):
    torch.manual_seed(0)
    result = what_if(Uses(hides=hides), loss, batches(), formats=["bfloat16"])
    assert result.unseen == (["Uses"] if hides else [])
    assert ("everywhere is safe" in result.answer) is not hides


def _mapped(model, batch):
    return F.cross_entropy(torch.vmap(model)(batch[0]).flatten(0, 1), batch[1].flatten())


def _per_sample(model, batch):
    weights = dict(model.named_parameters())

    def one(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    slopes = torch.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(weights, *batch)
    return loss(model, batch) + 0.1 * sum(x.square().mean() for x in slopes.values())


@pytest.mark.parametrize(("of", "is_part"), [(_mapped, False), (_per_sample, True)])
def test_products_under_torch_func_are_counted(of, is_part):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    result = what_if(model, of, batches(), formats=["bfloat16"])
    assert result.others == {"linear under torch.func": 16}
    expected = (
        "bfloat16 is safe for the products that were measured."
        if is_part
        else "Nothing was measured"
    )
    assert f"\n{result.answer}".count(f"\n{expected}") == 1


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleDict({"embedding": nn.Embedding(5, 8), "head": nn.Linear(8, 5)})
        self.inside["head"].weight = self.inside["embedding"].weight
        self.mixed, self.used, self.unused = Mixed(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused.weight = self.used.weight

    def forward(self, x):
        return self.inside["head"](self.used(self.mixed(self.inside["embedding"](x))))


class Mixed(nn.Module):
    """Reads the weights of a child that it also calls."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(8, 8)

    def forward(self, x):
        return self.child(x) + F.linear(x, self.child.weight)


def test_a_policy_names_the_innermost_module_that_it_can():
    data = [torch.arange(5, device="cpu")] * 8
    result = what_if(Tied(), lambda m, x: F.cross_entropy(m(x), x), data)
    keep = {one.name: one.keep for one in result.layers}
    # no module but the model has both tied weights and is called
    assert keep == {
        "inside.embedding": None, "inside.head": None, "mixed": "mixed", "mixed.child": "mixed",
        "used": None,
    }  # fmt: skip


def state_of(model, optimizer):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = [t for one in optimizer.state.values() for t in one.values()]
    return {
        "identities": {name: id(one) for name, one in tensors.items()},
        "bits": [one.detach().clone() for one in tensors.values()],
        "gradients": {name: id(p.grad) for name, p in model.named_parameters()},
        "gradient bits": [p.grad.clone() for p in model.parameters() if p.grad is not None],
        "optimizer": [t.clone() if isinstance(t, torch.Tensor) else t for t in flat],
        "needed": [p.requires_grad for p in model.parameters()],
        "groups": copy.deepcopy([{**g, "params": 0} for g in optimizer.param_groups]),
        "random": [torch.get_rng_state(), torch.tensor(random.getstate()[1], device="cpu")],
        "hooks": [
            {k: len(v) for k, v in vars(m).items() if k.endswith(("hooks", "kwargs", "called"))}
            for m in model.modules()
        ],
        "attributes": [
            {k: v for k, v in vars(m).items() if isinstance(v, (int, float, bool))}
            for m in model.modules()
        ],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Noting(nn.Module):
    """Counts its calls, replaces a buffer, writes into a weight, prints, draws numbers.

    It also writes into a gradient, takes another away, and thaws a frozen weight.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16, **ON))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        self.linear.weight.data.clamp_(-0.1, 0.1)
        self.linear.weight.grad.mul_(2.0)
        self.linear.bias.grad = None
        self.linear.bias.requires_grad_(True)
        print("called", random.random())  # noqa: T201  # swallowed
        return self.linear(x)


def _fails_at(number):
    calls = []

    def failing(model, batch):
        calls.append(1)
        found = loss(model, batch)
        if len(calls) == number:
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            raise RuntimeError("planted")
        return found

    return failing


@pytest.mark.parametrize("fails", [None, 1, 3, 9], ids=["whole", "first", "interrupted", "later"])
def test_it_changes_nothing_whatever_fails(fails, capsys):
    model = nn.Sequential(nn.Linear(16, 16), Noting(), network(factor=40.0)).train()
    model[2][0].eval()  # a frozen part
    model[1].linear.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    capsys.readouterr()
    before = state_of(model, optimizer)
    if fails is None:
        what_if(model, loss, batches(), optimizer=optimizer)
    else:
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            what_if(model, _fails_at(fails), batches(), optimizer=optimizer)
    after = state_of(model, optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert capsys.readouterr().out == ""


def test_compiled_and_wrapped_models_have_the_names_of_plain_ones():
    model = network()
    names = [one.name for one in what_if(model, loss, batches(1)).layers]
    model[0] = torch.compile(model[0], backend="eager")
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    assert [one.name for one in what_if(compiled, loss, batches(1)).layers] == names


def _under_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


def _infinite(model, batch):
    return loss(model, batch) * math.inf


FROZEN = network().requires_grad_(False)
REFUSED = {
    "no model": ((3, loss, batches()), {}, TypeError, "model was int, loss was"),
    "no loss": ((network(), 3, batches()), {}, TypeError, "loss was int"),
    "no batches": ((network(), loss, 3), {}, TypeError, "batches was int"),
    "no formats": ((network(), loss, []), {"formats": None}, TypeError, "formats was NoneType"),
    "limit": ((network(), loss, batches()), {"limit": -1}, ValueError, "limit was -1; allowed are"),
    "a pair": ((network(), lambda m, b: (loss(m, b), m), batches()), {}, TypeError, "a tuple;"),
    "no scalar": ((network(), lambda m, b: m(b[0]), batches()), {}, TypeError, r"\(8, 6, 4\)"),
    "no tensor": ((network(), lambda m, b: 3.0, batches()), {}, TypeError, "returned a float"),
    "no batch": ((network(), loss, []), {}, ValueError, "batches was empty"),
    "half": ((network().half(), loss, batches()), {}, ValueError, "is torch.float16; pass a model"),
    "complex": (
        (nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)), loss, batches()), {}, ValueError,
        "0.weight is complex, .* real and imaginary parts",
    ),
    "frozen": ((FROZEN, loss, batches()), {}, ValueError, "no weight requires a gradient"),
    "autocast": ((network(), _under_autocast, batches()), {}, ValueError, "bfloat16 already"),
    "inf": ((network(), _infinite, batches()), {}, ValueError, "not finite in float32"),
    "a mean of nothing": ((network(), loss, [*batches(1), tuple(b[:0] for b in batches(1)[0])]), {},
        ValueError, "batch 1 is not finite"),
    "format": ((network(), loss, []), {"formats": ["fp8"]}, ValueError, "allowed: .'float16'"),
    "no optimizer": (
        (network(), loss, batches()), {"optimizer": "sgd"}, TypeError, "the str cannot be copied",
    ),
    "optimizer": (
        (network(), loss, batches()), {"optimizer": torch.optim.SGD(network().parameters(), 0.1)},
        TypeError, "SGD cannot be copied together",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "options", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(given, options, error, match):
    with pytest.raises(error, match=match):
        what_if(*given, **options)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_whose_single_step_fails(kind):
    model = network()
    with pytest.raises(
        TypeError, match=f"copy of the {kind.__name__} failed in a step.*leave optimizer out"
    ):
        what_if(model, loss, batches(2), formats=["e4m3"], optimizer=kind(model.parameters()))


def _pairs():
    return ({"x": x, "y": y} for x, y in itertools.cycle(batches()))


def _of_pairs(model, batch):
    return loss(model, (batch["x"], batch["y"]))


def test_batches_are_whatever_the_loss_takes():
    """A generator, without end; of dictionaries; a tensor, whose rows are batches."""
    expected = what_if(network(), loss, batches()).layers
    assert what_if(network(), _of_pairs, _pairs(), limit=8).layers == expected
    x = batches()[0][0]
    assert what_if(network(), lambda m, b: m(b[None]).square().sum(), x).is_decided


def test_formats_may_be_one_name_or_an_iterator():
    expected = what_if(network(), loss, batches(), formats=["e4m3"]).layers
    assert what_if(network(), loss, batches(), formats="e4m3").layers == expected
    assert what_if(network(), loss, batches(), formats=iter(["e4m3"])).layers == expected


def test_batches_of_different_sizes():
    listed = [(x[: n + 1], y[: n + 1]) for n, (x, y) in enumerate(batches())]
    assert len(found(what_if(network(), loss, listed), "safe")["bfloat16"]) == 6


def test_an_empty_batch_decides_nothing():
    """Its cosines are those of no numbers, 1; the sum of no losses is finite."""

    def total(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    empty = tuple(one[:0] for one in batches(1)[0])
    result = what_if(model, total, [*batches(7), empty])
    assert found(result, "not decided") == dict.fromkeys(result.formats, ["0", "1"])
    assert result.answer.startswith(
        "Not decided: apex measured 8 batches, and each layer needs results in at least 8"
    )
    assert found(what_if(model, total, [*batches(), empty]), "safe")["bfloat16"] == ["0", "1"]
    nothing = what_if(model, total, [empty] * 8)
    assert nothing.answer == (
        "Nothing was measured, because no layer with a product returned any numbers.\n"
        "Not seen: `0`, `1`."
    )


class Sometimes(nn.Sequential):
    """Calls its second layer for some batches only."""

    def forward(self, x):
        return self[1](self[0](x)) if x[0, 0] > 0 else self[0](x)


def test_a_layer_that_was_seen_in_fewer_than_8_batches_is_not_decided():
    torch.manual_seed(0)
    listed = [(-1.0) ** n * torch.ones(4, 8, **ON) for n in range(10)]
    model = Sometimes(nn.Linear(8, 8), nn.Linear(8, 8))
    result = what_if(model, lambda m, x: m(x).square().mean(), listed)
    assert found(result, "not decided") == dict.fromkeys(result.formats, ["1"])
    assert found(result, "safe")["bfloat16"] == ["0"]
    assert len(result.layers[1].batches) == 5
    assert "bfloat16 is not decided for `1` (fewer than 8 batches)." in result.answer
    assert "; it is not decided for `1` (fewer than 8 batches)." in result.answer
    assert "1 of 2 linear layers is safe, 1 not decided." in result.answer


def test_a_model_without_products_is_not_called_safe():
    model = nn.Sequential(nn.LayerNorm(16))
    result = what_if(model, lambda m, b: m(b[0]).square().mean(), batches())
    assert (
        result.answer
        == "Nothing was measured, because no layer with a product returned any numbers."
    )
    assert not result.is_decided
    with pytest.raises(ValueError, match="8 batches decided no layer"):
        result.policy()


def test_gradients_that_are_all_zero_were_not_seen():
    """The cosine of zeros to zeros is 1: the first layer's gradients pass a matrix of zeros."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    nn.init.zeros_(model[1].weight)
    result = what_if(model, loss, batches())
    assert result.unseen == ["0"]
    assert "bfloat16 is safe for the products that were measured." in result.answer.splitlines()


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_the_mode_of_the_model_is_what_is_looked_at(mode):
    modes = []

    def noted(model, batch):
        modes.append(model.training)
        return loss(model, batch)

    model = network().train(mode)
    what_if(model, noted, batches(1))
    assert {*modes} == {mode}
    assert model.training == mode


def test_batches_that_the_loss_writes_are_what_they_were_in_each_pass():
    """The last batch has the largest inputs and asks for another loss scale: a second pass."""
    seen = []

    def in_place(model, batch):
        seen.append(float(batch.abs().amax()))
        return model(batch.div_(255.0)).square().mean()

    def apart(model, batch):
        return model(batch / 255.0).square().mean()

    torch.manual_seed(0)
    listed = [torch.full((4, 8), 4.0 ** (n + 3)) for n in range(8)]
    before = [one.clone() for one in listed]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    found = what_if(model, in_place, listed, formats=["float16"])
    assert found.ranges.gradient == what_if(model, apart, before).ranges.gradient
    assert len(seen) > 8
    assert {*seen} == {4.0 ** (n + 3) for n in range(8)}
    assert all(map(torch.equal, listed, before))


class Own(nn.Module):
    """A product of its own."""

    def __init__(self, product):
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.eye(8) * 1e4), product

    def forward(self, x):
        return self.product(x, self.weight)


OTHER_NAMES = {
    "linalg": torch.linalg.matmul,
    "reversed": lambda x, w: w.__rmatmul__(x),
    "in place": lambda x, w: torch.zeros(4, 8, **ON).addmm_(x, w),
    "an overload": torch.ops.aten.mm.default,
}


@pytest.mark.parametrize("product", OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_products_by_their_other_names_are_judged(product):
    listed = [torch.full((4, 8), 100.0) for _ in range(8)]
    result = what_if(Own(product), lambda m, x: m(x).mean(), listed, formats=["float16"])
    assert [layer.kind for layer in result.states("float16", "not safe")] == ["Own"]


def test_the_answer_says_what_was_not_seen():
    torch.manual_seed(0)
    listed = [torch.randn(4, 8) for _ in range(8)]
    model = nn.Sequential(Own(lambda x, w: (x[:, :, None] * w).sum(1)), nn.Linear(8, 8))
    answer = what_if(model, lambda m, x: m(x).mean(), listed).answer
    assert "bfloat16 is safe for the products that were measured." in answer.splitlines()
    assert "every layer that was seen is safe then." in answer
    assert answer.startswith("Use O4 (or O5).")
    assert answer.endswith("\nNot seen: `0`.")


def test_an_optimizer_with_frozen_weights_is_made_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    listed = [torch.randn(4, 8) for _ in range(8)]
    result = what_if(model, lambda m, x: m(x).square().mean(), listed, optimizer=optimizer)
    assert result.optimizer == "SGD"


@pytest.mark.parametrize(
    ("product", "name"),
    [
        (torch.cdist, "cdist"),
        (
            lambda x, w: torch.mm(x.detach(), w.detach(), out=torch.empty(4, 8, **ON)) + w[0],
            "mm(out=)",
        ),
    ],
)
def test_products_that_are_not_judged_are_counted(product, name):
    torch.manual_seed(0)
    listed = [torch.randn(4, 8, **ON) for _ in range(8)]
    model = nn.Sequential(Own(product), nn.Linear(8, 8))
    result = what_if(model, lambda m, x: m(x).mean(), listed, formats=["bfloat16"])
    assert result.others == {name: 8}
    assert "bfloat16 everywhere is safe" not in result.answer
    assert result.reasons().endswith(f"Products that apex did not judge: {name} (8 calls).")


def test_weights_that_a_forward_writes_are_rounded_anew():
    """e4m3 keeps rounded weights between batches; a write through ``.data`` has no version."""

    class Written(nn.Linear):
        def forward(self, x):
            self.weight.data.copy_(x[:8, :8])
            return super().forward(x)

    torch.manual_seed(0)
    listed = [torch.randn(8, 8, **ON) for _ in range(8)]
    result = what_if(Written(8, 8), lambda m, x: m(x).square().mean(), listed, formats=["e4m3"])
    assert found(result, "safe") == {"e4m3": [""]}
