"""Random programs, each run with our optimizer and with that of ``torch.optim``, step for step.

A program makes groups with hyperparameters of their own, steps on gradients (of some parameters, of
zeros), changes hyperparameters, adds groups, reloads, pickles and copies the optimizer, and hands
the state of ours to torch's and that of torch's to ours.
"""

import copy
import pickle
import random

import pytest
import torch

from apex.optimizers import FusedAdagrad, FusedAdam, FusedSGD
from tests.optimizers.common import on
from tests.tolerance import RANDOM_PROGRAM, assert_close_to_largest

SHAPES = ((), (7,), (0,), (5, 3), (33, 5))
KINDS = {
    "SGD": (FusedSGD, torch.optim.SGD, {}),
    "Adam": (FusedAdam, torch.optim.Adam, {"adam_w_mode": False}),
    "AdamW": (FusedAdam, torch.optim.AdamW, {}),
    "Adagrad": (FusedAdagrad, torch.optim.Adagrad, {}),
}


class Program:
    """Two optimizers that have to agree, and what is done to both."""

    def __init__(self, kind, seed, path):
        self.random = random.Random(f"{kind} {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.ours_kind, self.torch_kind, self.options = KINDS[kind]
        self.kind, self.path, self.log = kind, path, []
        groups = [self.group() for _ in range(self.random.randint(1, 3))]
        groups[0]["params"].append(torch.nn.Parameter(torch.ones(3)))  # some weight has elements
        self.ours, self.theirs = (
            self.made(groups),
            self.made(copy.deepcopy(groups), self.torch_kind),
        )

    def made(self, groups, kind=None):
        """An optimizer with the given groups, ours by default."""
        options = self.options if kind is None else {"foreach": False}
        return (kind or self.ours_kind)(groups, lr=0.1, **options)

    def hyperparameters(self, dampening):
        pick = self.random.choice
        numbers = {"lr": pick([0.01, 0.05, 0.2]), "weight_decay": pick([0.0, 0.1])}
        if self.kind == "SGD":
            momentum = pick([0.5, 0.9] if dampening else [0.0, 0.5, 0.9])
            nesterov = momentum > 0 and not dampening and pick([False, True])
            numbers |= {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        else:
            numbers["eps"] = pick([1e-6, 1e-3])
        if "Adam" in self.kind:
            numbers["betas"] = pick([(0.9, 0.999), (0.5, 0.7)])
        return numbers

    def group(self):
        shapes = self.random.choices(SHAPES, k=self.random.randint(1, 4))
        made = [torch.randn(shape, generator=self.generator) for shape in shapes]
        return {
            "params": [*map(torch.nn.Parameter, made)],
            **self.hyperparameters(self.random.choice([0.0, 0.3])),
        }

    # -- what a program does -----------------------------------------------------------------------

    def step(self):
        """Adam counts the steps of a group here, and of a weight in torch: all have gradients."""
        for ours, theirs in zip(self.ours.param_groups, self.theirs.param_groups, strict=True):
            for left, right in zip(ours["params"], theirs["params"], strict=True):
                has, scale = self.random.random() < 0.8, self.random.choice([0.0, 1.0, 1.0])
                gradient = scale * torch.randn(left.shape, generator=self.generator)
                wanted = has or "Adam" in self.kind
                left.grad, right.grad = (gradient.clone() if wanted else None for _ in range(2))
        with on(self.path):
            self.ours.step()
        self.theirs.step()

    def change(self):
        at = self.random.randrange(len(self.ours.param_groups))
        numbers = self.hyperparameters(self.ours.param_groups[at].get("dampening"))
        for optimizer in (self.ours, self.theirs):
            optimizer.param_groups[at].update(numbers)

    def add(self):
        group = self.group()
        self.theirs.add_param_group(copy.deepcopy(group))
        if self.kind == "Adagrad":  # torch 2.9 makes no state of a group that is added
            for weight in self.theirs.param_groups[-1]["params"]:
                zeros = {"step": torch.tensor(0.0), "sum": torch.zeros_like(weight)}
                self.theirs.state[weight] = self.theirs.state.get(weight) or zeros
        self.ours.add_param_group(group)

    def reload(self):
        """Into new optimizers of the same weights."""
        ours, theirs = (pickle.dumps(o.state_dict()) for o in (self.ours, self.theirs))
        self.renew()
        self.ours.load_state_dict(pickle.loads(ours))
        self.theirs.load_state_dict(pickle.loads(theirs))

    def convert(self):
        """Each goes on with the other's state."""
        ours, theirs = self.ours.torch_state_dict(), copy.deepcopy(self.theirs.state_dict())
        self.renew()
        self.ours.load_state_dict(theirs)
        self.theirs.load_state_dict(ours)

    def renew(self):
        groups = [
            [{"params": group["params"]} for group in optimizer.param_groups]
            for optimizer in (self.ours, self.theirs)
        ]
        self.ours, self.theirs = self.made(groups[0]), self.made(groups[1], self.torch_kind)

    def pickle(self):
        self.ours, self.theirs = pickle.loads(pickle.dumps((self.ours, self.theirs)))

    def deepcopy(self):
        before, (self.ours, self.theirs) = self.ours, copy.deepcopy((self.ours, self.theirs))
        for group in before.param_groups:  # what is left of the original must not matter
            for weight in group["params"]:
                weight.data.zero_()
                for slot in before.state.get(weight, {}).values():
                    slot.zero_()

    def run(self, actions):
        others = ["change", "add", "reload", "convert", "pickle", "deepcopy"]
        for _ in range(actions):
            self.log.append(self.random.choice(["step"] * len(others) + others))
            getattr(self, self.log[-1])()
            ours, theirs = (
                torch.cat([w.detach().flatten() for g in o.param_groups for w in g["params"]])
                for o in (self.ours, self.theirs)
            )
            assert_close_to_largest(ours, theirs, RANDOM_PROGRAM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "seeds", "actions"), [(None, 10, 20), ("triton", 2, 8)], ids=["CPU", "triton"]
)
def test_random_programs_equal_torchs(kind, path, seeds, actions):
    for seed in range(seeds):
        program = Program(kind, seed, path)
        try:
            program.run(actions)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {', '.join(program.log)}") from error
