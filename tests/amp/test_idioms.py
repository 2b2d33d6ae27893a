"""How public programs call amp: the shapes of their calls, typed as they type them.

Most of it is shown by the files on each subject; here is what only a client would write.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex
import apex.amp._amp_state
from apex import amp
from apex.amp import _speech
from tests.amp.hand import Hand, batches, net, same

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def sgd(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr)


def start(level, **kwargs):
    model = net()
    hand = Hand(model, sgd, level)
    optimizer = sgd(model.parameters())
    return *amp.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs), hand


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
    model = net()
    model, optimizer = amp.initialize(
        model,
        sgd(model.parameters()),
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=0,
    )
    assert model[1].weight.dtype == (torch.float32 if kept else torch.float16)
    options = amp._amp_state.opt_properties
    assert options.loss_scale == scale
    assert type(options.loss_scale) is type(scale)


@pytest.mark.parametrize("scale", ["dynamic", 128.0, 128, "128", 1, True])
@pytest.mark.parametrize("level", LEVELS)
def test_every_kind_of_loss_scale(level, scale):
    model = net()
    optimizer = sgd(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, verbosity=0
    )
    expected = 65536.0 if scale == "dynamic" else float(scale)
    assert amp._amp_state.loss_scalers[0].loss_scale() == expected


def test_arguments_kept_in_a_dict():
    amp_args = {"opt_level": "O2", "loss_scale": 64.0, "keep_batchnorm_fp32": None, "verbosity": 0}
    model = net()
    model, optimizer = amp.initialize(model, sgd(model.parameters()), **amp_args)
    assert amp._amp_state.opt_properties.options["master_weights"] is True


@pytest.mark.parametrize("level", LEVELS)
def test_every_documented_argument_at_once(level):
    model = net()
    optimizer = sgd(model.parameters())
    got = amp.initialize(
        models=model,
        optimizers=optimizer,
        enabled=True,
        opt_level=level,
        cast_model_type=None,
        patch_torch_functions=None,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale=None,
        cast_model_outputs=None,
        num_losses=1,
        verbosity=0,
        min_loss_scale=None,
        max_loss_scale=2.0**24,
    )
    assert got == (model, optimizer)
    assert hasattr(optimizer, "_amp_stash")  # the marker of programs that initialise late


def test_a_list_of_one_model_comes_back_as_that_list():
    models = [net()]
    optimizer = sgd(models[0].parameters())
    [model], optimizer = amp.initialize(models, optimizer, opt_level="O1", verbosity=0)
    assert model is models[0]


@pytest.mark.parametrize("flag", [True, False])
def test_one_program_with_a_switch(flag):
    model = net()
    hand = Hand(model, sgd, "O2" if flag else "O0")
    optimizer = sgd(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, enabled=flag, opt_level="O2", verbosity=0)
    for x, y in batches(3):
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer, delay_unscale=False) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        hand.backward(hand.loss(x, y))
        torch.nn.utils.clip_grad_norm_(hand.params, 1.0)
        hand.step()
        hand.zero_grad()
    assert same(amp.master_params(optimizer), hand.params)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_gan_with_a_scaler_for_each_of_three_losses(level):
    torch.manual_seed(0)
    net_g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net_d = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    opt_g, opt_d = (torch.optim.Adam(n.parameters(), lr=1e-2) for n in (net_g, net_d))
    [net_d, net_g], [opt_d, opt_g] = amp.initialize(
        [net_d, net_g], [opt_d, opt_g], opt_level=level, num_losses=3, verbosity=0
    )
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros, steps = torch.ones(16, 1), torch.zeros(16, 1), 4
    for _ in range(steps):
        opt_d.zero_grad()
        err_real = criterion(net_d(torch.randn(16, 2)), ones)
        with amp.scale_loss(err_real, opt_d, loss_id=0) as err_real_scaled:
            err_real_scaled.backward()
        fake = net_g(torch.randn(16, 4))
        err_fake = criterion(net_d(fake.detach()), zeros)
        with amp.scale_loss(err_fake, opt_d, loss_id=1) as err_fake_scaled:
            err_fake_scaled.backward()
        opt_d.step()

        before = [p.detach().clone() for p in net_d.parameters()]
        opt_g.zero_grad()
        err_g = criterion(net_d(fake), ones)
        with amp.scale_loss(err_g, opt_g, 2) as err_g_scaled:  # its id as third argument
            err_g_scaled.backward()
        opt_g.step()
        assert same(before, net_d.parameters())
    counts = [entry["unskipped"] for entry in amp.state_dict().values()]
    assert counts == ([steps] * 3 if level in ("O1", "O2") else [0] * 3)


# -- scale_loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_one_name_for_the_loss_and_the_scaled_loss(level):
    model, optimizer, hand = start(level)
    for x, y in batches(2):
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hand.backward(hand.loss(x, y))
        hand.step()
        hand.zero_grad()
    assert same(amp.master_params(optimizer), hand.params)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_two_backward_passes_through_one_graph(level):
    model, optimizer, _ = start(level)
    ((x, y),) = batches(1)
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in amp.master_params(optimizer)]
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert same([p.grad for p in amp.master_params(optimizer)], [2 * g for g in once])


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_penalty_by_create_graph(level):
    """The penalty is added to the loss; its own backward needs no graph."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = amp.initialize(
        model, sgd(model.parameters()), opt_level=level, loss_scale=8.0, verbosity=0
    )
    x = torch.ones(1, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    with amp.scale_loss(gradient.square().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad.float(), torch.full((1, 2), 2.0))
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # torch advises against
@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_on_gradients_is_refused_where_they_are_unscaled(level):
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = amp.initialize(
        model, sgd(model.parameters()), opt_level=level, loss_scale=8.0, verbosity=0
    )
    before = model.weight.detach().clone()
    loss = model(torch.ones(1, 2)).float().square().sum()
    with (
        pytest.raises(RuntimeError, match="does not unscale their graph"),
        amp.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward(create_graph=True)
    assert model.weight.grad is None
    optimizer.step()
    assert torch.equal(model.weight, before)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("which", [amp.master_params, params_of], ids=["master_params", "groups"])
def test_clipping_after_the_block(level, which, overflow):
    model, optimizer, hand = start(level)
    overflow = overflow and level in ("O1", "O2")

    def spoil(model):
        if overflow:
            model[4].weight.grad[0, 0] = math.inf

    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
        spoil(model)
    norm = torch.nn.utils.clip_grad_norm_(which(optimizer), 0.25)
    optimizer.step()
    hand.backward(hand.loss(x, y), spoil)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(hand.params, 0.25))
    hand.step()
    assert torch.isfinite(norm) != overflow
    assert same(amp.master_params(optimizer), hand.params)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_clipping_the_models_own_gradients_is_right_where_they_are_the_masters(level):
    model, optimizer, hand = start(level)
    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    hand.backward(hand.loss(x, y))
    torch.nn.utils.clip_grad_norm_(hand.params, 0.25)
    hand.step()
    assert same(amp.master_params(optimizer), hand.params)


def test_clipping_inside_the_block_meets_scaled_gradients():
    """Wrong, but common: the scaled norm is clipped, so the step is that much smaller."""
    model, optimizer, _ = start("O1", loss_scale=128.0)
    ((x, y),) = batches(1)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
        for copy, param in zip(expected, model.parameters(), strict=True):
            copy.grad = param.grad.clone()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    torch.nn.utils.clip_grad_norm_(expected, 1.0)
    assert same([p.grad for p in model.parameters()], [copy.grad / 128 for copy in expected])
    optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_accumulation_with_delay_unscale_and_a_step_before_everything(level):
    """A hack of three popular programs: a step first of all, and delay_unscale between steps."""
    model, optimizer, _ = start(level, loss_scale=128.0)
    model.eval()
    optimizer.zero_grad()
    optimizer.step()
    ((x, y),) = batches(1)
    accumulation, before = 2, [p.clone() for p in amp.master_params(optimizer)]
    for number in range(accumulation):
        delay_unscale = (number + 1) % accumulation != 0
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale) as scaled_loss:
            scaled_loss.backward()
    grads = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    assert same(grads, [2 * p.grad for p in amp.master_params(optimizer)])
    optimizer.step()
    assert not same(before, amp.master_params(optimizer))


# -- private names --------------------------------------------------------------------------------


def test_scale_written_right_after_initialize():
    model, optimizer, _ = start("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    assert apex.amp._amp_state.loss_scalers[0].loss_scale() == 2.0**20
    scaler = apex.amp._amp_state.loss_scalers[0]  # after ``import apex.amp._amp_state``
    scaler._loss_scale, scaler._scale_seq_len = 1024.0, 1
    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == [2048.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_program_that_reduces_and_checks_gradients_itself(level):
    """Passes unchecked, gradients gathered, checked and skipped by the program's own hand."""
    model, optimizer, _ = start(level)
    skipped = []
    for number, (x, y) in enumerate(batches(4)):
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
            if number == 1:
                model[0].weight.grad[0] = math.inf
        grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        overflow_buf = torch.tensor([0 if torch.isfinite(flat).all() else 1], dtype=torch.int)
        scaler = amp._amp_state.loss_scalers[0]
        old, scaler._overflow_buf = scaler._overflow_buf, overflow_buf
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = old
        before = [p.clone() for p in amp.master_params(optimizer)]
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


def test_how_programs_look_for_amp():
    assert "state_dict" in amp.__dict__
    assert list(amp.__path__)
    assert importlib.util.find_spec("apex")
    assert importlib.util.find_spec("apex.amp")
    assert apex.amp is amp
    assert callable(amp._initialize.applier)


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


def test_the_handle_of_2018_between_training_and_evaluation():
    amp_handle = amp.init(enabled=True)
    model = net()
    optimizer = amp_handle.wrap_optimizer(sgd(model.parameters()), num_loss=1)
    for x, y in batches(2):
        optimizer.zero_grad()
        with optimizer.scale_loss(F.cross_entropy(model(x), y)) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        amp_handle._clear_cache()
        with torch.no_grad():
            assert model(x).dtype == torch.float16


@pytest.fixture
def _group():
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("first", ["initialize", "wrap"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_torchs_ddp_before_and_after(level, first):
    model = net()
    hand = Hand(model, sgd, level)
    optimizer = sgd(model.parameters())
    if first == "wrap":
        model = nn.parallel.DistributedDataParallel(model)
        if level in ("O2", "O5"):
            with pytest.raises(RuntimeError, match=r"Wrap it after amp.initialize"):
                amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            return
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if first == "initialize":
        model = nn.parallel.DistributedDataParallel(model)
    for x, y in batches(3):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        hand.zero_grad()
        hand.backward(hand.loss(x, y))
        hand.step()
    assert same(amp.master_params(optimizer), hand.params)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_passes_under_no_sync_that_were_clipped_are_refused(level):
    """The synchronising pass would not reduce what clipping has unscaled."""
    optimizer = sgd((model := net()).parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model = nn.parallel.DistributedDataParallel(model)
    (x, y) = next(iter(batches(1)))

    def block():
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
            scaled_loss.backward()

    with model.no_sync():
        for _ in range(2):
            block()
            amp.clip_grad_norm_(optimizer, 1.0)
    grads = [p.grad.clone() for p in amp.master_params(optimizer)]
    with pytest.raises(RuntimeError, match=r"no_sync\(\) were unscaled .* Clip and step after"):
        block()
    assert same([p.grad for p in amp.master_params(optimizer)], grads)
    optimizer.zero_grad()
    block()
    optimizer.step()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_weights_written_before_the_first_forward_in_ddp_stay(level):
    model = net()
    optimizer = sgd(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapper = nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    wrapper(next(iter(batches(1)))[0])
    for tensor in (*model.parameters(), *amp.master_params(optimizer)):
        assert torch.equal(tensor, torch.full_like(tensor, 0.25))
