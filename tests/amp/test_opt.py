"""The 2018 handles: ``amp.init``, ``handle.scale_loss``, ``wrap_optimizer``."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.handle import AmpHandle, NoOpHandle
from apex.amp.opt import OptimWrapper


def start():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), torch.ones(2, 3)


def test_one_optimizer_one_loss():
    model, optimizer, x = start()
    handle = amp.init()
    assert isinstance(handle, AmpHandle)
    out = model(x)
    assert out.dtype == torch.float16
    with handle.scale_loss(out.float().mean(), optimizer) as scaled:
        scaled.backward()
    assert torch.equal(model.bias.grad, torch.full((2,), 0.5))
    optimizer.step()
    with handle.scale_loss(model(x).float().mean(), optimizer) as scaled:
        scaled.backward()
        model.bias.grad[0] = math.nan
    before = model.weight.clone()
    optimizer.step()
    assert torch.equal(before, model.weight)
    handle._deactivate()
    assert model(x).dtype == torch.float32
    assert not handle.is_active()


def test_several_losses_have_a_scaler_each():
    model, optimizer, x = start()
    handle = amp.init(enabled=True)
    optimizer = handle.wrap_optimizer(optimizer, num_loss=2)
    with (
        pytest.raises(RuntimeError, match="wrapped optimizer's own"),
        handle.scale_loss(model(x).mean(), optimizer),
    ):
        pass
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.scale_loss(model(x).float().mean()) as scaled:
            scaled.backward()
        with optimizer.scale_loss(0.5 * model(x).float().mean()) as scaled:
            scaled.backward()
        assert torch.equal(model.bias.grad, torch.full((2,), 0.75))
        with (
            pytest.raises(AssertionError, match="num_loss=2"),
            optimizer.scale_loss(model(x).mean()),
        ):
            pass
        optimizer.step()
    with pytest.raises(NotImplementedError, match="no closure"):
        optimizer.step(lambda: 0.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.param_groups) == 2
    assert "SGD" in repr(optimizer)


@pytest.mark.parametrize("kwargs", [{"enabled": False}, {"enable": False}])
def test_disabled_handle_passes_everything_through(kwargs):
    model, optimizer, x = start()
    handle = amp.init(**kwargs)
    assert isinstance(handle, NoOpHandle)
    assert (handle.is_active(), handle.has_cache, handle.verbose) == (False, False, False)
    loss = F.mse_loss(model(x), torch.zeros(2, 2))
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    assert isinstance(wrapped, OptimWrapper)
    with wrapped.scale_loss(loss) as scaled:
        assert scaled is loss
        scaled.backward()
    wrapped.step()
    with handle._disable_casts():
        pass
    handle._clear_cache()
    handle._deactivate()


def test_what_old_code_reads_off_a_handle():
    handle = amp.init(loss_scale=128.0, enable_caching=False, verbose=False)
    assert (handle.has_cache, handle.verbose, handle.cache) == (False, False, {})
    handle._save_func(torch, "no_such_name", 3)
    handle._deactivate()
    assert torch.no_such_name == 3
    del torch.no_such_name
    handle.remove_cache(nn.Parameter(torch.ones(1)))
    with handle._disable_casts():
        assert not handle.is_active()
