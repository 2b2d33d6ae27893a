"""What users write, for mypy: `./dev check` checks the types of this file; nothing runs it."""

import amp_C
import torch
from typing_extensions import assert_type

from apex import amp
from apex.contrib.multihead_attn import SelfMultiheadAttn
from apex.fused_dense import FusedDense
from apex.mlp import swiglu
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from apex.transformer.functional.fused_softmax import scaled_masked_softmax


class Network(torch.nn.Sequential):
    """A user's model."""

    classes: int = 10


def train(model: Network, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Train as the README says."""
    adam = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
    model, adam = amp.initialize(model, adam, opt_level="O2", loss_scale="dynamic")
    assert_type(model, Network)
    assert_type(adam, FusedAdam)
    for x, y in batches:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss, adam) as scaled_loss:
            assert_type(scaled_loss, torch.Tensor)
            scaled_loss.backward()  # type: ignore[no-untyped-call]  # torch's
        assert_type(amp.clip_grad_norm_(adam, 1.0), torch.Tensor)
        adam.step()
        assert_type(amp.stepped(adam), bool)
    amp.load_state_dict(amp.state_dict())


def other_forms(model: Network, other: Network) -> None:
    """Lists keep their types, too; an option that does not exist is an error."""
    assert_type(amp.initialize(model), Network)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    both = amp.initialize([model, other], [sgd], num_losses=2)
    assert_type(both, tuple[list[Network], list[torch.optim.SGD]])
    amp.initialize(model, sgd, opt_lvel="O1")  # type: ignore[call-overload]


def layers(x: torch.Tensor) -> None:
    """Layers of transformers."""
    assert_type(FusedDense(8, 8).forward(x), torch.Tensor)
    assert_type(SelfMultiheadAttn(8, 2).forward(x, x, x)[0], torch.Tensor)
    assert_type(scaled_masked_softmax(x, None, 0.5), torch.Tensor)


def functions(x: torch.Tensor) -> None:
    """Layers and functions."""
    assert_type(swiglu(x, x), torch.Tensor)
    assert_type(FusedLayerNorm(8).eps, float)
    DistributedDataParallel(convert_syncbn_model(Network()))
    amp_C.multi_tensor_scale(65536, torch.zeros(1, dtype=torch.int32), [[x], [x]], 0.5)
