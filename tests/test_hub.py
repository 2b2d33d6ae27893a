"""``apex.hub``: layers as the package ``kernels`` takes them, and transformers 5 through it."""

import importlib.util
import inspect
import json
from types import MethodType
from unittest import mock

import pytest
import torch
from torch import nn

from apex import hub
from apex.ops import _runtime
from apex.patching import _layers as layers

kernels = importlib.util.find_spec("kernels")
with_kernels = pytest.mark.skipif(kernels is None, reason="the package kernels is not installed")


@pytest.mark.parametrize("name", hub.LAYERS)
def test_layers_are_what_kernels_accepts(name):
    """No constructor, no members of their own, and one argument."""
    layer = getattr(layers, name)
    assert layer.__init__ is nn.Module.__init__
    known = {member for member, _ in inspect.getmembers(nn.Module)}
    more = {member for member, _ in inspect.getmembers(layer)} - known
    assert more <= {"can_torch_compile", "has_backward"}
    assert len(inspect.signature(layer.forward).parameters) == 2


def test_the_folder_is_a_repository():
    build = hub.PATH / "torch-universal"
    assert json.loads((build / "metadata.json").read_text())["python-depends"] == []
    spec = importlib.util.spec_from_file_location("apex_hub", build / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert all(getattr(module.layers, name) for name in hub.LAYERS)


def test_without_the_package_the_error_says_what_to_install():
    with (
        mock.patch.dict("sys.modules", {"kernels": None}),
        pytest.raises(ModuleNotFoundError, match="pip install kernels"),
    ):
        hub.kernel_mapping()


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_bound_layers_compute_layer_norm_and_swiglu(path):
    norm = nn.LayerNorm(32, device="cpu", dtype=torch.float32)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    mlp = nn.Module()
    for name, sizes in {"gate": (32, 24), "up": (32, 24), "down": (24, 32)}.items():
        linear = nn.Linear(*sizes, device="cpu", dtype=torch.float32)
        mlp.add_module(f"{name}_proj", linear)
    x = torch.randn(5, 32, device="cpu", dtype=torch.float32)
    with _runtime.use(path):
        y = MethodType(layers.LayerNorm.forward, norm)(x)
        z = MethodType(layers.SwiGLUMLP.forward, mlp)(x)
    torch.testing.assert_close(y, norm(x))
    both = torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    torch.testing.assert_close(z, mlp.down_proj(both))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LayerNorm", "SwiGLUMLP", "RMSNorm"])
def test_layers_compile_without_a_break(name):
    """``can_torch_compile`` is what kernels reads before it takes a layer under torch.compile."""
    module = nn.Module()
    x = torch.randn(5, 8, device="cpu", dtype=torch.float32)
    module.weight = nn.Parameter(torch.rand(8, device="cpu", dtype=torch.float32))
    module.bias, module.normalized_shape = nn.Parameter(module.weight.detach().clone()), (8,)
    module.eps = 1e-5
    for part in ("gate_proj", "up_proj", "down_proj"):
        module.add_module(part, nn.Linear(8, 8, device="cpu", dtype=torch.float32))
    module.forward = MethodType(getattr(layers, name).forward, module)
    torch.compiler.reset()
    compiled = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module.forward(x))


# -- with kernels and transformers 5 ---------------------------------------------------------------


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def trained(model):
    tokens = torch.arange(20, device="cpu", dtype=torch.int64).view(2, 10)
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@with_kernels
@pytest.mark.filterwarnings("ignore")
def test_kernels_takes_the_layers(llama):
    from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping

    mlp = type(llama.model.layers[0].mlp)
    plain = trained(llama)
    replace_kernel_forward_from_hub(mlp, "SwiGLUMLP")  # transformers registers no such layer
    try:
        with use_kernel_mapping(hub.kernel_mapping(), inherit_mapping=False):
            kernelize(llama, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
    finally:
        del mlp.kernel_layer_name
    assert llama.model.norm.forward.__func__ is layers.RMSNorm.forward
    assert llama.model.layers[1].mlp.forward.__func__ is layers.SwiGLUMLP.forward
    with _runtime.use("triton"):
        torch.testing.assert_close(trained(llama), plain)


@with_kernels
@pytest.mark.filterwarnings("ignore")
def test_kernel_config_of_transformers_finds_the_layers(llama):
    """``use_kernels`` with ``KernelConfig`` is for GPUs: the mapping is looked at."""
    from kernels import LocalLayerRepository, Mode
    from transformers import KernelConfig
    from transformers.utils import kernel_config

    config = KernelConfig({"RMSNorm": f"{hub.PATH}:RMSNorm"}, use_local_kernel=True)
    config.sanitize_kernel_mapping(llama)
    with mock.patch.object(kernel_config, "infer_device", return_value="cuda"):
        config.create_compatible_mapping(llama.train())
    repository = config.kernel_mapping["RMSNorm"]["cuda"][Mode.TRAINING]
    assert type(repository) is LocalLayerRepository
    assert repository.load() is layers.RMSNorm
