"""Models of other packages that take our layers where they find them; skipped without them."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings

import pytest
import torch

from apex.normalization import FusedRMSNorm, fused_layer_norm


@pytest.fixture(scope="module")
def t5():
    pytest.importorskip("transformers", exc_type=ImportError)
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5 import modeling_t5

    assert modeling_t5.T5LayerNorm is FusedRMSNorm

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip

    def make():
        torch.manual_seed(0)
        return T5ForConditionalGeneration(config)

    return make


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_t5_trains_and_generates(t5, dtype):
    model = t5().to(dtype)
    for block in [*model.encoder.block, *model.decoder.block]:
        block.layer[-1].DenseReluDense.wo.float()  # as from_pretrained leaves them for half
    assert any(isinstance(module, FusedRMSNorm) for module in model.modules())
    tokens = torch.randint(2, 64, (4, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    written = model.eval().generate(tokens, max_new_tokens=5, do_sample=False)
    assert written.shape[0] == 4


class _Anything(type):
    """A class whose attributes are their own names."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    """A package in which every name is there."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StubFinder:
    """Gives stubs for torchvision, which timm imports for its data sets and some models."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def fast_norm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("needs timm")
    finder = _StubFinder()
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("timm.layers.fast_norm")
    except ImportError as error:
        pytest.skip(f"timm does not import here: {error}")
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Stub)]:
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_timm_uses_our_functions(fast_norm, monkeypatch):
    assert fast_norm.has_apex
    assert fast_norm.fused_layer_norm_affine is fused_layer_norm.fused_layer_norm_affine
    x, weight, bias = torch.randn(3, 16), torch.rand(16), torch.rand(16)
    wanted = torch.nn.functional.layer_norm(x, [16], weight, bias, 1e-5)
    torch.testing.assert_close(fast_norm.fast_layer_norm(x, [16], weight, bias, 1e-5), wanted)
    wanted = torch.nn.functional.rms_norm(x, [16], weight, 1e-5)
    torch.testing.assert_close(fast_norm.fast_rms_norm(x, [16], weight, 1e-5), wanted)
    torch.testing.assert_close(
        fast_norm.fast_rms_norm(x, [16], None, 1e-5),
        torch.nn.functional.rms_norm(x, [16], None, 1e-5),
    )
    torch.testing.assert_close(
        fast_norm.fast_layer_norm(x, [16], None, None, 1e-5),
        torch.nn.functional.layer_norm(x, [16], None, None, 1e-5),
    )
