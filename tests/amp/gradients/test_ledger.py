"""The gradients of optimizers under amp: random sequences of operations against a reference."""

import contextlib
from dataclasses import dataclass

import pytest
import torch

from apex import amp
from apex.amp.gradients.ledger import State
from apex.ops import _runtime
from apex.optimizers import FusedSGD
from tests.amp.gradients.sequences import (
    HOOKS,
    NOT_FUSED,
    OWNED,
    Scale,
    Sequence,
    Static,
    check,
    equal,
)
from tests.amp.training import no_waits

LR = 2.0**-5


@dataclass(eq=False)
class Pass:
    """A backward pass, or several delayed ones that accumulate."""

    scale: Scale
    value: float  # of the scale
    who: tuple
    names: list
    is_open: bool = True
    continues: bool = False
    bad: bool = False
    counted: int = 0  # steps that the scale had counted when it was unscaled


class Reference:
    """What is in memory after each operation, by parameter.

    ``kept`` are unscaled gradients of what is stepped. ``new`` is what backward has left on weights
    in an open or delayed pass, scaled, or on 16-bit ones outside of a block; ``bare`` is the latter
    during a pass. ``this`` is the open or delayed pass of each optimizer, ``passes`` those since
    its last step, ``left`` those of a skipped one whose gradients may be there, ``waiting`` the
    optimizers that have yet to step on a gradient. ``shown`` are 16-bit weights that still have a
    gradient that is kept, until a forward; ``cleared`` those where the program has cleared it, so
    that what is kept goes too.
    """

    def __init__(self, weights, masters, owned, scales):
        self.weights, self.masters, self.owned, self.scales = weights, masters, owned, scales
        self.kept, self.new, self.bare, self.waiting = {}, {}, {}, {}
        self.this = [None for _ in owned]
        self.passes, self.left = [[] for _ in owned], [[] for _ in owned]
        self.shown, self.cleared = set(), set()

    def names(self, who):
        return list(dict.fromkeys(name for number in who for name in self.owned[number]))

    def owners(self, names):
        return [n for n, owned in enumerate(self.owned) if {*owned} & {*names}]

    def on_weight(self, name):
        """Where a backward accumulates."""
        is_scaled = any(self.this[number] for number in self.owners([name]))
        return self.new if name in self.masters or is_scaled else self.kept

    def open(self, who, loss_id):
        this, scale = self.this[who[0]], self.scales[loss_id]
        if this and {*this.who} == {*who} and this.scale is scale:
            this.is_open = this.continues = True
            return this
        self.settle(who)
        this = Pass(scale, scale.value, who, self.names(who))
        if scale.value == 1.0 and isinstance(scale, Static) and not self.masters:
            return this  # the block does nothing
        for number in who:
            if not {*self.kept, *self.new} & {*self.owned[number]}:
                self.passes[number] = []  # the program has cleared the gradients
            self.drop_left(number)
            self.this[number] = this
        self.bare.update({n: self.new.pop(n) for n in this.names if n in self.new})
        self.shown -= {*this.names}
        return this

    def forward(self):
        self.take_over(self.masters)
        self.drop(self.weights)
        self.shown.clear()
        for number in range(len(self.owned)):
            self.forget_left(number)

    def forget_left(self, number):
        """Forget a skipped step if the program has cleared its gradients."""
        names = {*self.owned[number]}
        open_names = {n for other in self.owners(names) if (p := self.this[other]) for n in p.names}
        is_stashed = open_names & {*self.bare, *({*self.kept} - {*self.masters})}
        if not is_stashed and not names & {*self.kept, *self.new, *self.shown}:
            self.left[number] = []

    def drop_left(self, number):
        if any(this.bad for this in self.left[number]):
            for name in {*self.owned[number]} & {*self.kept}:
                self.kept[name] = torch.zeros_like(self.kept[name])
        self.left[number] = []

    def take_over(self, names):
        """Masters take what was written into their weights."""
        for name in {*self.masters} & {*names}:
            old, weight = self.masters[name], self.weights[name]
            self.masters[name] = torch.where(old.to(weight.dtype) == weight, old, weight.float())

    def drop(self, names):
        for name in {*names} & self.cleared:
            self.kept.pop(name, None)
            self.cleared.remove(name)

    def backward(self, grads, scale=1.0):
        for name, grad in grads.items():
            grad, to = (grad * scale).to(self.weights[name].dtype), self.on_weight(name)
            to[name] = to[name] + grad if name in to else grad

    def end(self, this, how):
        this.is_open = False
        if this in self.this and how == "close":
            self.unscale(this)
        elif this in self.this and how == "fail" and not this.continues:
            self.this = [None if one is this else one for one in self.this]
            self.new = {name: grad for name, grad in self.new.items() if name not in this.names}
            self.new.update({n: self.bare.pop(n) for n in this.names if n in self.bare})

    def unscale(self, this):
        self.this = [None if one is this else one for one in self.this]
        scaled = [(n, self.new.pop(n).float()) for n in this.names if n in self.new]
        for name, grad in scaled:
            self.keep(name, grad / this.value, [name])
        for name in {*this.names} & {*self.bare}:
            self.keep(name, self.bare.pop(name))
        # On the weight, if a pass has not reached it, as in torch.
        self.shown |= {*this.names} & {*self.masters} & {*self.kept}
        if not isinstance(this.scale, Static):
            this.bad = not all(grad.isfinite().all() for _, grad in scaled)
            this.scale.finish_pass(this.bad)
            this.counted = this.scale.steps
            for number in self.owners(this.names):
                self.passes[number].append(this)

    def keep(self, name, grad, shown=()):
        self.kept[name] = self.kept[name] + grad.float() if name in self.kept else grad.float()
        self.waiting[name] = {*self.owners([name])}
        self.shown |= {name} & {*self.masters} & {*shown}

    def settle(self, who):
        for number in self.owners(self.names(who)):
            if self.this[number] and not self.this[number].is_open:
                self.unscale(self.this[number])

    def collect(self, number):
        self.settle([number])
        self.drop(self.owned[number])
        self.take_over(self.owned[number])
        for name in {*self.masters} & {*self.owned[number]}:
            if name in self.new:
                self.keep(name, self.new.pop(name), [name])

    def clip(self, number, kind, limit):
        self.collect(number)
        names = [name for name in self.owned[number] if name in self.kept]
        norm = torch.stack([self.kept[name].norm() for name in names]).norm()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for name in names:
            grad = self.kept[name]
            self.kept[name] = grad * factor if kind == "norm" else grad.clamp(-limit, limit)

    def write_inside(self, number, when, name, value):
        """What a hook of the step writes, which is taken over at once from weights of its own."""
        weight = self.weights[name] = self.weights[name].clone()
        weight.view(-1)[0] = value
        if name in self.owned[number]:
            self.take_over([name])

    def step(self, number, inside=None):
        self.collect(number)
        self.forget_left(number)
        passes = self.left[number] + self.passes[number]
        skip = any(this.bad for this in passes)
        self.left[number], self.passes[number] = passes if skip else [], []
        for this in passes:
            if not skip and this.counted == this.scale.steps:  # no other step has counted it
                this.scale.count()
        if inside and not skip and inside[0] == "pre":
            self.write_inside(number, *inside)
        for name in self.owned[number]:
            of = self.masters if name in self.masters else self.weights
            if name in self.kept and not skip:
                of[name] = of[name] - LR * self.kept[name]
            if name in self.masters:
                self.weights[name] = self.masters[name].to(self.weights[name].dtype)
                self.waiting.setdefault(name, set()).discard(number)
                if not self.waiting[name]:
                    self.kept.pop(name, None)
        if inside and not skip and inside[0] == "post":
            self.write_inside(number, *inside)
        return skip

    def zero_grad(self, number):
        self.settle([number])
        self.left[number], self.passes[number] = [], []
        for name in self.owned[number]:
            for grads in (self.kept, self.new, self.bare):
                grads.pop(name, None)
            self.shown, self.cleared = self.shown - {name}, self.cleared - {name}

    def zero_model(self):
        self.cleared, self.shown = self.cleared | self.shown, set()
        for name in self.weights:
            self.on_weight(name).pop(name, None)


class Case(Sequence):
    """Compared with :class:`Reference`."""

    reference = Reference


class InBuffers(Case):
    """Before a block, gradients of float32 weights are parts of larger tensors."""

    def open(self, *arguments):
        for weight in self.model.parameters():
            if weight.grad is not None and weight.dtype == torch.float32:
                buffer = torch.cat([weight.grad.flatten(), torch.ones(1)])
                weight.grad = buffer[:-1].view(weight.shape)
        super().open(*arguments)


CASES = [  # float32 weights: static, dynamic, without a scale; masters of both types
    *(("O0", 128.0), ("O1", "dynamic"), ("O4", 1.0)),
    *(("O2", "dynamic"), ("O2", 128.0), ("O5", 1.0)),
]
OTHERS = [("O0", "dynamic"), ("O1", 64.0), ("O4", "dynamic"), ("O5", "dynamic")]
DYNAMIC = [case for case in CASES if case[1] == "dynamic"]
cases = pytest.mark.parametrize("case", CASES, ids=str)
dynamic = pytest.mark.parametrize("case", DYNAMIC, ids=str)
kinds = pytest.mark.parametrize("kind", OWNED)
pytestmark = [
    pytest.mark.filterwarnings("ignore:amp. gradients of 16-bit"),
    pytest.mark.filterwarnings("ignore:amp. the optimizer steps with gradients of float16"),
    pytest.mark.filterwarnings("ignore:amp. amp.master_params was called inside"),
]


def sgd(params):
    return torch.optim.SGD(params, lr=LR)


def fused_sgd(params):
    return FusedSGD(params, lr=LR)


@kinds
@cases
def test_every_sequence_gives_what_the_reference_gives(case, kind):
    check(lambda operations: Case(*case, kind, sgd).run(operations), f"{case}{kind}", 15)


@kinds
@pytest.mark.parametrize("case", [("O0", 128.0), *DYNAMIC], ids=str)
def test_gradients_in_buffers_give_the_same(case, kind):
    check(lambda operations: InBuffers(*case, kind, sgd).run(operations), f"{case}{kind} parts", 4)


@pytest.mark.exhaustive
@kinds
@pytest.mark.parametrize("case", CASES + OTHERS, ids=str)
def test_many_more_sequences(case, kind):
    check(lambda operations: Case(*case, kind, sgd).run(operations), f"{case}{kind} more", 400)


def one_pass(who=(0,), spoiled=None, *, delay=False):
    return [("open", who, 0, 1.0, False, delay), ("backward", spoiled), ("close",)]


RARE = {  # that random sequences seldom contain
    "a pass continues at the scale of the first": [
        *one_pass(delay=True),
        *one_pass((1,), "other"),  # the scale backs off
        *one_pass(),
    ],
    "two passes": [*one_pass(), *one_pass()],
    "clipped, then read": [*one_pass(), ("clip", 0, "norm", 0.75), ("read", "master_params")],
}


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("name", RARE)
@cases
def test_rare_sequences(case, name, fused):
    with _runtime.use("reference"):
        sequence = Case(*case, "one" if fused else "two", fused_sgd, fused=fused)
        sequence.run([*RARE[name], ("step", 0), ("step", 1)])


AFTER_A_SKIP = {  # what random sequences seldom contain; 1 shares a weight with 0
    "cleared by the model, then a backward outside of a block": [
        *(("step", 0, False), ("zero_model",), ("bare", (0,), 0.5), ("step", 0, False)),
    ],
    "a forward while the other optimizer has put the gradient aside": [
        *(("step", 1, False), ("open", (0,), 0, 1.0, False, False), ("bare", (0,), 0.5)),
        *(("backward", None), ("close",), ("step", 1, False)),
    ],
    "the other optimizer's turn": [
        *(("step", 0, False), *one_pass((1,)), ("step", 1, False), *one_pass(), ("step", 0, False)),
    ],
}


@pytest.mark.parametrize("name", AFTER_A_SKIP)
@dynamic
def test_rare_sequences_after_a_skip(case, name):
    sequence = Case(*case, "shared", sgd)
    sequence.run([*one_pass(spoiled="linear"), *AFTER_A_SKIP[name]])


@kinds
@dynamic
def test_a_device_that_decides_gives_the_same(case, kind, runs_behind):
    with _runtime.use("reference"):
        check(
            lambda operations: Case(*case, kind, fused_sgd).run(operations),
            f"{case}{kind}",
            10,
            without=HOOKS,
        )


@pytest.mark.parametrize("kind", ["two", "shared"])
@pytest.mark.parametrize("level", ["O1", "O2"])  # Triton's interpreter truncates to bfloat16
def test_the_kernels_give_the_same(level, kind):
    def run(operations):
        with _runtime.use("triton"):
            Case(level, "dynamic", kind, fused_sgd).run(operations)

    check(run, f"{level}{kind}", 1, length=40)


@cases
@pytest.mark.slow
def test_a_fused_step_gives_the_same_weights(case):
    def run(operations):
        with _runtime.use("reference"):
            Case(*case, "one", fused_sgd, fused=True).run(operations)

    check(run, f"{case}", 20, without=[*NOT_FUSED, *HOOKS])


@pytest.mark.parametrize("fused", [None, True])
@kinds
@dynamic
def test_nothing_waits(case, kind, fused):
    """But for a look at gradients on 16-bit weights that the program has edited in place."""

    def run(operations):
        with no_waits():
            Case(*case, kind, fused_sgd, fused=fused, device="meta").run(operations)

    check(run, f"{case}{kind}", 3, without=NOT_FUSED[:2] if fused else ["edit"])


# -- the table of transitions in the docstring of apex.amp.gradients.ledger --------------------

OPEN, DELAYED, UNSCALED = State.OPEN, State.DELAYED, State.UNSCALED


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("before", "event", "after", "grad"),  # in memory, of a float32 weight; 256 where it is scaled
    [
        (UNSCALED, "open", OPEN, None),
        (UNSCALED, "step", UNSCALED, 1),
        (UNSCALED, "clip", UNSCALED, 1),
        (UNSCALED, "zero_grad", UNSCALED, None),
        (OPEN, "open", "in an open scale_loss block already", 256),
        (OPEN, "open another", "in an open scale_loss block already", 256),
        (OPEN, "fail", UNSCALED, 1),
        (OPEN, "close", UNSCALED, 2),
        (OPEN, "delay", DELAYED, 256),
        (OPEN, "step", r"step\(\) was called inside the scale_loss block", 256),
        (OPEN, "clip", "still scaled inside the scale_loss block", 256),
        (OPEN, "zero_grad", OPEN, None),
        (OPEN, "zero_grad, close", UNSCALED, None),
        (DELAYED, "open", OPEN, 256),
        (DELAYED, "open, fail", DELAYED, 256),
        (DELAYED, "open, close", UNSCALED, 2),
        (DELAYED, "open another", OPEN, None),
        (DELAYED, "open another, fail", UNSCALED, 2),
        (DELAYED, "step", UNSCALED, 2),
        (DELAYED, "clip", UNSCALED, 2),
        (DELAYED, "zero_grad", UNSCALED, None),
    ],
)
def test_the_table_of_transitions(level, before, event, after, grad):
    this = Case(level, "dynamic", "one", sgd)
    (optimizer,), weight = this.optimizers, this.of("norm")

    def open_block(loss_id=0, delay=False):
        loss = this.loss(this.grads((0,), 1.0))
        this.blocks.append(amp.scale_loss(loss, optimizer, loss_id, delay_unscale=delay))
        return this.blocks[-1].__enter__()

    def close(error=None):
        this.blocks.pop().__exit__(error and type(error), error, None)

    events = {
        "open": open_block,
        "open another": lambda: open_block(loss_id=1),
        "fail": lambda: close(KeyError()),
        "close": close,
        "delay": close,
        "step": optimizer.step,
        "clip": lambda: amp.clip_grad_value_(optimizer, 100.0),
        "zero_grad": optimizer.zero_grad,
    }
    open_block().backward()
    close()
    if before is not UNSCALED:
        open_block(delay=before is DELAYED or event == "delay").backward()
    if before is DELAYED:
        close()
    ledger = optimizer._amp_stash.ledger
    assert ledger.state is before
    refused = isinstance(after, str)
    with pytest.raises(RuntimeError, match=after) if refused else contextlib.nullcontext():
        for name in event.split(", "):
            events[name]()
    assert ledger.state is (before if refused else after)
    expected = None if grad is None else this.grads((0,), float(grad))["norm"]
    assert equal(weight.grad, expected)
    assert (weight.grad is None) == (grad is None)
    while this.blocks:
        with contextlib.suppress(IndexError, RuntimeError):
            close()
