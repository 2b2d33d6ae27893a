"""GPUs and NCCL, by stand-ins: random numbers of every device, flags on the device of a model."""

import pytest
import torch
from torch import nn

from apex import debug
from apex.debug import ranks
from apex.debug.tape import Tape
from apex.debug.widening import Wide
from tests.debug.planted import watching


@pytest.fixture
def gpus(monkeypatch):
    """The random states of two GPUs, of which the first is the current one: numbers."""
    states = [10, 20]

    def write(state):
        states[0] = state

    def write_all(given):
        states[:] = given

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [*states])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", write)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", write_all)
    return states


def test_replays_draw_the_same_numbers_on_every_gpu(gpus):
    """The inputs are on a CPU, the model on two GPUs."""
    drawn = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            gpus[:] = [state + 1 for state in gpus]
            drawn.append([*gpus])
            return (self.weight * x - 1).sqrt()

    model = Model()
    with watching(model) as (optimizer, watch):
        model(torch.zeros(4)).sum().backward()
        optimizer.step()
        model(torch.zeros(4))  # draws other numbers
        assert watch.explain().operation.startswith("aten.sqrt")
    assert drawn[:2] == [[11, 21], [12, 22]]
    assert len(drawn) > 2
    assert all(draw == [11, 21] for draw in drawn[2:])
    assert gpus == [12, 22]


def test_a_tape_has_the_numbers_of_every_gpu(gpus):
    tape = Tape()
    gpus[:] = [1, 2]
    tape.run(None)
    assert gpus == [10, 20]


def test_a_second_run_in_float32_draws_the_same_numbers_on_every_gpu(gpus):
    drawn = []

    def clone(x):
        drawn.append((x.dtype, *gpus))
        gpus[:] = [state + 1 for state in gpus]
        return x.clone()

    clone._schema = torch.ops.aten.clone.default._schema
    Wide(0).compute(clone, (torch.ones(2, dtype=torch.float16),), {})
    assert drawn == [(torch.float32, 10, 20), (torch.float16, 10, 20)]
    assert gpus == [11, 21]


def test_a_rank_without_gradients_sends_from_the_device_of_its_parameters(monkeypatch):
    """NCCL refuses tensors of a CPU. ``meta`` stands for the GPU."""
    sent = []

    def all_reduce(tensor, op, group):
        assert tensor.device.type != "cpu", "no backend for CPU tensors"
        sent.append((group, tensor.device.type, tensor.dtype))

    params = [nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta")]
    model = nn.ParameterList(params)
    monkeypatch.setattr(ranks.dist, "all_reduce", all_reduce)
    with debug.watch(model, torch.optim.SGD(params, lr=0.1), process_group="ranks") as watch:
        monkeypatch.setattr(watch, "stepped", lambda *_: False)  # which would read the flag
        watch._optimizers[0].step()
    assert sent == [("ranks", "meta", torch.float32)]
