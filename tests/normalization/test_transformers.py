"""T5 of transformers takes our FusedRMSNorm where it finds apex (tests/clients has more of it)."""

import pytest
import torch

from apex.normalization import FusedRMSNorm


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
