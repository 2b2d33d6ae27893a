"""What each of two ranks does in test_agreement.py, with amp and in plain torch by hand.

By hand there is one process, which has all parts of the model and all batches.
"""

import contextlib
import io
import itertools
import math
import re
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex.amp.gradients import overflow
from apex.optimizers import FusedAdam
from tests.amp.gradients.sequences import Scale
from tests.amp.training import copies, scale_now, scaled_backward

RANKS = (0, 1)
SCALE, WINDOW = 2.0**8, 2  # two clean steps let the scale grow


class Step(NamedTuple):
    """What a rank has after a step."""

    weights: list
    scale: float
    taken: bool


def adam(params):
    return FusedAdam(params, lr=0.01)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


# -- two models that have nothing in common but the decision ---------------------------------------


class Case(NamedTuple):
    """A training of a model on each rank; gradients overflow in ``bad``: (rank, step, pass)."""

    group: str = "both"  # "both" ranks, "own" or "none"
    bad: tuple = ((1, 1, 0),)
    passes: int = 1
    delay: bool = False  # every pass but the last has delay_unscale=True
    unchecked: bool = False  # every pass has delay_overflow_check=True
    losses: int = 1  # how many scalers, which passes take in turn
    clip: float = 0.0
    idle: tuple = ()  # (rank, step, pass) whose losses reach no weight
    steps: int = 5
    adam: bool = False  # FusedAdam
    fused: bool = False  # with fused_step=True
    deferred: bool = False  # the CPU stands for a device that the host runs ahead of


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _loss(case, rank, step, number, model):
    """The loss of a pass, and whether its gradients are to overflow."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
    loss = model(torch.randn(6, 4, generator=generator)).float().square().mean()
    if (rank, step, number) in case.idle:
        loss = torch.zeros((), requires_grad=True) * 1.0
    return loss, (rank, step, number) in case.bad


def _poison(model):
    model[2].weight.grad.view(-1)[4] = math.inf


@contextlib.contextmanager
def devices(case):
    """Count all-reduces; with ``deferred`` let kernels decide on the CPU too."""
    with contextlib.ExitStack() as stack:
        spy = stack.enter_context(mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce))
        if case.deferred:
            stack.enter_context(mock.patch.object(overflow, "runs_behind", return_value=True))
        yield spy


def groups(name, rank):
    """``process_group`` for ``amp.initialize``."""
    if name == "none":
        return None
    if name == "both":
        return dist.group.WORLD
    return [dist.new_group([number]) for number in RANKS][rank]


def halves(rank, case):
    """Each rank trains a model of its own: its steps, and how many all-reduces each took."""
    amp.reset()
    model = net(rank)
    optimizer = (adam if case.adam else sgd)(model.parameters())
    scaling = {"loss_scale": "dynamic", "init_scale": SCALE, "growth_interval": WINDOW}
    scaling["num_losses"] = case.losses
    options = {"fused_step": case.fused, "process_group": groups(case.group, rank)}
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0, **scaling, **options)
    steps, calls = [], []
    with devices(case) as spy:
        for step in range(case.steps):
            optimizer.zero_grad()
            for number in range(case.passes):
                loss, is_bad = _loss(case, rank, step, number, model)
                options = {"delay_unscale": case.delay and number < case.passes - 1}
                options |= {"delay_overflow_check": case.unchecked}
                loss_id = number % case.losses
                with amp.scale_loss(loss, optimizer, loss_id, **options) as scaled:
                    scaled.backward()
                    if is_bad:
                        _poison(model)
            if case.clip:
                amp.clip_grad_norm_(optimizer, case.clip)
            optimizer.step()
            steps.append(Step(copies(model.parameters()), scale_now(), amp.stepped(optimizer)))
            calls.append(spy.call_count)
            spy.reset_mock()
    return steps, calls


def halves_by_hand(case):
    """Both models in one float32 training; the steps of each."""
    models = [net(rank) for rank in RANKS]
    optimizers = [(adam if case.adam else sgd)(model.parameters()) for model in models]
    scale, steps = Scale(SCALE, WINDOW, 1.0, 2.0**24), ([], [])
    for step in range(case.steps):
        finite = [_unscaled_by_hand(case, models[rank], rank, step, scale.value) for rank in RANKS]
        taken = all(finite)
        for model, optimizer in zip(models, optimizers, strict=True) if taken else ():
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
        scale.finish_step(taken)
        for rank, model in enumerate(models):
            steps[rank].append(Step(copies(model.parameters()), scale.value, taken))
    return steps


def _unscaled_by_hand(case, model, rank, step, scale):
    """Give a model the gradients of a step; say whether they are finite."""
    model.zero_grad()
    for number in range(case.passes):
        loss, is_bad = _loss(case, rank, step, number, model)
        (loss * scale).backward()
        if is_bad:
            _poison(model)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads:
        grad.mul_(1.0 / scale)
    return all(bool(grad.isfinite().all()) for grad in grads)


# -- what programs do between blocks ---------------------------------------------------------------


def _start(rank, *, parts=1, **options):
    """Models and optimizers of one rank, with a scale of 128."""
    amp.reset()
    models = [net(10 * rank + part) for part in range(parts)]
    optimizers = [sgd(model.parameters()) for model in models]
    options = {"loss_scale": "dynamic", "init_scale": 128.0, "verbosity": 0, **options}
    options["process_group"] = dist.group.WORLD
    amp.initialize(models, optimizers, opt_level="O0", **options)
    return models, optimizers


def _block(models, optimizers, poison=None):
    x = torch.ones(2, 4)
    with amp.scale_loss(sum(m(x).float().square().mean() for m in models), optimizers) as scaled:
        scaled.backward()
        if poison is not None:
            _poison(poison)


def two_optimizers(rank):
    """One block for both; the second one's gradients overflow on rank 1."""
    models, optimizers = _start(rank, parts=2)
    found = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _block(models, optimizers, models[1] if rank == step == 1 else None)
        for optimizer in optimizers:
            optimizer.step()
            found.append(amp.stepped(optimizer))
    return found, scale_now()


def beside_a_wrapper(rank):
    """Rank 1 alone steps a weight that DistributedDataParallel does not reduce; it overflows.

    The program sums up the losses between block and step.
    """
    amp.reset()
    model, extra = net(0), nn.Parameter(torch.ones(()))
    optimizer = sgd([*model.parameters(), *([extra] if rank else [])])
    options = {"loss_scale": "dynamic", "init_scale": 128.0, "process_group": dist.group.WORLD}
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0, **options)
    wrapper, found = DistributedDataParallel(model), []
    for step in range(3):
        optimizer.zero_grad()
        loss = wrapper(torch.ones(2, 4)).square().mean() + extra
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if rank == step == 1:
                extra.grad.fill_(math.inf)
        total = torch.full((), float(rank + 1))
        dist.all_reduce(total)
        optimizer.step()
        found.append((float(total), amp.stepped(optimizer), scale_now()))
    return found, copies(model.parameters())


def dropped(rank):
    """A batch that overflowed on rank 1 is dropped; rank 0 has no gradients of it."""
    (model,), (optimizer,) = _start(rank)
    if rank == 0:
        scaled_backward(torch.zeros((), requires_grad=True) * 1.0, optimizer)
    else:
        _block([model], optimizer, model)
    optimizer.zero_grad()
    between = scale_now()
    _block([model], optimizer)
    optimizer.step()
    return between, amp.stepped(optimizer), scale_now()


def cleared_by_hand(rank):
    """A batch is dropped in a way that a rank without gradients could not see."""
    (model,), (optimizer,) = _start(rank)
    _block([model], optimizer)
    model.zero_grad()
    _block([model], optimizer)


def never_finite(rank):
    """The error after too many skipped steps, on each rank, and the steps that were called."""
    (model,), (optimizer,) = _start(rank, max_skipped_steps=3)
    for step in range(10):
        optimizer.zero_grad()
        _block([model], optimizer, model if rank == 1 else None)
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return None


def told(rank):
    """Lines that amp writes to stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        (model,), (optimizer,) = _start(rank, verbosity=1)
        for step in range(3):
            optimizer.zero_grad()
            _block([model], optimizer, model if step == rank == 1 else None)
            optimizer.step()
    return out.getvalue().splitlines()


def with_a_static_scale(rank):
    """All-reduces of a training in which nothing can be skipped."""
    (model,), (optimizer,) = _start(rank, loss_scale=128.0)
    with devices(Case()) as spy:
        _block([model], optimizer)
        optimizer.step()
    return spy.call_count


# -- the programs of docs/distributed.md -----------------------------------------------------------


def recipes(page, section):
    """The names that the code in a section of a page defines."""
    _, _, text = page.read_text().partition(f"\n## {section}\n")
    text, _, _ = text.partition("\n## ")
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, f"{page}, {section}", "exec"), names)
    return names


WIDTH = 6


def labelled(seed, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(6, 4, generator=generator)
        yield x, torch.randint(0, 3, (6,), generator=generator)


def _whole():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def pipeline(rank, page):
    """Weights of this rank's half, and the scale; the third batch overflows on rank 1."""
    amp.reset()
    half = _whole()[:2] if rank == 0 else _whole()[2:]
    numbers = itertools.count(1)

    def poison(grad):
        return grad.index_fill(0, torch.tensor([1]), math.inf) if next(numbers) == 3 else None

    if rank == 1:
        half[0].weight.register_hook(poison)
    train = recipes(page, "Model parallelism")["train"]
    train(half, rank, labelled(0, 6), WIDTH)
    return list(half.state_dict().values()), scale_now()


def pipeline_by_hand():
    """The same in one process with float16 weights and float32 masters: masters, and the scale."""
    model, scale = _whole(), 2.0**16
    masters = copies(model.parameters())
    model.half()
    optimizer = sgd(masters)
    for number, (x, y) in enumerate(labelled(0, 6), 1):
        model.zero_grad()
        (F.cross_entropy(model(x.half()).float(), y) * scale).backward()
        if number == 3:
            _poison(model)
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float() / scale
        if all(bool(master.grad.isfinite().all()) for master in masters):
            optimizer.step()
            for master, param in zip(masters, model.parameters(), strict=True):
                param.data.copy_(master)
        else:
            scale /= 2
    return masters, scale
