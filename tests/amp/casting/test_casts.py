"""Where casts hold: threads, regions, levels side by side, recomputation, caches."""

import contextlib
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.amp.casting import switches as casts
from tests.amp.levels import HALF, LEVELS, MODEL, assert_same, autocast_state, product, train_step
from tests.amp.training import scaled_backward, sgd, started


class Net(nn.Module):
    """A half-list function and a float-list one; what it returns tells the levels apart."""

    def __init__(self, recompute=None):
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 4), nn.Dropout(0.3)
        self.recompute = recompute

    def body(self, x):
        y = self.linear(self.dropout(x))
        return y, F.softmax(y, -1)

    def forward(self, x):
        if self.recompute is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")


def start(level, model=None, **options):
    return started(level, Net() if model is None else model, **options)


@pytest.mark.parametrize("level", HALF)
def test_casts_hold_outside_of_the_model_and_not_in_the_body_of_scale_loss(level):
    model, optimizer = start(level)
    x, target = torch.randn(3, 6), torch.tensor([0, 1, 2])
    y, _ = model(x)
    assert y.dtype == HALF[level]
    assert_same([F.cross_entropy(y, target)], [F.cross_entropy(y.float(), target)])
    assert product() == HALF[level]
    with amp.scale_loss(y.float().sum(), optimizer) as scaled:
        assert product() == torch.float32
        assert_at(level, model)
        assert product() == torch.float32
        scaled.backward()
    assert product() == HALF[level]


def expected(level, weight, bias, x):
    """What ``Net`` gives at ``level``, cast by hand."""
    with amp.disable_casts():
        if level == "O0":
            y = F.linear(x, weight, bias)
            return y, F.softmax(y, -1)
        dtype = HALF.get(level) or MODEL[level]
        y = F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype))
        if level == "O1":
            return y, F.softmax(y.float(), -1)
        if level == "O4":  # torch.autocast leaves it in 16 bits on a CPU
            return y, F.softmax(y, -1)
        return y.float(), F.softmax(y, -1).float()


def weights(model):
    state = model.state_dict()
    return state["linear.weight"], state["linear.bias"]


def assert_at(level, model, x=None):
    x = torch.randn(3, 6) if x is None else x
    model.eval()
    assert_same([t.detach() for t in model(x)], expected(level, *weights(model), x))


def state():
    return *autocast_state(), casts.current(), len(casts.thread.forwards)


def in_thread(function):
    """Run ``function`` in a new thread and return its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


# -- the thread ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_casts_are_off_in_step(level):
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(product())
            return super().step(closure)

    model = Net()
    optimizer = Watching(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    start("O1")
    optimizer.step()
    assert seen == [torch.float32]
    assert product() == torch.float16


def test_disable_casts_nests_and_survives_exceptions():
    with amp.disable_casts():  # where none are on
        assert product() == torch.float32
    model, _ = start("O1")
    before = state()
    with amp.disable_casts():
        with amp.disable_casts():
            assert product() == torch.float32
        assert product() == torch.float32
        assert_at("O1", model)
    assert state() == before
    with pytest.raises(KeyboardInterrupt), amp.disable_casts():
        raise KeyboardInterrupt
    assert state() == before


PAIRS = [("O0", "O1"), ("O1", "O0"), ("O1", "O2"), ("O1", "O4"), ("O2", "O1"), ("O4", "O1")]


@pytest.mark.parametrize("level", LEVELS)
def test_a_new_thread_has_no_casts_but_models_keep_their_level(level):
    model, _ = start(level)

    def run():
        before, ambient = state(), product()
        assert_at(level, model)
        return ambient, before == state()

    assert in_thread(run) == (torch.float32, True)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_model_keeps_its_level_whatever_came_later(first, second):
    one, _ = start(first)
    two, _ = start(second)
    for _ in range(2):
        assert_at(first, one)
        assert_at(second, two)
    assert product() == HALF.get(second, torch.float32)  # the thread follows the newest


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_a_model_inside_a_model(outer, inner):
    class Outer(nn.Linear):
        def forward(self, x):  # not a submodule: at its own level, initialised on its own
            return torch.is_autocast_enabled("cpu"), within(x), product()

    within, _ = start(inner)
    within.eval()
    around, _ = start(outer, Outer(1, 1))
    x = torch.randn(3, 6)
    if outer == "O2":
        x = x.half().float()
    enabled, result, after = around(x)
    assert enabled == (outer in HALF)
    assert after == HALF.get(outer, torch.float32)
    wanted = expected(inner, *weights(within), x)
    if outer in ("O0", "O2"):
        wanted = [t.float() for t in wanted]
    assert_same([t.detach() for t in result], wanted)


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_a_model_that_calls_itself(level):
    class Recursive(nn.Linear):  # as a tree-LSTM is
        def forward(self, depth):
            if depth:
                self(depth - 1)
            return product()

    model, _ = start(level, Recursive(2, 2))
    start("O4" if level == "O1" else "O1")
    before = state()
    assert model(2) == HALF.get(level, torch.float32)
    assert state() == before


@pytest.mark.parametrize(
    ("level", "options", "dtype"),
    [("O0", {}, torch.float16), ("O1", {"enabled": False}, torch.float32)],
)
def test_torchs_own_region_inside_a_model(level, options, dtype):
    class Own(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float16, **options):
                y = super().forward(x)
                return y.dtype, y.softmax(-1).dtype

    model, _ = start(level, Own(4, 4))
    assert model(torch.randn(2, 4)) == (dtype, dtype)


# -- torch's own autocast -------------------------------------------------------------------------


def torchs_own():
    torch.manual_seed(0)
    half = torch.rand(3, 4).half()
    with torch.autocast("cpu", dtype=torch.float16):
        return [
            half.softmax(-1),
            half.sum(),
            F.gelu(half),
            F.layer_norm(half, (4,)),
            half.exp(),
            half.float().mv(torch.ones(4)),
            nn.GRU(4, 2)(half.float())[0].detach(),
        ]


def test_torchs_own_autocast_keeps_its_meaning():
    plain = torchs_own()
    assert [t.dtype for t in plain] == [torch.float16] * 5 + [torch.float32] * 2
    for level in ("O0", "O2", "O1"):
        start(level)
        if level == "O1":  # here the thread's casts are amp's
            start("O0")
        assert_same(torchs_own(), plain)
    amp.reset()
    assert_same(torchs_own(), plain)


# -- exceptions -----------------------------------------------------------------------------------


class Failing(nn.Linear):
    def __init__(self, error):
        super().__init__(6, 4)
        self.error = error

    def forward(self, x):
        super().forward(x)
        raise self.error


@pytest.mark.parametrize("where", ["forward", "pre-hook", "first pre-hook", "hook"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_a_forward_leaves_the_state_as_it_was(level, where):
    def fail(*_):
        raise ValueError("planted")

    model, _ = start(level, Failing(ValueError("planted")) if where == "forward" else Net())
    if where == "hook":
        model.register_forward_hook(fail)
    elif where != "forward":
        model.register_forward_pre_hook(fail, prepend=where == "first pre-hook")
    for ambient in ("O1", "O0"):
        start(ambient)
        before = state()
        with pytest.raises(ValueError, match="planted"):
            model(torch.randn(2, 6))
        assert state() == before


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_forward_cut_short_by_an_interrupt_is_ended_by_what_comes_next(level):
    broken, _ = start(level, Failing(KeyboardInterrupt()))
    for ambient in ("O0", "O4"):
        model, optimizer = start(ambient)
        before = state()
        with pytest.raises(KeyboardInterrupt):
            broken(torch.randn(2, 6))
        assert_at(ambient, model)
        assert state() == before
        with pytest.raises(KeyboardInterrupt):
            broken(torch.randn(2, 6))
        with amp.scale_loss(torch.ones((), requires_grad=True), optimizer):
            assert product() == torch.float32
        assert state() == before

    class Outer(nn.Linear):
        def forward(self, x):
            with pytest.raises(KeyboardInterrupt):
                broken(x)
            return super().forward(x)

    model, _ = start("O1", Outer(6, 4))
    before = state()
    model(torch.randn(2, 6))
    assert state() == before


@pytest.mark.parametrize("end", [amp.reset, lambda: start("O0")])
def test_casts_cut_short_by_an_interrupt_do_not_come_back(end):
    broken, _ = start("O1", Failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        broken(torch.randn(2, 6))
    end()
    assert product() == torch.float32
    Net()(torch.randn(2, 6))
    start("O2")[0](torch.randn(2, 6))
    assert product() == torch.float32
    assert torch.is_autocast_enabled("cpu") is False


# -- recomputation --------------------------------------------------------------------------------


def backward(loss, optimizer, elsewhere):
    """Here, or in another thread."""
    run = functools.partial(scaled_backward, loss, optimizer)
    in_thread(run) if elsewhere else run()


@pytest.mark.parametrize("ambient", [None, "O0", "O4", "thread"])
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_checkpoint_recomputes_at_the_models_level(level, recompute, ambient):
    def train(how):
        torch.manual_seed(0)
        model, optimizer = start(level, Net(how), loss_scale=128.0)
        if ambient in LEVELS:
            start(ambient)
        x = torch.randn(3, 6, requires_grad=True)
        y, s = model(x)
        loss = (y.float().square() * s).sum()

        backward(loss, optimizer, ambient == "thread")
        return [y, s, x.grad, *[p.grad for p in model.parameters()]]

    assert_same(train(recompute), train(None))


@pytest.mark.parametrize("level", LEVELS)
def test_activations_that_wait_on_the_cpu_keep_their_type(level):
    """``Tensor.cpu``, which O1 casts to float32, is what ``save_on_cpu`` calls."""

    def train(saved):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model, optimizer = start(level, net, loss_scale=128.0)
        with saved:
            y = model(torch.randn(3, 6)).cpu()
            scaled_backward(y.float().square().sum(), optimizer)
        return [y, *[p.grad for p in model.parameters()]]

    assert_same(train(torch.autograd.graph.save_on_cpu()), train(contextlib.nullcontext()))


@pytest.mark.parametrize("recompute", [None, "once"])
def test_a_program_that_copies_to_the_cpu_in_a_checkpoint_gets_float32(recompute):
    """A checkpoint has hooks for saved tensors too, which call no ``cpu``."""

    class Logging(Net):
        def body(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.seen = y.cpu()
            return y

    model, _ = start("O1", Logging(recompute))
    y = model(torch.ones(3, 6))
    assert (y.dtype, model.seen.dtype) == (torch.float16, torch.float32)


class Nested(nn.Module):
    """Recomputes, in a recomputation, a function that the first training has registered."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x, depth=0):
        if depth < 2:
            return checkpoint(self.forward, x, depth + 1, use_reentrant=self.reentrant)
        return self.second(torch.sigmoid(self.first(x)))


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("later", ["O0", "O1", "O2", "O4"])
def test_a_later_training_leaves_recomputation_alone(later, reentrant, thread):
    def gradients(with_another):
        amp.reset()
        torch.manual_seed(0)
        amp.register_float_function(torch, "sigmoid")
        model, optimizer = start("O1", Nested(reentrant), loss_scale=128.0)
        x = torch.randn(8, 4, requires_grad=True)
        other = None
        if with_another:
            other, _ = start(later, Nested(reentrant))
        loss = model(x).float().square().mean()
        if other is not None:  # its graph is run through in the same backward
            loss = loss + 0 * other(x.detach().requires_grad_()).float().square().mean()

        backward(loss, optimizer, thread)
        return [x.grad, *[p.grad for p in model.parameters()]]

    assert_same(gradients(True), gradients(False))


def test_recomputation_under_torchs_own_autocast_keeps_its_meaning():
    start("O1", nn.Linear(1, 1))
    amp.initialize(Net(), opt_level="O0", verbosity=0)
    x = torch.rand(3, 4, requires_grad=True)
    seen = []

    def function(y):
        seen.append(y.half().softmax(-1).dtype)
        return y * 2

    with torch.autocast("cpu", dtype=torch.float16):
        y = checkpoint(function, x, use_reentrant=True)
    y.sum().backward()
    assert seen == [torch.float16] * 2


# -- initialize inside of torch's blocks ----------------------------------------------------------


@pytest.mark.parametrize("level", HALF)
def test_initialize_in_torchs_autocast_block_is_refused_where_the_thread_casts(level):
    before = state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = state()
        with pytest.raises(RuntimeError, match=r"Call amp\.initialize before the block"):
            start(level)
        with pytest.raises(RuntimeError, match=r"Call amp\.init before the block"):
            amp.init()
        assert state() == inside
    assert state() == before
    model, _ = start(level)
    with torch.autocast("cpu", enabled=False), pytest.raises(RuntimeError, match="before the bl"):
        start("O0")  # the end of the block would switch the casts on again
    assert_at(level, model)
    assert product() == HALF[level]


@pytest.mark.parametrize(
    ("level", "enabled"), [*((level, False) for level in LEVELS), ("O0", True), ("O2", True)]
)
def test_initialize_in_torchs_autocast_block_leaves_it_alone(level, enabled):
    before = autocast_state()[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        model, _ = start(level)
        if enabled:
            assert product() == torch.bfloat16
    assert autocast_state()[:2] == before
    assert product() == torch.float32
    assert_at(level, model)
    start("O0")
    assert product() == torch.float32


# -- cached weight casts --------------------------------------------------------------------------


CHANGES = {
    "step": lambda model, optimizer: train_step(lambda x: model(x)[0], optimizer, torch.ones(3, 6)),
    "in place": lambda model, _: model.linear.weight.detach().mul_(3),
    "data": lambda model, _: setattr(model.linear.weight, "data", model.linear.weight.data * 3),
    "data in place": lambda model, _: model.linear.weight.data.mul_(3),
    "load": lambda model, _: model.load_state_dict(
        {name: value * 3 for name, value in model.state_dict().items()}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_a_changed_weight_is_used_at_once(level, change):
    model, optimizer = start(level, optimizer=functools.partial(sgd, lr=0.01), loss_scale=128.0)
    x = torch.randn(3, 6)
    for grad in (True, False, True):
        before = model.linear.weight.detach().clone()
        with torch.set_grad_enabled(grad):
            assert_at(level, model, x)
        change(model, optimizer)
        assert not torch.equal(before, model.linear.weight)
        with torch.set_grad_enabled(grad):
            assert_at(level, model, x)


def test_a_changed_weight_is_used_at_once_outside_of_models():
    start("O1")
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    for grad in (True, False):
        for block in (contextlib.nullcontext, amp.autocast):
            weight.data.fill_(1.0)
            for factor in (1, 2, 4):
                with torch.set_grad_enabled(grad), block():
                    assert x.mm(weight).tolist() == [[2 * factor, 2 * factor]]
                weight.data.mul_(2)


def test_evaluation_before_training_leaves_gradients_whole():
    for level in ("O1", "O2"):
        ends = []
        for evaluate in (False, True):
            torch.manual_seed(0)
            model, optimizer = start(level, loss_scale=128.0)
            model.eval()
            x = torch.randn(3, 6)
            for mode in (torch.no_grad, torch.inference_mode) if evaluate else ():
                with mode():
                    model(x)
            scaled_backward(model(x)[0].float().square().sum(), optimizer)
            ends.append([p.grad for p in amp.master_params(optimizer)])
        assert_same(*ends)


# -- amp.autocast ---------------------------------------------------------------------------------


def region(**options):
    with amp.autocast(**options):
        half = torch.ones(2, 2).half()
        return product(), half.softmax(-1).dtype


UNCAST = (torch.float32, torch.float16)
REGION = {  # of a type; softmax in bfloat16 as torch.autocast has it on a CPU
    None: UNCAST,
    torch.float16: (torch.float16, torch.float32),
    torch.bfloat16: (torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize("level", [None, "disabled", *LEVELS])
def test_autocast_follows_the_level(level):
    """Before any initialize it is O1."""
    if level == "disabled":
        amp.initialize(Net(), enabled=False)
    elif level is not None:
        start(level)
    before = state()
    dtype = torch.float16 if level is None else (HALF | MODEL).get(level)
    assert region() == REGION[dtype]
    for other in (torch.float16, torch.bfloat16):
        assert region(dtype=other) == REGION[other if dtype else None]
    assert region(enabled=False) == UNCAST
    assert state() == before


@pytest.mark.parametrize("level", LEVELS)
def test_autocast_in_a_model_follows_the_models_level(level):
    class Region(nn.Linear):
        def forward(self):
            return region()

    model, _ = start(level, Region(2, 2))
    for ambient in ("O4", "O0", "O2"):
        start(ambient)
        assert model() == REGION[HALF.get(level)]


def test_autocast_as_a_decorator():
    @amp.autocast()
    def forward(depth=1):
        """Multiply."""
        return (forward(depth - 1) if depth else []) + [product()]

    assert forward() == [torch.float16] * 2
    assert forward.__doc__ == "Multiply."
    assert product() == torch.float32


def test_autocast_nests_and_survives_exceptions():
    def cut_short():
        with amp.autocast():
            with amp.autocast(dtype=torch.bfloat16):
                assert product() == torch.bfloat16
            assert product() == torch.float16
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short()
    assert product() == torch.float32
    with pytest.raises(ValueError, match=r"torch\.float32.*torch\.float16, torch\.bfloat16"):
        amp.autocast(dtype=torch.float32).__enter__()


# -- replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_replica_in_a_thread_of_data_parallel_computes_at_its_level(level):
    model, _ = start(level)
    model.eval()
    x = torch.randn(3, 6)
    wanted = expected(level, *weights(model), x)

    def run():
        replica = model._replicate_for_data_parallel()
        replica.linear = model.linear._replicate_for_data_parallel()
        replica.linear.weight, replica.linear.bias = model.linear.weight, model.linear.bias
        return [t.detach() for t in replica(x)]

    assert_same(in_thread(run), wanted)


def test_backward_functions_written_in_python_are_not_cast():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append((x @ x).dtype)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((grad @ grad).dtype)
            return grad

    class Model(nn.Linear):
        def forward(self, x):
            return Product.apply(super().forward(x).float())

    model, optimizer = start("O1", Model(2, 2))
    scaled_backward(model(torch.ones(2, 2)).sum(), optimizer)
    assert seen == [torch.float16, torch.float32]


def test_a_step_makes_the_casts_stale_that_a_programs_own_block_has_cached():
    model = nn.Linear(4, 1, bias=False)
    model, optimizer = started("O0", model, functools.partial(sgd, lr=1.0))
    x = torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        scaled_backward(F.linear(x, model.weight).sum(), optimizer)
        before = F.linear(x, model.weight)  # its cast is cached
        optimizer.step()
        assert before - F.linear(x, model.weight) > 3.0
