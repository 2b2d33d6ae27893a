"""Bytes that masters cost, and where a master takes over the memory of its weight."""

import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from apex import amp
from apex.amp.gradients.tensors import is_rounded
from apex.optimizers import FusedAdam
from tests.amp.training import MASTERED, scaled_backward, sgd, started

SIZE = 1024  # of a square weight
WEIGHT = SIZE * SIZE * 4  # bytes in float32
HALF = {"O2": torch.float16, "O5": torch.bfloat16}
mastered = pytest.mark.parametrize("level", MASTERED)


class Bytes(TorchDispatchMode):
    """The bytes of all tensors that are alive, and their peak; on any device."""

    def __init__(self, tensors=()):
        super().__init__()
        self._alive = {}
        self.peak = 0
        for tensor in tensors:
            self.see(tensor)

    def see(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key, None)
            self.peak = max(self.peak, self.now)

    @property
    def now(self):
        return sum(self._alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, torch.Tensor):
                self.see(one)
        return result


def make(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(count)])


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "fused": lambda params: FusedAdam(params, lr=1e-4),
    "data": lambda params: ThroughData(params, lr=1e-4),
}


class ThroughData(torch.optim.SGD):
    """Writes through ``.data``, which changes no version."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@mastered
def test_bytes_of_initialize_and_of_a_first_step(level, name):
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    with Bytes(model.parameters()) as alive:
        assert alive.now == 4 * WEIGHT
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
        assert 6 * WEIGHT <= alive.now <= 6.01 * WEIGHT  # and a few counters
        assert alive.peak <= 6.5 * WEIGHT
        peaks = []
        for _ in range(3):
            alive.peak = 0
            scaled_backward(model(torch.ones(2, SIZE)).float().mean(), optimizer)
            optimizer.step()
            peaks.append(alive.peak)
            optimizer.zero_grad()
    assert 12 * WEIGHT <= peaks[0] <= peaks[1] + 0.3 * WEIGHT  # pieces of a fourth
    assert peaks[1] <= peaks[2]


def flat(model):
    buffer = torch.cat([model.weight.data.flatten(), torch.ones(1)])
    model.weight.data = buffer[:-1].view(4, 4)
    return buffer


def expanded(model):
    model.weight.data = model.weight.data[:1].clone().expand(4, 4)
    return model.weight.data


def overlapping(model):
    model.weight.data = torch.arange(16.0).as_strided((4, 4), (1, 1))
    return model.weight.data


def shared(model):
    model.weight.data.share_memory_()
    return model.weight.data


def mapped(model):
    torch.save(model.weight.data, "weight.pt")
    model.weight.data = torch.load("weight.pt", mmap=True)
    return model.weight.data


def array(model):
    held = np.ones((4, 4), dtype=np.float32)
    model.weight.data = torch.from_numpy(held)
    return model.weight.data


def parameter(model):
    return nn.Parameter(model.weight.data)


def alias(model):
    return model.weight.detach()


@pytest.mark.parametrize(
    "hold", [flat, expanded, overlapping, shared, mapped, array, parameter, alias]
)
@mastered
def test_memory_that_is_not_the_weights_own_is_copied(level, hold, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 4, bias=False)
    held = hold(model)
    values, wanted = held.detach().clone(), model.weight.detach().clone()
    _, optimizer = started(level, model, partial(sgd, lr=0.5), loss_scale=8.0)
    (master,) = optimizer.param_groups[0]["params"]
    assert torch.equal(master, wanted)
    assert master.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()
    scaled_backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    assert not torch.equal(master, wanted)
    assert torch.equal(held, values)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@mastered
def test_a_master_has_the_memory_of_its_weight(level, form):
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=form)
    where, wanted = model.weight.data_ptr(), model.weight.detach().clone()
    _, optimizer = started(level, model, partial(sgd, lr=0.5))
    (master,) = optimizer.param_groups[0]["params"]
    assert master.data_ptr() == where
    assert master.stride() == wanted.stride()
    version = master._version
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(master, wanted)
    assert master._version == version


class Raises(nn.Linear):
    def flatten_parameters(self):
        raise MemoryError("no memory")


class Closed(torch.optim.SGD):
    """Raises once its masters are made."""

    def __setattr__(self, name, value):
        if name == "_amp_stash":
            raise MemoryError("no memory")
        super().__setattr__(name, value)


@pytest.mark.parametrize("fails", ["model", "optimizer"])
@mastered
def test_a_failure_half_way_leaves_everything_as_it_was(level, fails):
    last = Raises(4, 4) if fails == "model" else nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), last)
    model.register_buffer("table", torch.full((3,), 0.3))
    buffer = flat(model[0])
    optimizer = (Closed if fails == "optimizer" else torch.optim.SGD)(
        model.parameters(), lr=0.5, momentum=0.5
    )
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    tensors = {name: (x, x.data_ptr(), x.clone()) for name, x in model.state_dict().items()}
    grads = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(MemoryError):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, model.parameters())]
    assert set(map(id, optimizer.state)) == set(map(id, model.parameters()))
    for name, value in model.state_dict().items():
        assert value.dtype == tensors[name][0].dtype
        assert torch.equal(value, tensors[name][2])
        # What was copied already, as other tensors have its memory, stays a copy.
        assert value.data_ptr() == tensors[name][1] or fails == "optimizer"
    assert model[0].weight.data_ptr() == buffer.data_ptr() or fails == "optimizer"
    for param, grad in zip(model.parameters(), grads, strict=True):
        rounded = grad.to(HALF[level]).float()
        assert torch.equal(param.grad, grad) or torch.equal(param.grad, rounded)
    optimizer.step()
    assert model(torch.randn(4, 4)).dtype == torch.float32


# -- what the first step looks for -----------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 3, 4095])
@mastered
def test_a_row_zeroed_through_data_is_found(level, row):
    model = nn.Linear(256, 4096, bias=False)
    _, optimizer = started(level, model, partial(sgd, lr=0.0), loss_scale=8.0)
    (master,) = optimizer.param_groups[0]["params"]
    wanted = master.detach().clone()
    wanted[row] = 0.0
    model.weight.data[row] = 0.0
    scaled_backward(model(torch.ones(1, 256)).sum(), optimizer)
    optimizer.step()
    assert torch.equal(master, wanted)
    assert torch.equal(model.weight, wanted.to(model.weight.dtype))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (2**18 + 4,), (513, 1027)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_that_differs_in_one_element_is_not_its_rounded_master(dtype, shape):
    master = torch.randn(shape)
    weight = master.to(dtype)
    last = weight.view(-1)[-1:]
    assert is_rounded(weight, master)
    last += 1.0
    assert not is_rounded(weight, master)
    last.copy_(master.view(-1)[-1:].zero_()).neg_()  # -0.0
    assert is_rounded(weight, master)
    last.fill_(torch.nan)
    assert not is_rounded(weight, master)
    master.view(-1)[-1:] = torch.nan
    assert is_rounded(weight, master)


@mastered
def test_what_a_program_writes_into_an_entry_beside_a_nan_keeps_its_low_bits(level):
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight[0, 2] = torch.nan
    model = amp.initialize(model, opt_level=level, verbosity=0)
    model.state_dict()["weight"][0, 0] = 0.1
    assert model.state_dict()["weight"][0, 0] == torch.tensor(0.1)


@pytest.mark.parametrize("row", [0, 49_999])
@mastered
def test_an_embedding_of_which_one_row_is_stepped_is_healthy(level, row):
    model = nn.Embedding(50_000, 8)
    _, optimizer = started(level, model, partial(ThroughData, lr=0.1), loss_scale=8.0)
    (master,) = optimizer.param_groups[0]["params"]
    before = master.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        scaled_backward(model(torch.tensor([row])).sum(), optimizer)
        optimizer.step()
    assert not (master == before)[row].any()
    assert optimizer._amp_stash._step_check is None


@mastered
def test_a_change_in_another_piece_is_found_by_the_second_step(level):
    """The first row is the piece that the first step looks at; this optimizer leaves it alone."""

    class Partly(ThroughData):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data[1:].sub_(param.grad[1:], alpha=group["lr"])

    model = nn.Linear(2**18, 2, bias=False)
    _, optimizer = started(level, model, partial(Partly, lr=0.1), loss_scale=8.0)
    checks = []
    for _ in range(3):
        optimizer.zero_grad()
        scaled_backward(model(torch.ones(1, 2**18)).sum(), optimizer)
        optimizer.step()
        checks.append(optimizer._amp_stash._step_check is None)
    assert checks == [False, True, True]
