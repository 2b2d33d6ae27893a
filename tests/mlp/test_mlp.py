"""`MLP`: its parameters and module rules. Numbers are in tests/ops/test_dense.py."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import apex.mlp
from apex.mlp import MLP, MlpFunction, mlp_function
from tests.checkpoints import reloaded
from tests.tolerance import integers

SIZES = [5, 7, 4, 3]


@pytest.mark.parametrize("shape", [(6,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
def test_the_layer_is_the_function_of_its_parameters(activation, bias, shape):
    model, x = MLP(SIZES, bias=bias, activation=activation), torch.randn(*shape, 5)
    number = ["none", "relu", "sigmoid"].index(activation)
    expected = mlp_function(bias, number, x, *model.weights, *model.biases)
    assert torch.equal(model(x), expected)
    assert expected.shape == (*shape, 3)


def test_parameters():
    model = MLP(SIZES)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == {
        "weight_0": (7, 5), "bias_0": (7,), "weight_1": (4, 7), "bias_1": (4,),
        "weight_2": (3, 4), "bias_2": (3,),
    }  # fmt: skip
    assert [id(w) for w in model.weights] == [id(getattr(model, f"weight_{i}")) for i in range(3)]
    assert [id(b) for b in model.biases] == [id(getattr(model, f"bias_{i}")) for i in range(3)]
    assert MLP(SIZES, bias=False).biases == []
    assert (model.num_layers, model.mlp_sizes) == (3, SIZES)
    assert repr(model) == "MLP(MLP sizes: [5, 7, 4, 3], Bias=True, activation=relu)"


def test_initialisation():
    """N(0, sqrt(2 / (fan_in + fan_out))) and N(0, sqrt(1 / out)), within 5 standard errors."""
    model = MLP([300, 500])
    for tensor, std in ((model.weight_0, (2 / 800) ** 0.5), (model.bias_0, (1 / 500) ** 0.5)):
        error = 5 * std / tensor.numel() ** 0.5
        assert abs(tensor.mean().item()) < error
        assert abs(tensor.std().item() - std) < error
    before = model.weight_0.detach().clone()
    model.reset_parameters()
    assert not torch.equal(model.weight_0, before)


def test_layers_without_features():
    assert MLP([3, 0, 2])(torch.ones(4, 3)).shape == (4, 2)
    assert MLP([0, 0])(torch.ones(4, 0)).shape == (4, 0)


def test_dtype_and_device():
    model = MLP([4, 2], dtype=torch.bfloat16, device="cpu")
    assert model(torch.ones(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert MLP([4, 2], device="meta").weight_0.is_meta


class _Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_activations_overwrite_the_product(activation):
    """And the backward has one tensor for each layer."""
    model, kept = MLP([64, 64, 64], activation=activation), set()

    def keep(tensor):
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    x = torch.randn(2, 4, 64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _Calls() as calls:
        y = model(x)
    kept -= {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {x.data_ptr(), y.data_ptr()} < kept
    assert len(kept) == 3  # the input, and what each layer gives
    assert calls.names.count(f"{activation}_") == 2
    assert activation not in calls.names


def test_ensembles():
    """torch.func over stacked parameters: vmap, and gradients of each."""
    models = [MLP(SIZES, activation="sigmoid") for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(models)
    x = torch.randn(3, 6, 5)

    def loss(parameters, x):
        return torch.func.functional_call(models[0], parameters, (x,)).square().sum()

    found = torch.vmap(torch.func.grad(loss))(stacked, x)
    for i, model in enumerate(models):
        expected = torch.autograd.grad(model(x[i]).square().sum(), list(model.parameters()))
        for (name, _), grad in zip(model.named_parameters(), expected, strict=True):
            torch.testing.assert_close(found[name][i], grad)


def test_copies_are_their_own():
    model = MLP(SIZES)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.weight_0)
    assert not torch.equal(model.weights[0], other.weights[0])
    x = torch.randn(2, 5)
    assert torch.equal(reloaded(model)(x), model(x))


def _of_integers():
    model = MLP(SIZES)
    for parameter in model.parameters():
        parameter.data.copy_(integers(*parameter.shape))
    return model


def test_torchscript():
    model, x = _of_integers(), integers(2, 5)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(torch.cat([x, x]))[:2], model(x))
    parent = nn.Sequential(model)
    for each in (model, parent):
        with pytest.raises(RuntimeError, match=r"MLP: torch.jit.script cannot.*Use torch.compile"):
            torch.jit.script(each)
    assert parent[0] is model

    def caller(x: torch.Tensor, weight: torch.Tensor):
        return mlp_function(False, 1, x, weight)

    with pytest.raises(Exception, match=r"variable number of arguments(.|\n)*mlp_function"):
        torch.jit.script(caller)


def test_errors():
    with pytest.raises(TypeError, match="activation is 'tanh'; allowed are 'none', 'relu', 'sigm"):
        MLP([2, 3], activation="tanh")
    with pytest.raises(TypeError, match=r"mlp_sizes is \[2\]; pass at least two sizes"):
        MLP([2])
    x, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
    for function in (mlp_function, MlpFunction.apply):
        with pytest.raises(TypeError, match="got 2 tensors. Pass an input, weights, and one"):
            function(True, 1, x, weight)
        with pytest.raises(TypeError, match="got 1 tensors. Pass an input and weights"):
            function(False, 1, x)
        with pytest.raises(
            ValueError, match=r"activation is 3; allowed are 0 \(none\), 1 \(relu\)"
        ):
            function(True, 3, x, weight, bias)
        with pytest.raises(ValueError, match="activation is 1.0; allowed are"):
            function(True, 1.0, x, weight, bias)
        one = function(True, torch.tensor(1), x, weight, bias)
        assert torch.equal(one, function(True, 1, x, weight, bias))
    with pytest.raises(
        ValueError, match=r"the output of weight_0 has shape \[2, 4\] and weight_1 "
    ):
        mlp_function(False, 1, x, weight, weight)


def test_names():
    assert apex.mlp.mlp.MLP is MLP
    assert apex.mlp.mlp.mlp_function is mlp_function
    assert {"MLP", "MlpFunction", "mlp_function", "swiglu"} == set(apex.mlp.__all__)
