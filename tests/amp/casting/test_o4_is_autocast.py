"""O4 computes what ``torch.autocast`` computes in bfloat16: values, gradients, what is saved."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.amp.levels import assert_same, cast

pytestmark = pytest.mark.onednn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 8, 2), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16)


def convolutions():
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.GELU(), nn.Conv2d(4, 2, 3), nn.Softmax(1))
    return model, torch.randn(2, 3, 8, 8)


def recurrent():
    return Recurrent(), torch.randn(5, 3, 6)


MODELS = {"transformer": transformer, "CNN": convolutions}
if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # elsewhere torch.autocast raises
    MODELS["LSTM"] = recurrent


def loss(model, x):
    out = model(x)
    return F.layer_norm(out, out.shape[-1:]).square().mean() + F.cross_entropy(
        out.flatten(0, -2), torch.zeros(out.shape[:-1].numel(), dtype=torch.long)
    )


def measure(model, x):
    """Loss, gradients, and the bytes that autograd saved."""
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = loss(model, x)
    with torch.autocast("cpu", enabled=False):
        value.backward()
    return [value, *(p.grad for p in model.parameters())], sum(saved.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_training_is_torchs(name):
    model, x = MODELS[name]()
    with torch.autocast("cpu", torch.bfloat16):
        theirs, their_bytes = measure(copy.deepcopy(model), x)
    ours, our_bytes = measure(cast("O4", model), x)
    assert_same(ours, theirs)
    assert our_bytes == their_bytes


class Classifier(nn.Module):
    """The encoder as a part: it has no hooks, so torch takes its fast path in evaluation."""

    def __init__(self):
        super().__init__()
        self.encoder = transformer()[0]

    def forward(self, x, padding=None):
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_padded_batch_is_evaluated_by_a_transformer_encoder(level):
    """torch's own autocast fails on a CPU: a nested tensor of bfloat16 meets float32 norms."""
    model, x = Classifier().eval(), transformer()[1]
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    cast(level, model)
    with torch.no_grad():
        other = torch.where(padding[..., None], 9.0, x)
        alone, padded, same = model(x), model(x, padding), model(other, padding)
    assert padded.dtype == alone.dtype
    assert torch.equal(padded[~padding], same[~padding])
    assert not torch.equal(padded[1, :3], alone[1, :3])


def test_an_unpadded_batch_is_evaluated_as_torch_does_it():
    model, x = Classifier().eval(), transformer()[1]
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            theirs = model(x)
        assert torch.equal(cast("O4", model)(x), theirs)


def test_an_lstm_trains_on_every_cpu():
    model, x = recurrent()
    out = cast("O4", model)(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_apexs_float32_list_has_kernels_once_something_casts_to_float16():
    def has_kernel():
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::gelu", "AutocastCPU")

    cast("O4", nn.Linear(2, 2))
    assert not has_kernel()
    cast("O1", nn.Linear(2, 2))
    assert has_kernel()
