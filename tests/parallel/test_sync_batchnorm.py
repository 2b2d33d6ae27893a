"""``SyncBatchNorm``: two processes against torch's batch norm on the whole batch; one process."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn

import apex.parallel
from apex.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from tests.parallel import syncbn_ranks as ranks
from tests.parallel.syncbn_ranks import Case
from tests.tolerance import (
    TORCH_IN_FLOAT64,
    assert_close_to_largest,
    assert_one_rounding,
    assert_rounded_after_float32,
    assert_same_training,
)

HALF, FLOAT, BFLOAT = torch.float16, torch.float32, torch.bfloat16
LAST, RELU = ("channel_last", True), ("fuse_relu", True)

CASES = [
    Case("uneven"),
    Case("empty", sizes=(8, 0)),
    Case("first_empty", sizes=(0, 8)),
    Case("all_empty", sizes=(0, 0)),
    Case("one_value_each", sizes=(1, 1), trailing=(), options=(("eps", 1.0),)),
    Case("2d", trailing=()),
    Case("4d", trailing=(3, 2)),
    Case("5d", trailing=(3, 2, 2)),
    Case("memory_format", trailing=(3, 2), memory_format=torch.channels_last),
    Case("memory_format_3d", trailing=(3, 2, 2), memory_format=torch.channels_last_3d),
    Case("channel_last", trailing=(3, 2), options=(LAST,)),
    Case("channel_last_2d", trailing=(), options=(LAST,)),
    Case("channel_last_relu_z", options=(LAST, RELU), has_z=True),
    Case("channel_last_empty", sizes=(8, 0), options=(LAST, RELU), has_z=True),
    Case("relu_z", options=(RELU,), has_z=True),
    Case("relu", options=(RELU,)),
    Case("z", has_z=True),
    Case("cumulative", options=(("momentum", None),), steps=3),
    Case("eps_momentum", options=(("momentum", 0.7), ("eps", 1.0))),
    Case("not_affine", options=(("affine", False),)),
    Case("not_tracking", options=(("track_running_stats", False),)),
    Case("twice", program="twice"),
    Case("recomputed", program="recomputed"),
    Case("reentrant", program="reentrant"),
    Case("relu_in_place", program="relu_in_place"),
    Case("channel_last_relu_in_place", program="relu_in_place", options=(LAST,)),
    Case("grad_on_one", input_grad=(True, False)),
    Case("grad_on_other", input_grad=(False, True), sizes=(8, 0)),
    Case("grad_of_weights_alone", input_grad=(False, False)),
    Case("frozen", frozen=True),
    Case("frozen_grad_on_one", frozen=True, input_grad=(True, False)),
    Case("no_grad_needed", frozen=True, input_grad=(False, False)),
    Case("not_affine_grad_on_one", options=(("affine", False),), input_grad=(False, True)),
]
MIXED = [(FLOAT, FLOAT), (HALF, FLOAT), (BFLOAT, FLOAT), (HALF, HALF), (BFLOAT, BFLOAT)]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _both(answers, exact):
    """Results by name, as of one process: parts put together, sums of weight gradients."""
    (one, *_), (other, *_) = answers
    for name in exact.keys() & STATISTICS:
        assert torch.equal(one[name], other[name]), f"{name} differs between ranks"
    together = {name: one[name] for name in exact.keys() & STATISTICS}
    for name in exact.keys() - STATISTICS:
        parts = [part[name] for part in (one, other)]
        if name in ("dweight", "dbias"):
            together[name] = None if parts[0] is None else parts[0] + parts[1]
        else:  # where a rank's input needs no gradient there is none
            together[name] = None if None in parts else torch.cat(parts)
    return together


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_processes_in_float64(two, case):
    answers = two.run(functools.partial(ranks.run_case, case))
    exact = ranks.expected(case)
    together = _both(answers, exact)
    for rank, needs in enumerate(case.input_grad):
        found, wide = answers[rank][0]["dx"], exact["dx"]
        assert (found is None) == (not needs)
        if needs and not all(case.input_grad) and found.numel():
            first = sum(case.sizes[:rank])
            assert_close_to_largest(found, wide[first : first + len(found)], TORCH_IN_FLOAT64)
    assert {name for name in exact if together[name] is None} <= {"dx", "dz", "dweight", "dbias"}
    for name, found in together.items():
        if name == "num_batches_tracked":
            assert found == exact[name]
        elif found is not None and found.numel():
            assert found.dtype == torch.float64
            assert_close_to_largest(found, exact[name], TORCH_IN_FLOAT64)
    if case.frozen or dict(case.options).get("affine") is False:
        requires = [requires for _, requires, _ in answers]
        assert requires == [any(case.input_grad)] * 2  # else a rank would wait in the backward
    if "memory_format" in case.name:
        assert [contiguous for *_, contiguous in answers] == [False, False]


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(5, 3), (8, 0)])
@pytest.mark.parametrize(("dtype", "own"), MIXED, ids=str)
def test_two_processes_round_once(two, dtype, own, sizes):
    """Sums are float32; outputs have the input's dtype, weight gradients that of the weight."""
    case = Case("", sizes=sizes, trailing=(9,), dtype=dtype, own=own, steps=1)
    answers = two.run(functools.partial(ranks.run_case, case))
    exact = ranks.expected(case)
    together = _both(answers, exact)
    for name in ("y", "dx"):
        assert together[name].dtype == dtype
        assert_one_rounding(together[name], exact[name])
    x, _, dy = (None if t is None else t.double() for t in ranks.batches(case, 0))
    for name, terms in (("dbias", dy), ("dweight", dy * x)):
        assert {answer[0][name].dtype for answer in answers} == {own}
        if sizes[1] == 0 or own == FLOAT:  # the sum of two parts has rounded twice
            assert_rounded_after_float32(together[name], exact[name], terms.abs().sum((0, 2)))
    for name in STATISTICS[:2]:
        assert together[name].dtype == own
        assert_one_rounding(together[name], exact[name])


@pytest.mark.dist
def test_evaluation_waits_for_nobody(two):
    found, _ = two.run(ranks.without_partner)
    assert len(found) == 3
    for y, exact, last in found:
        torch.testing.assert_close(y.mT if last else y, exact)  # in another layout


@pytest.mark.dist
def test_training_mode_under_no_grad(two):
    for mean, variance in two.run(ranks.under_no_grad):
        assert mean.tolist() == [1.0] * 3
        assert_one_rounding(variance, torch.full((3,), 4 / 3, dtype=torch.float64))


@pytest.mark.dist
def test_one_value_in_all_processes(two):
    for text, tracked, variance in two.run(ranks.one_value_of_all):
        assert text.startswith("ValueError: ")
        assert "Expected more than 1 value per channel when training" in text
        assert "all processes together have 1 value" in text
        assert (tracked, variance) == (0, [1.0] * 3)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "members", "means"),
    [(0, [None, None], [1.0, 1.0]), (1, [[0], [1]], [0.0, 2.0]), (2, [[0, 1]] * 2, [1.0, 1.0])],
)
def test_groups(two, size, members, means):
    answers = two.run(functools.partial(ranks.grouped, group_size=size))
    assert [ranks_of for ranks_of, *_ in answers] == members
    assert [mean for _, mean, *_ in answers] == [[mean] * 3 for mean in means]
    for *_, same_group, untouched in answers:
        assert same_group
        assert untouched == [0.0] * 3


@pytest.mark.dist
def test_wrong_groups(two):
    for rank, (sizes, outside) in enumerate(two.run(ranks.wrong_groups)):
        for text, size in zip(sizes, (3, -1), strict=True):
            call = f"create_syncbn_process_group({size})"
            assert text.startswith(f"ValueError: {call}: there are 2 processes.")
        assert outside == (
            f"ValueError: SyncBatchNorm: rank {rank} is not in process_group. Pass a group "
            "that contains it; create_syncbn_process_group(group_size) returns one."
        )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("level", "dtype"), [("O0", FLOAT), ("O1", HALF), ("O2", HALF), ("O3", HALF), ("O5", BFLOAT)]
)
def test_training_with_amp(two, level, dtype):
    """As one process with twice the batch; under torch's DistributedDataParallel, on CPUs."""
    for parallel, alone in two.run(functools.partial(ranks.trained, level)):
        assert_same_training(parallel, alone, dtype)


@pytest.mark.dist
@pytest.mark.slow
def test_compiled_in_two_processes(two):
    """In one graph, whose collectives are torch.compile's own: 2 s on each rank."""
    for compiled, eager in two.run(ranks.compiled):
        assert len(compiled) == 7
        torch.testing.assert_close(compiled, eager)


# One process, without a process group.


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (6, 4, 3, 2, 2)], ids=str)
def test_without_processes(training, last, options, shape):
    """Bit for bit torch's, in eval() too, where Apex's crashed with channel_last, ReLU or z."""
    theirs = ranks.Reference(4, **options).train(training)
    mine = SyncBatchNorm(4, **options, channel_last=last, fuse_relu=True).train(training)
    for _ in range(2):
        x, z = (t.movedim(1, -1) if last else t for t in torch.randn(2, *shape))
        exact = theirs(x.reshape(-1, 4)).view(x.shape) if last else theirs(x)
        assert torch.equal(mine(x, z), (exact + z).relu())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor)


def test_z_of_another_dtype():
    """Under O1 a residual may be float32 beside a float16 activation."""
    layer, x, z = SyncBatchNorm(4), torch.randn(6, 4).half(), torch.randn(6, 4)
    y = layer(x, z)
    assert y.dtype == HALF
    layer.reset_running_stats()
    assert torch.equal(y, (layer(x).float() + z).half())


def test_bad_input():
    layer, x = SyncBatchNorm(4), torch.randn(6, 4, 3)
    with pytest.raises(ValueError, match="at least 2D input .got 1D"):
        layer(torch.randn(4))
    with pytest.raises(ValueError, match=r"\[6, 3\], 3 channels with channel_last=False. Pass 4"):
        layer(torch.randn(6, 3))
    with pytest.raises(ValueError, match=r"3 channels with channel_last=True. Pass 4"):
        SyncBatchNorm(4, channel_last=True)(x)
    with pytest.raises(ValueError, match=r"z has shape \[4, 3\]. Pass .*\[6, 4, 3\]"):
        layer(x, x[0])
    for wide, own in [(x, HALF), (x.double(), FLOAT), (x.half(), BFLOAT), (x, torch.float64)]:
        with pytest.raises(RuntimeError, match=f"input is {wide.dtype}, and weights .* {own}"):
            SyncBatchNorm(4).to(own)(wide)
    with pytest.raises(
        RuntimeError, match="input is torch.int64, and weights and buffers are none"
    ):
        SyncBatchNorm(4, affine=False, track_running_stats=False)(torch.ones(6, 4).long())
    layer.running_mean = layer.running_mean.half()
    with pytest.raises(RuntimeError, match=r"buffers are torch.float16 and torch.float32\. Pass"):
        layer(x)
    assert layer.num_batches_tracked == 0
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm(4)(torch.randn(1, 4))


def test_state_dict_goes_both_ways():
    mine, theirs = SyncBatchNorm(4), nn.BatchNorm2d(4)
    mine(torch.randn(2, 4, 3, 3))
    nn.init.normal_(mine.weight)
    theirs.load_state_dict(mine.state_dict())
    again = SyncBatchNorm(4)
    again.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(theirs(x), mine(x))
    assert torch.equal(again(x), mine(x))
    assert [*mine.state_dict()] == [*theirs.state_dict()]


def test_one_class_under_all_names():
    assert apex.parallel.sync_batchnorm.SyncBatchNorm is SyncBatchNorm
    assert apex.parallel.optimized_sync_batchnorm.SyncBatchNorm is SyncBatchNorm
    assert (SyncBatchNorm.warned, SyncBatchNorm.syncbn_import_error) == (False, None)
    assert isinstance(SyncBatchNorm(4), nn.modules.batchnorm._BatchNorm)
    assert repr(SyncBatchNorm(4)) == repr(nn.SyncBatchNorm(4))


def test_traced_compiled_pickled():
    torch.compiler.reset()  # what earlier tests compiled counts as compiled again
    model = nn.Sequential(SyncBatchNorm(4, channel_last=True, fuse_relu=True), nn.Tanh())
    x = torch.randn(6, 3, 4)
    model(x)
    model.eval()
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    stream = io.BytesIO(pickle.dumps(model))
    assert torch.equal(pickle.load(stream)(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


class OfUser(nn.BatchNorm2d):
    """A subclass with something of its own."""

    def __init__(self, features):
        super().__init__(features)
        self.tag = "kept"

    def forward(self, input):
        raise AssertionError("replaced")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, eps=0.1, momentum=None)
        self.again = self.norm
        self.inner = nn.ModuleDict({"shared": self.norm, "own": OfUser(4), "nothing": None})
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.torchs = nn.SyncBatchNorm(4, affine=False)

    def forward(self, x):
        x = self.again(self.norm(self.conv(x)))
        return self.torchs(self.instance(self.inner["own"](self.inner["shared"](x))))


def test_conversion():
    model = Model()
    model.norm.num_batches_tracked.fill_(7)
    model.norm.eval()
    model.norm.bias.requires_grad_(False)
    seen = []
    handle = model.norm.register_forward_hook(lambda *_: seen.append(1))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    keys, group = [*model.state_dict()], object()
    assert convert_syncbn_model(model, process_group=group, channel_last=True) is model
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [*model.state_dict()] == keys
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert not model.norm.bias.requires_grad
    assert (model.norm.training, model.inner["own"].training) == (False, True)
    assert model.norm is model.again is model.inner["shared"]
    assert model.inner["nothing"] is None
    assert type(model.instance) is nn.InstanceNorm2d
    synced = [model.norm, model.inner["own"], model.torchs]
    assert {type(layer) for layer in synced} == {SyncBatchNorm}
    for layer in synced:
        assert layer.process_group is group
        assert (layer.channel_last, layer.fuse_relu) == (True, False)
    assert (model.norm.eps, model.norm.momentum, model.inner["own"].tag) == (0.1, None, "kept")
    assert (model.torchs.affine, model.norm.num_batches_tracked.item()) == (False, 7)
    for layer in synced:
        layer._specify_channel_last(False)
    model(torch.randn(2, 3, 5, 5))
    assert len(seen) == 3
    handle.remove()
    model(torch.randn(2, 3, 5, 5))
    assert len(seen) == 3


def test_conversion_of_a_layer():
    """The root is returned anew; our own layers only change their settings."""
    theirs = nn.BatchNorm1d(4).double()
    theirs.forward = None  # set on the object, as tools that wrap it do
    mine = convert_syncbn_model(theirs)
    assert type(mine) is SyncBatchNorm
    assert mine.weight is theirs.weight
    x = torch.randn(6, 4, dtype=torch.float64)
    assert torch.equal(mine(x), nn.BatchNorm1d(4).double()(x))
    relu = SyncBatchNorm(4, fuse_relu=True)
    assert convert_syncbn_model(relu, channel_last=True) is relu
    assert (relu.fuse_relu, relu.channel_last) == (True, True)
    with pytest.raises(ValueError, match="LazyBatchNorm1d.* Run the model on a batch first"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))


def test_the_optimizer_steps_what_was_converted():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_syncbn_model(model)
    model(torch.randn(5, 3)).square().sum().backward()
    before = model[1].bias.detach().clone()
    model[1].bias.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(model[1].bias, before - 0.1)


def test_groups_need_processes():
    assert create_syncbn_process_group(0) is None
    with pytest.raises(
        RuntimeError, match=r'Call torch.distributed.init_process_group\("nccl"\) before'
    ):
        create_syncbn_process_group(2)
