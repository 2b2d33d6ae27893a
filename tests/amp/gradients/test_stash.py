"""Gradients from before a block: tensors of the program, parts of a buffer, a flat parameter's."""

import contextlib

import pytest
import torch
from torch import nn

from apex import amp
from tests.amp import training
from tests.amp.training import scaled_backward, sgd, started

FLOAT32 = ["O0", "O1", "O4"]
CAST = ["O2", "O3", "O5"]
SCALE = 8.0


def ones(shape=(2, 4)):
    """A layer whose weights and inputs are ones."""
    model = nn.Linear(shape[1], shape[0])
    for weight in model.parameters():
        nn.init.ones_(weight)
    return model


def start(level, model, params=None, **options):
    optimizer = sgd(model.parameters() if params is None else params, lr=0.25)
    return started(level, model, optimizer, **{"loss_scale": SCALE, **options})[1]


def backward(model, optimizer, factor=1.0, **options):
    scaled_backward(factor * model(torch.ones(1, 4)).float().sum(), optimizer, **options)


def buffer_of(model, dtype=None):
    """A tensor of zeros whose parts are the gradients of the weights."""
    sizes = [weight.numel() for weight in model.parameters()]
    buffer = torch.zeros(sum(sizes), dtype=dtype)
    for weight, part in zip(model.parameters(), buffer.split(sizes), strict=True):
        weight.grad = part.view(weight.shape)
    return buffer


# -- tensors of the program -------------------------------------------------------------------


@pytest.mark.parametrize("level", FLOAT32)
def test_a_gradient_stays_the_tensor_that_it_was(level):
    model = ones()
    optimizer = start(level, model)
    backward(model, optimizer)
    tensors = [weight.grad for weight in model.parameters()]
    for factor, total in ((2.0, 3.0), (-1.0, 2.0)):
        backward(model, optimizer, factor, delay_unscale=factor < 0)
        amp.clip_grad_value_(optimizer, 100.0)
        assert all(w.grad is grad for w, grad in zip(model.parameters(), tensors, strict=True))
        assert all(torch.equal(grad, torch.full_like(grad, total)) for grad in tensors)


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("level", FLOAT32)
def test_one_tensor_is_the_gradient_of_two_weights(level, is_part):
    model = nn.ModuleList([ones(), ones()])
    optimizer = start(level, model)
    first, second = model[0].weight, model[1].weight
    first.grad = second.grad = torch.full((2 + is_part, 4), 3.0)[:2]
    scaled_backward((first + 2 * second).sum(), optimizer)
    assert torch.equal(first.grad, torch.full_like(first, 4.0))
    assert torch.equal(second.grad, torch.full_like(second, 5.0))


@pytest.mark.parametrize("how", ["delayed", "raises"])
@pytest.mark.parametrize("level", FLOAT32)
def test_parts_of_a_buffer(level, how):
    """The buffer has what the program sees in torch: the sum, or after an error what was there."""
    model = ones()
    optimizer = start(level, model)
    buffer = buffer_of(model)
    parts = [weight.grad for weight in model.parameters()]
    backward(model, optimizer)
    assert buffer.tolist() == [1.0] * 10
    if how == "delayed":
        backward(model, optimizer, delay_unscale=True)
        backward(model, optimizer, 2.0)
    else:
        loss = model(torch.ones(1, 4)).float().sum()
        with contextlib.suppress(KeyError), amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            raise KeyError
    assert buffer.tolist() == [4.0 if how == "delayed" else 1.0] * 10
    assert all(w.grad is part for w, part in zip(model.parameters(), parts, strict=True))
    buffer.mul_(0.5)
    optimizer.step()
    assert model.bias.tolist() == [0.5 if how == "delayed" else 0.875] * 2
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer):
        pass  # no warning that gradients are not of the scaled loss: there are none


@pytest.mark.parametrize("level", FLOAT32)
def test_a_buffer_after_a_skipped_step(level):
    model = ones()
    optimizer = start(level, model, loss_scale="dynamic", init_scale=8.0)
    buffer = buffer_of(model)
    backward(model, optimizer, torch.inf)
    optimizer.step()
    assert not amp.stepped(optimizer)
    assert not buffer.isfinite().any()
    backward(model, optimizer)
    assert buffer.tolist() == [1.0] * 10


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parts_of_a_buffer_that_masters_replace(level):
    model = ones()
    optimizer = start(level, model)
    buffer = buffer_of(model, model.weight.dtype)
    with pytest.warns(UserWarning, match=r"part of a larger tensor.*no longer is") as seen:
        backward(model, optimizer)
    assert seen[0].filename == training.__file__  # where scale_loss is called
    buffer_of(model, model.weight.dtype)
    backward(model, optimizer)  # no second warning
    assert buffer.tolist() == [0.0] * 10
    assert [p.grad.unique().tolist() for p in amp.master_params(optimizer)] == [[2.0], [2.0]]


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_buckets_of_torchs_ddp(level, is_view):
    """One of which is all of a gradient: the next backward writes to it."""
    model = nn.Linear(4, 2, bias=False)
    optimizer = start(level, model)
    wrapper = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=is_view)
    for factor in (1.0, 2.0, 4.0):
        backward(wrapper, optimizer, factor)
    (param,) = amp.master_params(optimizer)
    assert torch.equal(param.grad, torch.full_like(param, 7.0))


# -- a flat parameter ------------------------------------------------------------------------------


def flattened(model):
    """A parameter with the memory of all weights, and their gradients."""
    weights = list(model.parameters())
    flat = nn.Parameter(torch.cat([weight.detach().flatten() for weight in weights]))
    sizes = [weight.numel() for weight in weights]
    for weight, part in zip(weights, flat.data.split(sizes), strict=True):
        weight.data = part.view(weight.shape)
    flat.grad = buffer_of(model)
    return flat


@pytest.mark.parametrize("level", FLOAT32)
def test_an_optimizer_of_one_flat_parameter(level):
    model = ones()
    flat = flattened(model)
    optimizer = start(level, model, [flat], loss_scale="dynamic", init_scale=8.0)
    backward(model, optimizer)
    backward(model, optimizer, 2.0)
    assert flat.grad.tolist() == [3.0] * 10
    optimizer.step()
    assert model.bias.tolist() == [0.25] * 2
    optimizer.zero_grad(set_to_none=False)
    backward(model, optimizer, torch.inf)
    optimizer.step()
    assert not amp.stepped(optimizer)
    backward(model, optimizer)
    optimizer.step()
    assert flat.tolist() == [0.0] * 10


@pytest.mark.parametrize("has_version", [True, False])
def test_a_flat_parameter_under_init(has_version):
    """Writes to parts of ``.grad.data`` change no version of ``.grad``."""
    model = ones()
    flat = flattened(model)
    if not has_version:
        for weight in model.parameters():
            weight.grad = weight.grad.data
    optimizer = sgd([flat], lr=0.25)
    handle = amp.init(loss_scale=SCALE)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        with handle.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizer) as scaled:
            scaled.backward()
        assert flat.grad.tolist() == [1.0] * 10
        optimizer.step()
    assert flat.tolist() == [0.5] * 10


@pytest.mark.parametrize("level", FLOAT32)
def test_a_flat_parameter_that_is_the_models_too_is_refused(level):
    """amp takes its gradient aside, as that of any weight, and the others are parts of it."""
    model = ones()
    flat = flattened(model)
    model.register_parameter("flat", flat)
    optimizer = start(level, model, [flat])
    with pytest.raises(RuntimeError, match=r"shape \(10,\).*shared with other weights"):
        backward(model, optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert flat.tolist() == [1.0] * 10


@pytest.mark.parametrize("level", CAST)
def test_a_flat_parameter_of_a_model_that_is_cast_is_refused_after_ten_steps(level):
    model = ones()
    optimizer = start(level, model, [flattened(model)])
    for _ in range(9):
        backward(model, optimizer)
        optimizer.step()
    backward(model, optimizer)
    with pytest.raises(RuntimeError, match="SGD has none of the model's weights.*freeze it"):
        optimizer.step()


@pytest.mark.parametrize("level", CAST)
def test_that_is_so_where_the_program_copies_gradients_into_the_flat_one(level):
    model = ones()
    optimizer = start(level, model, [flat := flattened(model)])
    for number in range(10):
        backward(model, optimizer)
        flat.grad = torch.cat([weight.grad.float().flatten() for weight in model.parameters()])
        if number < 9:
            optimizer.step()
    with pytest.raises(RuntimeError, match="SGD has none of the model's weights.*freeze it"):
        optimizer.step()


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("why", ["not frozen", "frozen", "stepped by another", "stepped by hand"])
def test_an_optimizer_of_inputs_alone(level, why):
    """Style transfer, inversion and prompt tuning often leave the model as it is."""
    model = ones()
    inputs = nn.Parameter(torch.ones(1, 4))
    optimizers = [sgd([inputs])]
    if why == "frozen":
        model.requires_grad_(False)
    elif why == "stepped by another":
        optimizers.append(sgd(model.parameters(), lr=0.0))
    amp.initialize(model, optimizers, opt_level=level, loss_scale=SCALE, verbosity=0)
    for _ in range(11):
        scaled_backward(model(inputs).float().sum(), optimizers)
        for optimizer in optimizers:
            optimizer.step()
        if why == "stepped by hand":
            with torch.no_grad():
                model.weight -= 0.125
    assert inputs.grad.any()
