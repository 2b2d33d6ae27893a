"""Training on two ranks, with amp and with mixed precision by hand.

A test sends a ``Cell`` to both processes of a ``Pair``. Each of them trains it twice, ``ByHand``
and ``WithAmp``, and sends back what it had after every step. ``ByHand`` is plain torch; it shares
nothing with the library. Both are driven by the same loop, ``_train``: the user's program.
"""

import contextlib
import functools
import math
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex import amp, parallel
from apex.amp.casting import cpu_float16
from tests.amp.gradients.sequences import Scale
from tests.ranks import Ranks

HAS_MASTERS = ("O2", "O5")
SCALE, WINDOW = 2.0**8, 2  # two clean steps let the scale grow
OVERFLOW_STEP = 1
CHECKPOINT_SEED = 7


class Way(NamedTuple):
    """How a step's gradients are accumulated and reduced over ranks."""

    passes: int = 2
    no_sync: bool = False  # every pass but the last is in no_sync()
    delay: bool = False  # every pass but the last has delay_unscale=True
    reduce: str = "by ddp"  # or "in the body" of the last block, "after the block", "never"


WAYS = {
    "ddp": Way(passes=1),
    "no_sync": Way(no_sync=True),
    "no_sync_delayed": Way(no_sync=True, delay=True),
    # Both passes reduce. In plain torch the first mean stays in .grad and the second pass adds to
    # it before it reduces: the mean of a mean is itself, so this too ends with the whole sum.
    "delayed": Way(delay=True),
    "in_the_body": Way(delay=True, reduce="in the body"),
    "after_the_block": Way(passes=1, reduce="after the block"),
    "after_the_block_delayed": Way(delay=True, reduce="after the block"),
    "after_two_blocks": Way(reduce="after the block"),
    "never": Way(passes=1, reduce="never"),
}


class Cell(NamedTuple):
    """One training on two ranks."""

    level: str
    way: str
    overflow: str = "none"  # which pass of rank 1 overflows: "first", "last"
    dynamic: bool = True  # False: the level's own loss scale, for the levels where that is 1
    steps: int = 3
    start: str = "same"  # or "seeds", or who loads a checkpoint when: "rank0_before", "all_after"
    again: bool = False  # after a step rank 0 loads a checkpoint, and the model is wrapped again
    options: tuple = ()  # of DistributedDataParallel, as pairs
    spare: bool = False  # the model has a layer that no forward uses
    compiled: str = ""  # with amp torch.compile takes the "model" or the "wrapper" around it
    ours: str = ""  # with amp the wrapper is apex's, made "after" amp.initialize or "before" it


class Step(NamedTuple):
    """What a rank has after a step."""

    weights: dict  # of the model
    masters: dict  # what the optimizer steps
    scale: float
    clean: int  # clean steps since the scale last changed
    taken: bool  # not skipped


class Net(nn.Module):
    """Batchnorm's weights stay float32 at O2 and O5, so these have weights of both widths."""

    def __init__(self, seed, spare=False):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        nn.init.normal_(self.norm.weight, 1.0, 0.1)
        nn.init.normal_(self.norm.bias, 0.0, 0.1)
        if spare:
            self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


def _sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _batch(rank, step, number):
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randint(0, 4, (8,), generator=generator)


class WithAmp:
    """A user's program, with apex."""

    def __init__(self, cell, model):
        options = {"opt_level": cell.level, "verbosity": 0}
        if cell.dynamic:
            options.update(loss_scale="dynamic", init_scale=SCALE, growth_interval=WINDOW)
        optimizer = _sgd(model.parameters())
        self.wrapper = None
        if cell.ours == "before":
            self.wrapper = parallel.DistributedDataParallel(model, **dict(cell.options))
        amp.initialize(self.wrapper or model, optimizer, **options)
        self.model, self.optimizer = model, optimizer

    def forward(self, wrapper, x):
        return wrapper(x).float()

    def backward(self, loss, *, last, delay, reduced):
        with amp.scale_loss(loss, self.optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
            _all_reduce(reduced)

    def stepped_params(self):
        return list(amp.master_params(self.optimizer))

    def step(self):
        self.optimizer.step()
        return amp.stepped(self.optimizer)

    def scaler(self):
        state = amp.state_dict()["loss_scaler0"]
        return state["loss_scale"], state["unskipped"]


class ByHand:
    """The same in plain torch. At O0 the loss is never scaled: that is training without amp."""

    def __init__(self, cell, model):
        self.level, self.model, self.dynamic = cell.level, model, cell.dynamic
        self.dtype = torch.bfloat16 if cell.level in ("O4", "O5") else torch.float16
        self.scale = Scale(SCALE if cell.dynamic else 1.0, WINDOW, 1.0, 2.0**24)
        self.masters = {}
        if cell.level == "O3":
            model.to(self.dtype)
        if cell.level in HAS_MASTERS:
            for name, param in model.named_parameters():
                if not name.startswith("norm"):
                    self.masters[param] = param.detach().clone().requires_grad_()
                    param.data = param.data.to(self.dtype)
        self.optimizer = _sgd(self.stepped_params())

    def forward(self, wrapper, x):
        if self.level in ("O1", "O4"):
            with torch.autocast("cpu", self.dtype):
                return wrapper(x).float()
        return wrapper(x if self.level == "O0" else x.to(self.dtype)).float()

    def backward(self, loss, *, last, delay, reduced):
        """Add to ``.grad`` in place, in the weight's own dtype; the last pass unscales the sum."""
        factor = 1.0 if self.level == "O0" else self.scale.value
        (loss * factor).backward()
        _all_reduce(reduced)
        if not last:
            return
        for param in self.model.parameters():
            master = self.masters.get(param, param)
            if param.grad is not None:
                if master is not param:
                    master.grad = param.grad.float()
                master.grad.mul_(1.0 / factor)

    def load(self, checkpoint):
        """Take the float32 values of a checkpoint, unrounded where there are masters."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(checkpoint[name])
                self.masters.get(param, param).copy_(checkpoint[name])

    def stepped_params(self):
        return [self.masters.get(param, param) for param in self.model.parameters()]

    def step(self):
        """Check, then step or skip; the scale changes once, whichever pass overflowed."""
        grads = [param.grad for param in self.stepped_params() if param.grad is not None]
        taken = not self.dynamic or all(bool(grad.isfinite().all()) for grad in grads)
        if taken:
            self.optimizer.step()
            with torch.no_grad():
                for param, master in self.masters.items():
                    param.copy_(master)
        if self.dynamic:
            self.scale.finish_step(taken)
        self.model.zero_grad()  # optimizer.zero_grad() reaches the masters alone
        return taken

    def scaler(self):
        return self.scale.value, self.scale.clean


def _start(cell, rank, side):
    """The seed of the model, and whether it loads the checkpoint "before" or "after" wrapping.

    By hand all ranks begin with what rank 0 has at the first forward. The exception is what only
    rank 0 loads after wrapping: where there are no masters, plain torch leaves that on rank 0.
    """
    who, _, when = cell.start.partition("_")
    arrives = cell.start != "rank0_after" or cell.level in HAS_MASTERS or cell.ours
    if side is ByHand and arrives:
        return CHECKPOINT_SEED if when else 0, ""
    return rank if cell.start == "seeds" else 0, when if who == "all" or rank == 0 else ""


def _all_reduce(params):
    for param in params:
        dist.all_reduce(param.grad)


def _compile_if(asked, module):
    return torch.compile(module, backend="eager") if asked else module


def _train(cell, rank, side):
    """The program: ``side`` is WithAmp or ByHand."""
    way = WAYS[cell.way]
    seed, load = _start(cell, rank, side)
    checkpoint = Net(CHECKPOINT_SEED, cell.spare).state_dict()
    run = side(cell, Net(seed, cell.spare))
    if load == "before":
        run.model.load_state_dict(checkpoint)
    is_ddp = way.reduce == "by ddp"
    model = _compile_if(cell.compiled == "model" and side is WithAmp, run.model)
    wrapper = _wrapped(cell, side, run, model) if is_ddp else model
    forward = _compile_if(cell.compiled == "wrapper" and side is WithAmp, wrapper)
    if load == "after":
        run.model.load_state_dict(checkpoint)
    bad_pass = {"none": None, "first": 0, "last": way.passes - 1}[cell.overflow]
    steps = []
    for step in range(cell.steps):
        run.optimizer.zero_grad()
        for number in range(way.passes):
            last = number == way.passes - 1
            reduced = run.model.parameters() if last and way.reduce == "in the body" else ()
            with wrapper.no_sync() if way.no_sync and not last else contextlib.nullcontext():
                x, y = _batch(rank, step, number)
                loss = F.cross_entropy(run.forward(forward, x), y)
                if (rank, step, number) == (1, OVERFLOW_STEP, bad_pass):
                    loss = loss * math.inf
                run.backward(loss, last=last, delay=way.delay and not last, reduced=reduced)
        if way.reduce == "after the block":
            _all_reduce(run.stepped_params())
        steps.append(_record(run, run.step()))
        if cell.again and step == 0:
            if side is ByHand:
                run.load(checkpoint)
            elif rank == 0:
                run.model.load_state_dict(checkpoint)
            forward = wrapper = _wrapped(cell, side, run, model)
    return steps


def _wrapped(cell, side, run, model):
    if not cell.ours:
        return DistributedDataParallel(model, **dict(cell.options))
    if side is ByHand:  # our options change nothing that torch's wrapper is to do
        return DistributedDataParallel(model, find_unused_parameters=cell.spare)
    early, run.wrapper = run.wrapper, None
    return early or parallel.DistributedDataParallel(model, **dict(cell.options))


def _record(run, taken):
    names = [name for name, _ in run.model.named_parameters()]
    tensors = [list(run.model.parameters()), run.stepped_params()]
    copies = [[tensor.detach().clone() for tensor in column] for column in tensors]
    weights, masters = (dict(zip(names, column, strict=True)) for column in copies)
    return Step(weights, masters, *run.scaler(), taken)


class Answer(NamedTuple):
    """What one rank sends back: a ``Step`` for each step, and amp's warnings."""

    amp: list
    hand: list
    warnings: list


def answer(cell, rank):
    cpu_float16.begin(torch.float16, ["cpu"])  # by hand too float16 computes in float32
    try:
        hand = _train(cell, rank, ByHand)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with_amp = _train(cell, rank, WithAmp)
    finally:
        amp.reset()
        torch.compiler.reset()
    return Answer(with_amp, hand, [str(w.message) for w in caught if "amp" in str(w.message)])


class Pair(Ranks):
    """Two ranks that take a ``Cell`` for a job too, and send back an ``Answer`` each."""

    def run(self, job):
        """See ``Ranks.run``."""
        return super().run(functools.partial(answer, job) if isinstance(job, Cell) else job)
