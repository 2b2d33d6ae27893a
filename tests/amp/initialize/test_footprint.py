"""What amp puts on models, optimizers, thread and process."""

import pytest
import torch
import torch.distributed.checkpoint.state_dict
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.amp.training import scaled_backward

LEVELS = ("O0", "O1", "O2")
HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
SPACES = (
    torch,
    torch.Tensor,
    torch.linalg,
    F,
    torch.utils.checkpoint,
    torch.utils.checkpoint.CheckpointFunction,
    torch.distributed.checkpoint.state_dict,
)


TABLE = {  # what there is, and how often at each level
    "model: forward hooks, on the model itself": (2, 2, 2),
    "model: guards on layers, until its first forward": (0, 0, 10),
    "model: state-dict and loading hooks, on each layer": (0, 0, 30),
    "model: weights cast to 16 bits": (0, 0, 20),
    "optimizer: methods replaced on the instance": (3, 3, 3),
    "optimizer: attributes added": (3, 3, 4),
    "optimizer: group entries replaced by masters": (0, 0, 20),
    "thread: device types with autocast switched on": (0, 1, 0),
    "process: kernels under torch's AutocastCPU key": (0, 108, 0),
    "process: functions wrapped": (0, 11, 7),
    "process: attributes set on _amp_state": (4, 5, 4),
}


def snapshot(model, optimizer):
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    return {
        "hooks": {
            (id(module), name, key)
            for module in model.modules()
            for name in HOOKS
            for key in getattr(module, name)
        },
        "half": {id(p) for p in model.parameters() if p.dtype == torch.float16},
        "attributes": set(vars(optimizer)),
        "params": {id(p) for group in optimizer.param_groups for p in group["params"]},
        "autocast": {"cpu"} if torch.is_autocast_enabled("cpu") else set(),
        "kernels": set(kernels),
        "functions": {(s, name, id(value)) for s in SPACES for name, value in vars(s).items()},
        "state": set(vars(amp._amp_state)),
        "modes": {torch.overrides._len_torch_function_stack()},
    }


def counted(model, optimizer, before):
    after = snapshot(model, optimizer)
    new = {name: after[name] - before[name] for name in after}
    forward = {hook for hook in new["hooks"] if "forward" in hook[1]}
    guards = {hook for hook in forward if hook[0] != id(model)}
    methods = {name for name in new["attributes"] if hasattr(type(optimizer), name)}
    assert not new["modes"]
    return {
        "model: forward hooks, on the model itself": len(forward - guards),
        "model: guards on layers, until its first forward": len(guards),
        "model: state-dict and loading hooks, on each layer": len(new["hooks"] - forward),
        "model: weights cast to 16 bits": len(new["half"]),
        "optimizer: methods replaced on the instance": len(methods),
        "optimizer: attributes added": len(new["attributes"] - methods),
        "optimizer: group entries replaced by masters": len(new["params"]),
        "thread: device types with autocast switched on": len(new["autocast"]),
        "process: kernels under torch's AutocastCPU key": len(new["kernels"]),
        "process: functions wrapped": len(new["functions"]),
        "process: attributes set on _amp_state": len(new["state"]),
    }


@pytest.mark.parametrize("level", LEVELS)
def test_the_table_is_what_is_found_and_reset_takes_all_of_it_off(level):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = snapshot(model, optimizer)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    column = LEVELS.index(level)
    assert counted(model, optimizer, before) == {n: row[column] for n, row in TABLE.items()}
    scaled_backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    optimizer.step()
    amp.reset()
    assert snapshot(model, optimizer) == before
    assert set(optimizer.state) == set(model.parameters())
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_what_ends_with_a_later_initialize(level):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, optimizer)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.initialize(model, optimizer, enabled=False)
    left = {name for name, count in counted(model, optimizer, before).items() if count}
    assert left <= {name for name in TABLE if name.startswith("process:")}


def test_o1_wraps_eleven_functions_of_torch_and_leaves_the_rest_alone():
    spaces = (*SPACES, torch.nn.modules.rnn._VF)
    before = {(space, name): value for space in spaces for name, value in vars(space).items()}
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    after = {(space, name): value for space in spaces for name, value in vars(space).items()}
    recompute = torch.utils.checkpoint
    assert {key for key, value in after.items() if before.get(key) is not value} == {
        (F, "binary_cross_entropy"),
        (F, "grid_sample"),
        (F, "interpolate"),
        (F, "local_response_norm"),
        (F, "multilabel_soft_margin_loss"),
        (torch, "matrix_exp"),
        (torch.linalg, "matrix_exp"),
        (torch.Tensor, "cpu"),
        (torch.Tensor, "matrix_exp"),
        (recompute, "_checkpoint_without_reentrant_generator"),
        (recompute.CheckpointFunction, "forward"),
    }
