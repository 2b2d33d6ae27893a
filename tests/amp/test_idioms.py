"""How public programs call amp: the shapes of their calls, typed as they type them.

Most of it is shown by the files on each subject; here is what only a client would write.
"""

import argparse
import contextlib
import functools
import io
import logging
import math
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import apex
import apex.amp._amp_state
from apex import amp
from apex.amp import _speech
from tests.amp.training import (
    Plain,
    backward,
    batches,
    copies,
    grads_of,
    net,
    same,
    scale_now,
    scaled_backward,
    sgd,
    spoil,
    started,
    train,
)

SCALED = pytest.mark.parametrize("level", ["O1", "O2"])


# -- initialize -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "kept", "scale"),
    [
        ([], True, "dynamic"),
        (["--opt-level", "O2", "--loss-scale", "128.0"], True, 128.0),
        (["--opt-level", "O2", "--loss-scale", "dynamic"], True, "dynamic"),
        (["--opt-level", "O3", "--keep-batchnorm-fp32", "True", "--loss-scale", "1"], True, 1.0),
        (["--opt-level", "O2", "--keep-batchnorm-fp32", "False"], False, "dynamic"),
    ],
)
def test_options_from_the_command_line(words, kept, scale):
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    args = parser.parse_args(words)
    options = {"keep_batchnorm_fp32": args.keep_batchnorm_fp32, "loss_scale": args.loss_scale}
    model, _ = started(args.opt_level, **options)
    assert model[1].weight.dtype == (torch.float32 if kept else torch.float16)
    options = amp._amp_state.opt_properties
    assert options.loss_scale == scale
    assert type(options.loss_scale) is type(scale)


@dataclass
class Program:
    """What a script does beside the usual loop."""

    make: Any = sgd
    passes: int = 1  # accumulated in a step
    clip: float = math.inf
    treat: Any = None  # what else is done to gradients
    spoiled: int = -1  # the step whose gradients overflow
    decay: float = 1.0  # of the learning rate after each step
    written: float = 0.0  # what is written to the scale before the second step


def normalized(params):
    for param in params:
        param.grad.data = param.grad.data / (param.grad.data.norm() + 1e-6)


PROGRAMS = {
    "normalizes": Program(treat=normalized),
    "accumulates, clips": Program(passes=3, clip=0.1),
    "overflows with a scheduler": Program(torch.optim.Adam, spoiled=1, decay=0.5),
    "overflows in accumulation": Program(passes=2, spoiled=2, clip=0.1, decay=0.5),
    "writes the scale": Program(
        functools.partial(torch.optim.AdamW, amsgrad=True), written=2.0**8, spoiled=3
    ),
    "nesterov": Program(functools.partial(sgd, momentum=0.9, nesterov=True), spoiled=2),
    "rmsprop": Program(functools.partial(torch.optim.RMSprop, momentum=0.5), passes=2),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_program_equals_the_one_in_plain_torch(level, program):
    model = net()
    plain = Plain(model, program.make, level, window=2, scale=2.0**10)
    optimizer = program.make(model.parameters())
    options = {"init_scale": 2.0**10, "growth_interval": 2, "verbosity": 0}
    amp.initialize(model, optimizer, opt_level=level, **options)
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=program.decay)
    schedulers = [make(one) for one in (optimizer, plain.optimizer)]
    is_dynamic = level in ("O1", "O2")
    for step in range(5):
        if step == 1 and program.written and is_dynamic:
            plain.scale = amp._amp_state.loss_scalers[0]._loss_scale = program.written
        spoiled = spoil if step == program.spoiled and is_dynamic else None
        passes = list(batches(program.passes, seed=step))
        for batch in passes:
            backward(model, optimizer, batch, spoiled)
        if program.treat is None:
            amp.clip_grad_norm_(optimizer, program.clip)
        else:
            program.treat(list(amp.master_params(optimizer)))
        optimizer.step()
        optimizer.zero_grad()
        treat = program.treat or functools.partial(
            torch.nn.utils.clip_grad_norm_, max_norm=program.clip
        )
        taken = plain.step(*passes, spoil=spoiled, treat=treat)
        assert amp.stepped(optimizer) == taken == (spoiled is None)
        for scheduler in schedulers:
            scheduler.step()
    assert same(amp.master_params(optimizer), plain.params)
    assert scale_now() == plain.scale


# -- scale_loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_gradient_penalty_by_create_graph(level):
    """The penalty is added to the loss; its own backward needs no graph."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = amp.initialize(
        model, sgd(model.parameters()), opt_level=level, loss_scale=8.0, verbosity=0
    )
    x = torch.ones(1, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    scaled_backward(gradient.square().sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad.float(), torch.full((1, 2), 2.0))
    optimizer.step()


# -- private names --------------------------------------------------------------------------------


def test_scale_written_right_after_initialize():
    model, optimizer = started("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    assert apex.amp._amp_state.loss_scalers[0].loss_scale() == 2.0**20
    scaler = apex.amp._amp_state.loss_scalers[0]  # after ``import apex.amp._amp_state``
    scaler._loss_scale, scaler._scale_seq_len = 1024.0, 1
    train(model, optimizer, batches(1))
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == [2048.0]


@SCALED
def test_a_program_that_reduces_and_checks_gradients_itself(level):
    """Passes unchecked, gradients gathered, checked and skipped by the program's own hand."""
    model, optimizer = started(level)
    skipped = []
    for number, batch in enumerate(batches(4)):
        spoiled = spoil if number == 1 else None
        backward(model, optimizer, batch, spoiled, delay_overflow_check=True)
        flat = torch.cat([g.flatten() for g in grads_of(optimizer)])
        overflow_buf = torch.tensor([0 if torch.isfinite(flat).all() else 1], dtype=torch.int)
        scaler = amp._amp_state.loss_scalers[0]
        old, scaler._overflow_buf = scaler._overflow_buf, overflow_buf
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = old
        before = copies(amp.master_params(optimizer))
        if not had_overflow:
            optimizer.step()
        elif amp._amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
        for param in model.parameters():
            param.grad = None
        skipped.append(same(before, amp.master_params(optimizer)))
        assert skipped[-1] == had_overflow
    assert skipped == [False, True, False, False]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 2}


def test_a_stream_that_asks_which_module_speaks(monkeypatch):
    class Asking(io.StringIO):
        def write(self, text):
            spoken.append(sys._getframe(1).f_globals["__name__"])
            return len(text)

    spoken = []
    monkeypatch.setattr(_speech, "logger", logging.Logger("apex.amp"))  # without pytest's handlers
    with contextlib.redirect_stdout(Asking()):
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=1)
    assert spoken
    assert all(name.startswith("apex.") for name in spoken)


# -- what is around a loop ------------------------------------------------------------------------


def test_a_forward_replaced_by_a_half_function():
    class Pool(nn.Module):
        def forward(self, x, boxes):
            self.seen = [x.dtype, *[box.dtype for box in boxes]]
            return x

    model = nn.ModuleDict({"roi": Pool(), "head": nn.Linear(2, 2)})
    model.roi.forward = amp.half_function(model.roi.forward)
    model = amp.initialize(model, opt_level="O1", verbosity=0)
    out = model.roi(torch.ones(1, 2), [torch.ones(1, 4)])
    assert model.roi.seen == [torch.float16] * 2
    assert out.dtype == torch.float16
    amp.reset()
    assert model.roi(torch.ones(1, 2), []).dtype == torch.float32


@pytest.mark.usefixtures("_group")
def test_torchs_ddp_before_initialize():
    """After it: see test_ranks.py."""
    model = net()
    plain = Plain(model, sgd, "O1")
    optimizer = sgd(model.parameters())
    model = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"Wrap the model after amp.initialize"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for batch in batches(3):
        train(model, optimizer, [batch])
        plain.step(batch)
    assert same(amp.master_params(optimizer), plain.params)


@pytest.mark.usefixtures("_group")
@SCALED
def test_passes_under_no_sync_that_were_clipped_are_refused(level):
    """The synchronising pass would not reduce what clipping has unscaled."""
    model, optimizer = started(level)
    model = nn.parallel.DistributedDataParallel(model)
    (batch,) = batches(1)
    with model.no_sync():
        for _ in range(2):
            backward(model, optimizer, batch)
            amp.clip_grad_norm_(optimizer, 1.0)
    grads = copies(grads_of(optimizer))
    with pytest.raises(RuntimeError, match=r"no_sync\(\) were unscaled .* Clip and step after"):
        backward(model, optimizer, batch)
    assert same(grads_of(optimizer), grads)
    train(model, optimizer, [batch])


@pytest.mark.usefixtures("_group")
@SCALED
def test_weights_written_before_the_first_forward_in_ddp_stay(level):
    model, optimizer = started(level)
    wrapper = nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    wrapper(next(iter(batches(1)))[0])
    for tensor in (*model.parameters(), *amp.master_params(optimizer)):
        assert torch.equal(tensor, torch.full_like(tensor, 0.25))
