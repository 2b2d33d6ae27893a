"""Weight normalization of a model: numbers, what is in the model, and what it works with."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm as torchs

from apex import amp
from apex.reparameterization import apply_weight_norm, remove_weight_norm
from tests.tolerance import assert_one_rounding


def model():
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 4))


def images():
    return torch.randn(5, 2, 6)


def gradients(module):
    return [param.grad for param in module.parameters()]


LAYERS = [(nn.Linear(5, 4), [5]), (nn.Conv2d(3, 6, 3), [3, 3, 3])]


@pytest.mark.parametrize(("layer", "size"), [*LAYERS, (nn.ConvTranspose1d(3, 6, 2), [3, 4])])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_numbers_are_torchs(layer, size, dim):
    layer, x = layer.double(), torch.randn(2, *size).double()
    plain = layer(x)
    ours, others = copy.deepcopy(layer), copy.deepcopy(layer)
    apply_weight_norm(ours, "weight", dim)
    torchs(others, "weight", dim)
    torch.testing.assert_close(ours(x), plain)
    theirs = others.parametrizations.weight
    with torch.no_grad():
        for g in (ours.weight_g, theirs.original0):
            g.mul_(torch.linspace(1, 2, g.numel()).view_as(g))
    y = ours(x)
    torch.testing.assert_close(y, others(x))
    y.square().sum().backward()
    others(x).square().sum().backward()
    torch.testing.assert_close(ours.weight_g.grad, theirs.original0.grad)
    torch.testing.assert_close(ours.weight_v.grad, theirs.original1.grad)


def test_what_is_in_the_model():
    m = apply_weight_norm(model())
    names = ["0.bias", "0.weight_g", "0.weight_v", "1.weight", "1.bias"]
    names += ["3.bias", "3.weight_g", "3.weight_v"]
    assert [name for name, _ in m.named_parameters()] == names
    assert [name for name in m.state_dict() if "running" not in name and "num" not in name] == names
    assert (m[0].weight_g.shape, m[3].weight_g.shape) == ((3, 1, 1), (4, 1))
    assert m[3].weight_v is dict(m.named_parameters())["3.weight_v"]
    assert isinstance(m[3], nn.Linear)
    assert type(m[3]).__name__ == "Linear"
    assert apply_weight_norm(nn.Linear(4, 2), dim=None).weight_g.shape == ()


def test_the_weight_is_never_stale():
    """The original kept it until a backward."""
    m = apply_weight_norm(model())
    x = images()
    first = m(x)
    doubled = {"3.weight_g": 2 * m[3].weight_g}
    called = torch.func.functional_call(m, doubled, x)
    m[3].weight_g.data.mul_(2)
    for second in (m(x), called):
        torch.testing.assert_close(second - m[3].bias, 2 * (first - m[3].bias))
    with torch.no_grad():
        m.eval()(x)
    m.train()
    m(x).square().sum().backward()
    assert all(grad is not None and grad.any() for grad in gradients(m[3]))


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_have_float_norms(dtype):
    layer = nn.Linear(64, 30).to(dtype)
    weight = layer.weight.detach().clone()
    apply_weight_norm(layer)
    assert (layer.weight_g.dtype, layer.weight_v.dtype) == (torch.float32, dtype)
    exact = weight.double().square().sum(1, keepdim=True).sqrt()
    assert_one_rounding(layer.weight_g.detach(), exact)
    assert torch.equal(layer.weight, weight)
    layer(torch.randn(2, 64, dtype=dtype)).sum().backward()
    assert (layer.weight_g.grad.dtype, layer.weight_v.grad.dtype) == (torch.float32, dtype)
    assert remove_weight_norm(layer).weight.dtype == dtype


def test_half_after_weight_norm():
    layer = apply_weight_norm(nn.Linear(64, 30)).half()
    assert {param.dtype for param in layer.parameters()} == {torch.float16}
    g, v = layer.weight_g.detach().double(), layer.weight_v.detach().double()
    assert_one_rounding(layer.weight.detach(), g * v / v.square().sum(1, keepdim=True).sqrt())


def test_frozen_weights_stay_frozen():
    m = model()
    m[3].weight.requires_grad_(False)
    apply_weight_norm(m)
    assert [param.requires_grad for param in m[3].parameters()] == [True, False, False]
    assert m[0].weight_g.requires_grad
    assert not remove_weight_norm(m)[3].weight.requires_grad


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(make):
    """A copy of the original's failed after a forward; torch's breaks the other when removed."""
    m = apply_weight_norm(model())
    x = images()
    m(x)
    m.eval()
    wanted = m(x)
    twin = make(m)
    assert torch.equal(twin(x), wanted)
    twin[3].weight_g.data.mul_(2)
    assert torch.equal(m(x), wanted)
    assert not torch.equal(twin(x), wanted)
    twin(x).sum().backward()
    assert gradients(m) == [None] * 8
    with nn.utils.parametrize.cached():
        assert not torch.equal(twin[3].weight, m[3].weight)
    remove_weight_norm(twin)
    assert type(twin[3]) is nn.Linear
    assert torch.equal(m(x), wanted)


def test_state_dicts():
    m, other = apply_weight_norm(model()), apply_weight_norm(model())
    other.load_state_dict(m.state_dict())
    assert torch.equal(other[3].weight, m[3].weight)
    peer = torchs(nn.Linear(12, 4))
    m[3].load_state_dict(peer.state_dict())
    torch.testing.assert_close(m[3].weight, peer.weight)
    peer.load_state_dict(other[3].state_dict())
    torch.testing.assert_close(peer.weight, other[3].weight)
    with pytest.raises(RuntimeError, match=r'Missing key.*: "weight_g", "weight_v"'):
        m[3].load_state_dict(nn.Linear(12, 4).state_dict())


@pytest.mark.onednn
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(cls):
    plain = cls(3, 4, num_layers=2, bidirectional=True)
    rnn = apply_weight_norm(copy.deepcopy(plain))
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(rnn(x)[0], plain(x)[0])
    rnn(x)[0].sum().backward()
    assert all(grad is not None for grad in gradients(rnn))
    twin = copy.deepcopy(rnn)
    twin.weight_hh_l1_g.data.mul_(2)
    changed = twin(x)[0]
    assert not torch.equal(changed, rnn(x)[0])
    torch.testing.assert_close(remove_weight_norm(twin)(x)[0], changed)
    assert type(twin) is cls
    assert rnn.double()(x.double())[0].dtype == torch.float64


@pytest.fixture
def reset():
    yield
    amp.reset()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.usefixtures("reset")
def test_amp(level):
    """A step changes what it should, and a checkpoint has it."""

    def training():
        torch.manual_seed(1)
        m = apply_weight_norm(model())
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        return amp.initialize(m, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)

    def step(m, optimizer, x):
        loss = m(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    m, optimizer = training()
    x, y = images(), images()
    before = copy.deepcopy(m.state_dict())
    step(m, optimizer, x)
    after = m.state_dict()
    for name in ("0.weight_g", "0.weight_v", "3.weight_g", "3.weight_v"):
        assert after[name].dtype == torch.float32
        assert not torch.equal(after[name], before[name])
    dtype = {"O2": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)
    assert m[3].weight.dtype == m[3].weight_g.dtype == dtype
    other, its_optimizer = training()
    other.load_state_dict(after)
    step(m, optimizer, y)
    step(other, its_optimizer, y)
    for name, value in m.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch._dynamo.reset()
    m = apply_weight_norm(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    x = torch.randn(5, 3)
    m(x).sum().backward()
    wanted = gradients(m)
    m.zero_grad()
    compiled = torch.compile(m, backend=backend, fullgraph=True)
    compiled(x).sum().backward()
    torch.testing.assert_close(gradients(m), wanted)
    m[0].weight_g.data.mul_(2)
    torch.testing.assert_close(compiled(x), m(x))


def test_removed():
    m = apply_weight_norm(model())
    x = images()
    m.eval()
    m[3].weight_g.data.mul_(3)
    before, weight = m(x), m[3].weight
    assert remove_weight_norm(m) is m
    assert torch.equal(m(x), before)
    assert torch.equal(m[3].weight, weight)
    assert isinstance(m[3].weight, nn.Parameter)
    assert m[3].weight.requires_grad
    assert [*m[3].state_dict()] == ["bias", "weight"]
    assert (type(m[0]), type(m[3])) == (nn.Conv1d, nn.Linear)
    assert vars(m[3]).keys() == vars(nn.Linear(1, 1)).keys()
    apply_weight_norm(m)  # and again
    torch.testing.assert_close(m(x), before)


def test_mistakes():
    m = model()
    with pytest.raises(IndexError, match=r"dim was 2 and v has shape \[4, 12\]"):
        apply_weight_norm(m, dim=2)  # the convolution's has it
    assert [*m[0].state_dict()] == ["weight", "bias"]
    layer = apply_weight_norm(nn.Linear(2, 3))
    for value in (torch.ones(3, 2), nn.Parameter(torch.ones(3, 2))):
        with pytest.raises(AttributeError, match="computed from weight_g and weight_v. Set these"):
            layer.weight = value
