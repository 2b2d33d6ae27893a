"""Training steps in CUDA graphs: what is replayed is what single steps compute, or it is refused.

The graph is recorded on a CPU (:mod:`tests.recorded_graph`), which apex takes for a GPU here.
"""

import contextlib
import copy
import itertools
from unittest import mock

import pytest
import torch

from apex import amp, optimizers
from apex.amp.gradients.overflow import TakenSteps
from apex.amp.scaler import LossScaler
from apex.catalogue.optimizers import BY_NAME, makers
from apex.contrib import optimizers as contrib
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.ops import _runtime
from tests.amp.training import started
from tests.recorded_graph import RecordedGraph, like_a_gpu

CPU = torch.device("cpu")
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
# What counts its steps on the device always, or not at all; and what does if a step can be skipped.
OURS = makers(lr=0.01, eps=1e-4)
COUNTING = [name for name in OURS if BY_NAME[name].make._counts_steps]
ALWAYS = {
    **{name: OURS[name] for name in OURS if name not in COUNTING},
    "FusedAdam_capturable": lambda p: optimizers.FusedAdam(p, lr=0.01, capturable=True),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=0.01),
    "torch_SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "torch_Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, fused=True, capturable=True),
}
WITH_A_FLAG = {
    **{name: OURS[name] for name in COUNTING},
    "contrib_FusedAdam": lambda p: contrib.FusedAdam(p, lr=0.01),
}
EVERY = {**ALWAYS, **WITH_A_FLAG}
STATIC = 64.0
CASES = [*itertools.product(EVERY, ["dynamic"]), *itertools.product(ALWAYS, [STATIC])]

STEPS = 14
OVERFLOWS = (0, 5, 6, 11)  # in an eager step, twice in a row in replays, after an eager step
EAGER = (0, 1, 2, 9)


@pytest.fixture(autouse=True)
def _gpu():
    with like_a_gpu():
        yield


def batch(number, *, overflows):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
    if overflows and number in OVERFLOWS:
        x[0, 0] = float("inf")
    return x


class Program:
    """A small training whose steps are single, or replays of a graph."""

    def __init__(self, level, kind, scale, **options):
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
        model, options = torch.nn.Sequential(*layers), {"growth_interval": 3, **options}
        self.model, self.optimizer = started(level, model, kind, loss_scale=scale, **options)
        self.x, self.loss, self.graph = torch.zeros(6, 8), None, None
        self.overflows, self.held, self.to_none = scale == "dynamic", [], True

    def step(self):
        self.optimizer.zero_grad(set_to_none=self.to_none)
        loss = self.model(self.x).float().square().mean()
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss

    def run(self, number, *, in_a_graph):
        """One step; returns what the program can see after it."""
        self.x.copy_(batch(number, overflows=self.overflows))
        if number in EAGER or not in_a_graph:
            loss = self.step()
        elif self.graph is None:
            self.graph = RecordedGraph()
            with self.graph.capture():
                loss = self.loss = self.step()
            self.graph.before.clear()  # which holds memory that the graph has written
        else:
            self.graph.replay()
            loss = self.loss
        self.held.append(amp.outcome(self.optimizer))
        return str(loss.item()), amp.state_dict(), self.held[-1].numbers()

    def train(self, *, in_a_graph):
        """All steps; returns what was seen, and all tensors at the end."""
        seen = []
        for number in range(STEPS):
            if number == 3:
                saved = copy.deepcopy((amp.state_dict(), self.model.state_dict()))
            if number == 8:
                amp.load_state_dict(saved[0])
                self.model.load_state_dict(saved[1])
            seen.append(self.run(number, in_a_graph=in_a_graph))
        state = self.optimizer.state_dict()
        tensors = torch.utils._pytree.tree_leaves([state["state"], state["param_groups"]])
        tensors += [*self.model.parameters(), *amp.master_params(self.optimizer)]
        amp.reset()
        assert [outcome.numbers() for outcome in self.held] == [outcome for *_, outcome in seen]
        return seen, [torch.as_tensor(x) for x in tensors if isinstance(x, (torch.Tensor, float))]


def assert_replays_are_single_steps(*arguments, program=Program, **options):
    single = program(*arguments, **options).train(in_a_graph=False)
    replayed = program(*arguments, **options).train(in_a_graph=True)
    assert replayed[0] == single[0]
    assert all(tensor.isfinite().all() for tensor in single[1])
    assert [*map(torch.equal, replayed[1], single[1])] == [True] * len(single[1])


class Zeroed(Program):
    """Gradients are set to zeros."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.to_none = False


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_may_be_set_to_zeros(level):
    assert_replays_are_single_steps(level, EVERY["FusedAdam"], "dynamic", program=Zeroed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "scale"), CASES)
def test_replays_are_single_steps(level, name, scale):
    if (level, name) == ("O3", "torch_SGD"):
        pytest.skip("torch 2.13: wrong momenta of 16 bits on a CPU, other ones at each call")
    assert_replays_are_single_steps(level, EVERY[name], scale)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["FusedSGD", "FusedAdam"])
def test_replays_of_a_fused_step_are_single_steps(level, name):
    assert_replays_are_single_steps(level, EVERY[name], "dynamic", fused_step=True)


class TwoPasses(Program):
    """With gradients of two losses; the second one has a scale of its own."""

    def step(self):
        self.optimizer.zero_grad()
        for number in range(2):
            loss = self.model(self.x).float().square().mean() * (1 + number)
            with amp.scale_loss(loss, self.optimizer, loss_id=number) as scaled:
                scaled.backward()
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_replays_of_two_passes_are_single_steps(level):
    assert_replays_are_single_steps(
        level, EVERY["FusedAdam"], "dynamic", num_losses=2, program=TwoPasses
    )


class ClearedBefore(Program):
    """Gradients are cleared before the capture, and overwritten by replays."""

    def run(self, number, *, in_a_graph):
        if number in EAGER or not in_a_graph or self.graph is None:
            self.optimizer.zero_grad()
        return super().run(number, in_a_graph=in_a_graph)

    def step(self):
        with mock.patch.object(self.optimizer, "zero_grad"):
            return super().step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_may_be_cleared_before_a_capture(level):
    assert_replays_are_single_steps(level, EVERY["FusedAdam"], "dynamic", program=ClearedBefore)


# -- without amp, and with a GradScaler ------------------------------------------------------------


def stepped(make, times, *, in_a_graph, scaler=None):
    """Step the same weights: twice, and ``times`` replays or single steps; what is there then."""
    weights = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in ((4, 3), (5,))]
    optimizer, grads = make(weights), [torch.zeros(4, 3), torch.zeros(5)]
    graph = RecordedGraph()

    def step():
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        if scaler is None:
            optimizer.step()
        else:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()

    for number in range(2 + times):
        grads[0].fill_(0.25 * (number + 1))
        grads[1].fill_(float("inf") if scaler and number in (0, 3) else -1.0)
        if not in_a_graph or number < 2:
            step()
        elif number == 2:
            with graph.capture():
                step()
        else:
            graph.replay()
    leaves = torch.utils._pytree.tree_leaves(optimizer.state_dict())
    found = [*weights, *(torch.as_tensor(x) for x in leaves if isinstance(x, torch.Tensor))]
    return found, scaler and (scaler.state_dict(), scaler.outcome(optimizer).numbers())


def assert_same(replayed, single):
    assert [*map(torch.equal, replayed[0], single[0])] == [True] * len(single[0])
    assert replayed[1] == single[1]


@pytest.mark.parametrize("name", ALWAYS)
def test_without_amp_replays_are_single_steps(name):
    make = ALWAYS[name]
    assert_same(*[stepped(make, 3, in_a_graph=graphed) for graphed in (True, False)])


@pytest.mark.parametrize("name", ["FusedAdam_capturable", "FusedMixedPrecisionLamb"])
def test_with_a_grad_scaler_replays_are_single_steps(name):
    found = [
        stepped(ALWAYS[name], 4, in_a_graph=graphed, scaler=amp.GradScaler("cpu"))
        for graphed in (True, False)
    ]
    assert_same(*found)
    assert found[0][1][1][:3] == (True, 4, 2)


@pytest.mark.parametrize("name", WITH_A_FLAG)
def test_a_count_of_the_host_is_refused_in_a_capture(name):
    with pytest.raises(RuntimeError, match=r"is the Python number 2, .*capturable=True"):
        stepped(WITH_A_FLAG[name], 1, in_a_graph=True)


@pytest.mark.parametrize("kind", [DistributedFusedAdam, DistributedFusedLAMB])
@pytest.mark.usefixtures("_group")
def test_a_count_of_the_host_is_refused_of_distributed_optimizers(kind, monkeypatch):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=0.01)
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight.sum().backward()
    monkeypatch.setattr(_runtime, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="is the Python number 1"):
        optimizer.step()


@pytest.mark.parametrize("name", EVERY)
def test_a_first_step_is_refused_in_a_capture(name, monkeypatch):
    if name.startswith("torch_"):
        pytest.skip("torch's own rules hold")
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer, weight.grad = EVERY[name]([weight]), torch.ones(3, 2)
    monkeypatch.setattr(_runtime, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"Make a step before capturing|make a step before"):
        optimizer.step()


# -- what is refused under amp ---------------------------------------------------------------------


def captured(program):
    program.x.copy_(batch(3, overflows=False))
    with RecordedGraph().capture():
        program.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    ],
    ids=["SGD", "AdamW"],
)
def test_an_optimizer_that_the_host_skips_is_refused(make):
    program = Program("O1", make, "dynamic")
    for number in range(2):
        program.run(number, in_a_graph=False)
    with pytest.raises(RuntimeError, match="the host decides whether to skip it.*fused=True"):
        captured(program)


def test_where_no_step_can_be_skipped_rules_of_torch_hold():
    assert_replays_are_single_steps(
        "O1", lambda p: torch.optim.SGD(p, lr=0.01, foreach=True), STATIC
    )


@pytest.mark.parametrize(
    ("level", "scale", "refused"),
    [("O1", "dynamic", True), ("O2", STATIC, True), ("O1", STATIC, False)],
)
@pytest.mark.parametrize("block", [True, False], ids=["block", "step"])
def test_a_block_is_captured_with_its_step(level, scale, refused, block):
    """Else replays would overflow unseen, and masters have no gradients."""
    program = Program(level, EVERY["FusedSGD"], scale)
    for number in (1, 2):
        program.run(number, in_a_graph=False)
    graph, step = RecordedGraph(), program.optimizer.step
    with mock.patch.object(program.optimizer, "step"):
        if block:
            with graph.capture():
                program.step()
        else:
            program.step()
    expected = pytest.raises(RuntimeError, match="captured in a CUDA graph without")
    with (
        expected if refused else contextlib.nullcontext(),
        contextlib.nullcontext() if block else graph.capture(),
    ):
        step()


def test_the_first_pass_is_refused_in_a_capture(monkeypatch):
    monkeypatch.setattr(_runtime, "capturing", lambda: True)
    scaler = LossScaler("dynamic")
    with pytest.raises(RuntimeError, match="scale is still on the CPU.*Make some training steps"):
        scaler.scale_on(torch.device("meta"))


def test_counts_on_the_cpu_are_refused_in_a_capture(monkeypatch):
    counts = TakenSteps(torch.device("cpu"))
    monkeypatch.setattr(_runtime, "capturing", lambda: True)
    monkeypatch.setattr(_runtime, "waits", lambda device: device != CPU)
    with pytest.raises(RuntimeError, match=r"the counts of amp.outcome are on the CPU"):
        counts.count(torch.ones((), dtype=torch.bool, device="meta"))
    with pytest.raises(RuntimeError, match="would count from 0 each time"):
        TakenSteps(torch.device("cpu"))


def test_a_first_step_that_is_looked_at_is_refused_in_a_capture():
    program = Program("O2", lambda p: torch.optim.SGD(p, lr=0.01), STATIC)
    with pytest.raises(RuntimeError, match="a first step of SGD was captured"):
        captured(program)


def test_a_watched_step_is_refused_in_a_capture():
    program = Program("O1", EVERY["FusedAdam"], "dynamic", debug=True)
    program.run(1, in_a_graph=False)
    with pytest.raises(RuntimeError, match="apex.debug watches FusedAdam"):
        captured(program)


# -- a first step that is skipped ------------------------------------------------------------------


@contextlib.contextmanager
def memory_is_filled():
    """Fill what torch leaves uninitialised with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["torch_SGD", "torch_Adam", "FusedSGD"])
def test_weights_are_finite_after_a_first_step_is_skipped(level, name):
    with memory_is_filled():
        program = Program(level, EVERY[name], "dynamic")
        for number in range(3):
            program.run(number, in_a_graph=False)
    assert amp.outcome(program.optimizer).numbers()[:3] == (True, 2, 1)
    assert all(param.isfinite().all() for param in amp.master_params(program.optimizer))


@pytest.mark.parametrize("name", ["torch_SGD", "torch_Adam"])
def test_a_grad_scaler_leaves_no_state_uninitialised(name):
    scaler = amp.GradScaler("cpu")
    with memory_is_filled():
        weights, (_, outcome) = stepped(EVERY[name], 2, in_a_graph=False, scaler=scaler)
    assert outcome[:3] == (False, 2, 2)
    assert all(tensor.isfinite().all() for tensor in weights)


def test_sgd_without_momentum_waits_for_no_state():
    program = Program("O1", lambda p: torch.optim.SGD(p, lr=0.01, fused=True), "dynamic")
    with mock.patch.object(program.optimizer._amp_stash.overflow, "read") as read:
        program.run(0, in_a_graph=False)
    assert not read.called


def test_a_parameter_whose_gradient_comes_later_has_no_state_yet():
    program = Program("O1", EVERY["torch_SGD"], "dynamic")
    late = torch.nn.Parameter(torch.ones(3))
    program.optimizer.add_param_group({"params": [late]})
    program.run(1, in_a_graph=False)
    with memory_is_filled():
        for overflow in (True, False):
            program.optimizer.zero_grad()
            with amp.scale_loss(late.sum() * (3e38 if overflow else 1.0), program.optimizer) as x:
                x.backward()
            program.optimizer.step()
    assert late.isfinite().all()


# -- the state -------------------------------------------------------------------------------------


def test_what_is_handed_out_is_a_copy():
    scaler, counts = LossScaler("dynamic", init_scale=8.0, scale_window=1), TakenSteps(CPU)
    counts.count(torch.tensor(True))
    outcome, in_a_row = counts.outcome(scaler.scale_on(CPU)), counts.in_a_row
    held = [scaler.scale_on(CPU), scaler.steps, in_a_row, *outcome]
    before = [tensor.clone() for tensor in held]
    scaler.finish_pass(torch.tensor(1.0))
    scaler.count_step(torch.tensor(True))
    counts.count(torch.tensor(False))
    assert scaler.loss_scale() == 8.0  # halved and doubled
    scaler.finish_pass(torch.tensor(1.0))
    assert [*map(torch.equal, held, before)] == [True] * len(held)


def test_a_backward_uses_the_scale_that_its_pass_began_with():
    program = Program("O1", EVERY["FusedAdam"], "dynamic")
    scaler = program.optimizer._amp_stash.training.loss_scalers[0]
    x = torch.ones((), requires_grad=True)
    scaled = x * scaler.scale_on(CPU)
    scaler.finish_pass(torch.tensor(1.0))
    scaled.backward()
    assert x.grad == 65536.0


def test_state_that_was_made_or_moved_under_inference_mode_can_be_written():
    with torch.inference_mode():
        scaler, counts = LossScaler("dynamic"), TakenSteps(CPU)
        scaler._move_to(torch.device("meta"))
        assert not scaler.numbers.is_inference()
        scaler = LossScaler("dynamic")
        scaler.finish_pass(torch.tensor(1.0))
    scaler.count_step()
    counts.count(torch.tensor(True))
    assert (scaler.loss_scale(), scaler._unskipped) == (32768.0, 1)


def test_the_scale_stays_on_the_first_gpu():
    """A graph reads and writes it there; other devices get copies."""
    scaler = LossScaler("dynamic")
    scaler.scale_on(torch.device("meta"))
    state = scaler.numbers
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        scaler.scale_on(CPU)
    assert scaler.numbers is state


@pytest.mark.parametrize("on_the_device", [True, False])
def test_counts_of_steps(on_the_device):
    counts, found = TakenSteps(CPU), []
    for taken in (True, False, False, True, False):
        counts.count(torch.tensor(taken) if on_the_device else taken)
        found.append((*counts.outcome(1.0).numbers()[:3], counts.in_a_row.item()))
    assert found == [(1, 1, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (1, 2, 2, 0), (0, 2, 3, 1)]
