"""The permutation of channels before pruning: the network's function stays, more is kept."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.contrib.sparsity import ASP, _permutation, create_mask
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
from apex.parallel import SyncBatchNorm
from tests.tolerance import RECURRENT, assert_close_to_largest


@pytest.fixture(autouse=True)
def anew():
    ASP.reset()
    yield
    ASP.reset()
    amp.reset()


class Parts(nn.Module):
    """Layers, and a function of them and the input."""

    def __init__(self, call, **layers):
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            setattr(self, name, layer.double() if isinstance(layer, nn.Module) else layer)

    def forward(self, x):
        return self.call(self, x)


def convolutions():
    """A residual network with a depthwise layer, whose inner channels alone are free."""

    def call(model, x):
        x = F.relu(model.stem(x))
        x = x + model.last(model.deep(F.max_pool2d(torch.relu(model.norm(model.first(x))), 1)))
        return model.head(x)

    layers = {"stem": nn.Conv2d(3, 16, 3, padding=1), "first": nn.Conv2d(16, 16, 3, padding=1)}
    layers |= {"norm": SyncBatchNorm(16), "deep": nn.Conv2d(16, 16, 3, padding=1, groups=16)}
    return Parts(call, **layers, last=nn.Conv2d(16, 16, 1), head=nn.Conv2d(16, 8, 1))


def two_heads():
    def call(model, x):
        x = F.gelu(model.norm(model.body(x)))
        return model.head(x) + F.dropout(model.other(x), 0.0, model.training)

    layers = {"body": nn.Linear(3, 16), "norm": nn.LayerNorm(16)}
    return Parts(call, **layers, head=nn.Linear(16, 8), other=nn.Linear(16, 8))


def mlp(*between):
    return nn.Sequential(nn.Linear(3, 16), *between, nn.Linear(16, 8))


def called(function, after=lambda m, y: y):
    """Two linear layers with any function of both between them."""

    def call(model, x):
        x = model.one(x.repeat_interleave(16, 1)[:, :16])
        return after(model, model.two(function(x, model)))

    return Parts(call, one=nn.Linear(16, 16), two=nn.Linear(16, 16))


def tied():
    model = called(lambda x, _: x)
    model.two.weight = model.one.weight
    return model


def hooked():
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    return model


def hooked_outside():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 16), nn.ReLU()), nn.Linear(16, 8))
    model[0].register_forward_hook(lambda *_: pytest.fail("was called with fx's proxies"))
    return model


def own_forward():
    model = mlp()
    model[0].forward = lambda x: nn.Linear.forward(model[0], x).flip(-1)
    return model


def norm_and_sum():
    layers = {name: nn.Conv1d(3, 16, 1) for name in ("one", "other")}
    layers |= {"norm": SyncBatchNorm(16), "head": nn.Conv1d(16, 8, 1)}
    return Parts(lambda m, x: m.head(m.norm(m.one(x), m.other(x))), **layers)


def grouped():
    layers = {"one": nn.Conv1d(3, 32, 1), "head": nn.Conv1d(32, 16, 1, groups=2)}
    return Parts(lambda m, x: m.head(m.one(x)), **layers)


def read_buffer():
    layers = {"one": nn.Conv1d(3, 16, 1), "norm": nn.BatchNorm1d(16), "head": nn.Conv1d(16, 8, 1)}
    return Parts(lambda m, x: m.head(m.norm(m.one(x))) * m.norm.running_var[0], **layers)


def same_memory():
    layers = {"one": nn.Linear(16, 16), "two": nn.Linear(16, 16)}
    model = Parts(lambda m, x: m.two(m.one(x)), **layers)
    model.two.weight = nn.Parameter(model.one.weight.detach().t())
    return model


def same_buffer():
    layers = {"one": nn.Conv1d(3, 16, 1), "norm": nn.BatchNorm1d(16), "head": nn.Conv1d(16, 16, 1)}
    layers |= {"other": nn.BatchNorm1d(16)}
    model = Parts(lambda m, x: m.other(m.head(m.norm(m.one(x)))), **layers)
    model.other.running_mean = model.norm.running_mean
    return model


def weight_beside():
    model = called(lambda x, _: x)
    nn.utils.spectral_norm(model.two)
    return model


def used_inside():
    layers = {"layer": nn.TransformerEncoderLayer(16, 2, 16), "head": nn.Linear(16, 16)}
    return Parts(lambda m, x: m.layer(m.head(m.layer.linear1(x))), **layers)


def fill(model):
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.1, 1.0)
            tensor.data.mul_(torch.randint(0, 2, tensor.shape) * 2 - 1 if tensor.dim() > 1 else 1)
    return model.double()


def outputs(model, shape):
    inputs = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        return torch.stack([copy.deepcopy(model).train(mode)(inputs) for mode in (True, False)])


def permuted(model, **options):
    """Permute without pruning: the model must compute what it did."""
    ASP.init_model_for_pruning(model, **options)
    _permutation.permute(ASP._state, ASP._permutation[1])


FREE = {
    "convolutions": (convolutions, (2, 3, 9, 9), 1),
    "two heads": (two_heads, (5, 3), 2),
    "sequence": (
        lambda: mlp(nn.LayerNorm(16), nn.GELU(), FusedLayerNorm(16), nn.Dropout(0.0)),
        (2, 5, 3),
        1,
    ),
}


@pytest.mark.parametrize(("make", "shape", "count"), FREE.values(), ids=FREE.keys())
def test_the_function_stays_and_more_is_kept(make, shape, count, caplog):
    model = fill(make())
    before = outputs(model, shape)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    with caplog.at_level("INFO", logger="apex.sparsity"):
        permuted(model)
    assert f"permuted the input channels of {count} of " in caplog.text
    assert_close_to_largest(outputs(model, shape), before, RECURRENT)
    changed = 0
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not torch.equal(create_mask(weight), create_mask(weights[name])):
            old = (weights[name] * create_mask(weights[name])).abs().sum()
            changed += int((weight * create_mask(weight)).abs().sum() > old)
    assert changed >= 1
    ASP.reset()
    with caplog.at_level("INFO", logger="apex.sparsity"):
        permuted(model)
    assert "no better order was found" in caplog.text
    assert "permuted the input channels of 0 of " in caplog.text


NOT_FREE = {
    "tied": (tied, "two has tied weights"),
    "concatenated": (
        lambda: called(lambda x, _: torch.cat([x[:, :8], x[:, 8:]], 1)),
        "used by getitem",
    ),
    "read": (
        lambda: called(lambda x, _: x, lambda m, y: y * m.one.bias[0]),
        "one has tensors that are read elsewhere",
    ),
    "flipped": (lambda: called(lambda x, _: x.flip(1)), "used by flip"),
    "scaled": (lambda: called(lambda x, _: x * torch.arange(16)), "used by mul"),
    "a residual": (lambda: called(lambda x, m: x + F.relu(x)), "used by add"),
    "norm of 2-D or 3-D": (lambda: mlp(nn.BatchNorm1d(16)), "used by _1"),
    "called twice": (lambda: called(lambda x, m: m.one(x)), "one is called more than once"),
    "hooks": (hooked, "0 has hooks"),
    "hooks of what is around": (hooked_outside, ""),
    "a forward of its own": (own_forward, "0 has hooks"),
    "a norm that adds": (norm_and_sum, "used by norm"),
    "a buffer that is read": (read_buffer, "norm has tensors that are read elsewhere"),
    "weights in the same memory": (same_memory, "two has tied weights"),
    "one buffer of two norms": (same_buffer, "norm has tied weights"),
    "a weight that is no parameter": (weight_beside, "two has hooks"),
    "used inside another": (used_inside, "layer.linear1 is called more than once"),
    "groups": (grouped, "used by head"),
    "groups before": (
        lambda: nn.Sequential(nn.Conv1d(4, 16, 1, groups=2), nn.Conv1d(16, 16, 1)),
        "the outputs of 1: used by output",
    ),
    "a norm of positions": (
        lambda: nn.Sequential(nn.Conv1d(3, 16, 1), nn.LayerNorm(16), nn.Conv1d(16, 16, 1)),
        "used by _1",
    ),
    "a pool over channels": (
        lambda: nn.Sequential(nn.Conv1d(3, 32, 1), nn.MaxPool2d((2, 1)), nn.Conv1d(16, 16, 1)),
        "used by _1",
    ),
    "untraceable": (lambda: called(lambda x, _: x if x.sum() > 0 else -x), "cannot trace"),
    "a net in training alone": (
        lambda: called(lambda x, model: x.relu() if model.training else x),
        "it calls other layers in training",
    ),
}


@pytest.mark.parametrize(("make", "text"), NOT_FREE.values(), ids=NOT_FREE.keys())
def test_what_is_not_free_stays_and_is_named(make, text, caplog):
    model = fill(make())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level("INFO", logger="apex.sparsity"):
        permuted(model)
    assert text in caplog.text
    assert "[ASP] permuted the outputs of" not in caplog.text
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert model.training


def test_tracing_leaves_nothing_in_the_model():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.count, self.last = mlp(), 0, None
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            self.calls.add_(1)
            self.last = self.layers(x) * torch.ones(8)
            return self.last

    model = Counts()
    before = set(vars(model))
    permuted(model)
    assert (model.count, model.last, model.calls.item()) == (0, None, 0.0)
    assert set(vars(model)) == before


def test_search_finds_the_best_order_of_a_small_matrix():
    large = torch.tensor([0, 1, 2, 3, 8, 9])
    matrix = torch.rand(6, 12) * 0.01
    matrix[:, large] += 1.0
    assert _permutation.kept(matrix) < 30
    order = _permutation.best_order(matrix)
    assert order.sort().values.tolist() == list(range(12))
    assert _permutation.kept(matrix[:, order]) == pytest.approx(_permutation.kept(matrix) + 12, 0.1)
    assert torch.equal(order, _permutation.best_order(matrix))
    for weights in (matrix, torch.randn(6, 12)):
        swaps = _permutation._swaps(weights.abs().t())
        assert swaps
        assert all(one // 4 != two // 4 for one, two in swaps)
        again = weights[:, _permutation.best_order(weights)]
        assert _permutation.kept(again) > _permutation.kept(weights)
        assert _permutation.best_order(again).tolist() == list(range(12))


def pairs(*tensors):
    """Which values stand together, in no order of rows or columns."""
    return sorted(zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True))


@pytest.mark.parametrize(("level", "fused"), [("O0", False), ("O2", False), ("O2", True)])
def test_masters_and_moments_follow_their_weights(level, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    options = {"opt_level": level, "fused_step": fused, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    inputs = torch.randn(8, 32)
    for number in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model(inputs).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        if number < 2:
            optimizer.step()

    def together():
        groups = (param for group in optimizer.param_groups for param in group["params"])
        return [
            pairs(weight, master, optimizer.state[master]["exp_avg"], weight.grad)
            for weight, master in zip(model.parameters(), groups, strict=True)
        ]

    before, order = together(), model[2].weight.clone()
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    _permutation.permute(ASP._state, ASP._permutation[1])
    assert not torch.equal(order, model[2].weight)
    assert together() == before
    optimizer.step()  # amp takes none of it for a change of the gradients


def test_state_of_another_shape_keeps_channels(caplog):
    model = mlp()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with caplog.at_level("INFO", logger="apex.sparsity"):
        ASP.prune_trained_model(model, optimizer)
    assert "the optimizer's state has another shape than a weight" in caplog.text
    assert ASP.is_sparsity_enabled()


def test_what_was_done_can_be_saved_and_switched_off(tmp_path, caplog):
    ASP.set_permutation_saving_params(True, True, str(tmp_path / "new"))
    permuted(fill(two_heads()), verbosity=0)
    entry, *_ = json.loads((tmp_path / "new" / "model_offline_permutation_graph.json").read_text())
    assert entry["outputs_of"] == ["body", "norm"]
    assert entry["inputs_of"] == ["head", "other"]
    assert sorted(entry["order"]) == list(range(16))
    assert entry["kept_after"] > entry["kept_before"]
    for first, second, pattern in (
        (False, True, "m4n2_1d"),
        (True, False, "m4n2_1d"),
        (True, True, "m4n2_2d_best"),
    ):
        ASP.reset()
        ASP.set_permutation_saving_params(first)
        model = fill(mlp())
        weight = model[1].weight.clone()
        ASP.init_model_for_pruning(model, pattern, verbosity=0, allow_permutation=second)
        ASP.compute_sparse_masks()
        kept = model[1].weight != 0
        assert torch.equal(model[1].weight[kept], weight[kept])
        assert kept.sum() == 64
