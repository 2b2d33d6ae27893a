"""What each of four ranks saves and loads in :mod:`tests.optimizers.test_shards`."""

import functools

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from apex.contrib import optimizers as contrib
from apex.ops.lists.storage import AUTO, STORAGES
from apex.ops.lists.tensor_lists import local
from apex.optimizers import FusedSGD
from apex.parallel import LARC
from tests import checkpoints
from tests.optimizers.common import EVERY, WITH_MASTERS, on
from tests.optimizers.shard_programs import is_in, mesh, spread
from tests.ranks import error_of

STORED = {  # every optimizer with every storage, and those with masters
    **{
        f"{name}, {storage}": functools.partial(make, storage=storage)
        for name, make in EVERY.items()
        for storage in (*STORAGES, AUTO)
    },
    **{
        f"{make.__name__}, masters": functools.partial(make, lr=0.02, **options)
        for make, options in WITH_MASTERS.items()
    },
    "LARC, plain": lambda params: LARC(FusedSGD(params, lr=0.5, momentum=0.9, weight_decay=0.1)),
    "contrib.FusedAdam, plain": lambda params: contrib.FusedAdam(params, lr=0.02),
    "contrib.FusedLAMB, plain": lambda params: contrib.FusedLAMB(params, lr=0.02),
}


class Training:
    """Of a model that is placed as in ``PLACED``, or whole for ``None``."""

    def __init__(self, case, name):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)).bfloat16()
        self.case = case
        for module in self.model if case is not None else ():
            for key, param in [*module.named_parameters()]:
                setattr(module, key, nn.Parameter(spread(param.detach(), case)))
        self.optimizer = STORED[name](self.model.parameters())

    def step(self, *seeds):
        """By the definition: torch's kernels round the last elements of a tensor otherwise."""
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for param in self.model.parameters():
                grad = torch.randn(param.shape, generator=generator).bfloat16()
                param.grad = grad if self.case is None else spread(grad, self.case)
            with on("reference"):
                self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        return checkpoints.parts(self.model, self.optimizer)

    def load(self, state):
        checkpoints.put(self.model, self.optimizer, state)

    def tensors(self):
        """All weights and states by name; and steps."""
        found = {}
        for name, param in self.model.named_parameters():
            for key, value in {"": param.detach(), **self.optimizer.state[param]}.items():
                is_tensor = isinstance(value, torch.Tensor)  # or a step
                found[f"{name} {key}"] = value if is_tensor else torch.tensor(value)
        steps = [group.get("step", 0) for group in self.optimizer.param_groups]
        found["steps"] = torch.tensor([*map(int, steps)])
        return dict(sorted(found.items()))

    def whole(self):
        """The same, gathered."""
        found = self.tensors()
        for key, value in found.items():
            wide = value.int() if value.dtype == torch.int16 else value  # which gloo does not send
            wide = getattr(wide, "full_tensor", lambda wide=wide: wide)()
            found[key] = wide.to(value.dtype).clone()
        return found

    def beside(self, wanted):
        """The local parts of the same, and of whole tensors."""
        found = self.tensors()
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            exact = wanted[key]
            if isinstance(value, DTensor):
                value = value.to_local()
                exact = spread(exact, self.case).to_local() if exact.dim() else exact
            found[key] = value.clone(), exact
        return found


def other_states(rank, name):
    """Messages for states of other shards, and of whole tensors; and whether nothing changed."""
    training = Training("rows", name)
    training.step(1)
    before = [x.clone() for x in map(local, training.tensors().values())]
    found = []
    for case in ("HSDP", "columns", None):
        other = Training(case, name)
        other.step(1)
        found.append(error_of(training.optimizer.load_state_dict, other.optimizer.state_dict()))
    after = [*map(local, training.tensors().values())]
    return found, all(map(torch.equal, before, after))


def gathered(rank, name):
    """Local parts of a training that goes on, and of one with its state, which rank 0 gathered."""
    gathers = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spreads = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    one, other = Training("rows", name), Training("rows", name)
    one.step(1, 2)
    weights = get_model_state_dict(one.model, options=gathers)
    states = get_optimizer_state_dict(one.model, one.optimizer, options=gathers)
    set_model_state_dict(other.model, weights, options=spreads)
    set_optimizer_state_dict(other.model, other.optimizer, states, options=spreads)
    found = []
    for training in (one, other):
        training.step(3)
        found.append([*map(local, training.tensors().values())])
    return found


def converted(rank, folder):
    """The same with low bits, through a file of whole tensors; and why rank 0 cannot gather."""
    one, other = (Training("rows", "FusedAdam, low_bits") for _ in range(2))
    one.step(1, 2)
    gathers = StateDictOptions(full_state_dict=True)
    said = error_of(get_optimizer_state_dict, one.model, one.optimizer, options=gathers)
    checkpoint.save(one.state(), checkpoint_id=folder / "shards")
    if rank == 0:
        dcp_to_torch_save(folder / "shards", folder / "whole.pt")
        torch_save_to_dcp(folder / "whole.pt", folder / "again")
    torch.distributed.barrier()
    state = other.state()
    checkpoint.load(state, checkpoint_id=folder / "again")
    other.load(state)
    found = []
    for training in (one, other):
        training.step(3)
        found.append([*map(local, training.tensors().values())])
    return said, found


def trainings(rank, case, names):
    """One for each name on ranks that have a part, and options for DCP."""
    if not is_in(rank, case):
        return {}, {}
    options = {"no_dist": True} if case is None else {}
    if case == "two ranks":
        options = {"process_group": mesh("two").get_group()}
    return {name: Training(case, name) for name in names}, options


def stepped_and_saved(rank, case, names, folder=None):
    """Whole tensors after two steps, which are saved, and after the next one."""
    every, options = trainings(rank, case, names)
    for training in every.values():
        training.step(1, 2)
    if every and folder is not None:
        state = {name: training.state() for name, training in every.items()}
        checkpoint.save(state, checkpoint_id=folder, **options)
    found = {}
    for name, training in every.items():
        before = training.whole()
        training.step(3)
        found[name] = before, training.whole()
    return found


def loaded(rank, case, saved, folder):
    """Local parts of the same where it is loaded, each with what it should be."""
    every, options = trainings(rank, case, saved)
    if every:
        state = {name: training.state() for name, training in every.items()}
        checkpoint.load(state, checkpoint_id=folder, **options)
    found = {}
    for name, training in every.items():
        before, after = saved[name]
        training.load(state[name])
        here = training.beside(before)
        training.step(3)
        found[name] = here, training.beside(after)
    return found
