"""Advantage actor-critic (A2C) on CartPole-v1, with ``apex.amp`` and a loss scale for each loss.

Each update takes ``--rollout`` steps in ``--envs`` environments, estimates advantages by GAE
(Schulman et al., 2016) and takes one optimizer step on two losses: the policy's is loss 0, the
value function's is loss 1. A run ends when the task is solved: the last 100 episodes have an
average return of 475, the threshold that gymnasium registers for CartPole-v1.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import report
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
except ModuleNotFoundError:
    raise SystemExit("gymnasium is missing: pip install 'gymnasium>=1.1'") from None

TASK = "CartPole-v1"
EPISODES = 100  # that the average return is taken over
GAMMA, LAMBDA = 0.99, 0.95  # discount, and decay of GAE
ENTROPY = 0.01  # weight of the entropy in the policy's loss
MAX_NORM = 0.5  # of the gradients of both losses


class ActorCritic(nn.Module):
    """Two networks: scores of the actions, and the value of a state."""

    def __init__(self, inputs: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.policy = _network(inputs, width, actions, gain=0.01)  # begins near uniform
        self.value = _network(inputs, width, 1, gain=1.0)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map states ``(..., inputs)`` to scores ``(..., actions)`` and values ``(...)``."""
        return self.policy(states), self.value(states).squeeze(-1)


def _network(inputs: int, width: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)]
    for layer, size in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, size)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Rollout(NamedTuple):
    """What happened in some steps: tensors of (steps, environments), states with one step more."""

    states: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor  # the pole fell
    ended: torch.Tensor  # that, or the limit of 500 steps was reached
    real: torch.Tensor  # 0 where the environment only began a new episode


class Environments:
    """Several environments that advance together, each with episodes of its own."""

    def __init__(self, number: int, seed: int) -> None:
        makers = [lambda: gymnasium.make(TASK)] * number
        # After an episode, the next step ignores the action and begins the next episode. So the
        # last state of an episode is in the rollout, and its value is known.
        self.vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.state = torch.from_numpy(self.vector.reset(seed=seed)[0])
        self.ended = torch.zeros(number, dtype=torch.bool)
        self.sums = torch.zeros(number)  # rewards of the episodes that run
        self.steps = 0  # of all environments together
        self.episodes: list[tuple[int, float]] = []  # steps taken before its end, return

    def rollout(self, steps: int, act: Callable[[torch.Tensor], torch.Tensor]) -> Rollout:
        """Take ``steps`` steps in each environment with the actions that ``act`` chooses."""
        states, taken = [self.state], []
        for _ in range(steps):
            actions, real = act(self.state), ~self.ended
            found, rewards, terminated, truncated, _ = self.vector.step(actions.numpy())
            self.state = torch.from_numpy(found)
            rewards, terminated = torch.from_numpy(rewards).float(), torch.from_numpy(terminated)
            self.ended = terminated | torch.from_numpy(truncated)
            self._count(rewards, real)
            states.append(self.state)
            taken.append((actions, rewards, terminated.float(), self.ended.float(), real.float()))
        return Rollout(torch.stack(states), *map(torch.stack, zip(*taken, strict=True)))

    def _count(self, rewards: torch.Tensor, real: torch.Tensor) -> None:
        self.steps += int(real.sum())
        self.sums += rewards
        for ended in self.ended.nonzero().flatten().tolist():
            self.episodes.append((self.steps, float(self.sums[ended])))
            self.sums[ended] = 0

    def average_return(self) -> float:
        """Average over the last 100 episodes, or those that there are."""
        last = [found for _, found in self.episodes[-EPISODES:]]
        return sum(last) / max(1, len(last))


def advantages(rollout: Rollout, values: torch.Tensor) -> torch.Tensor:
    """Generalized advantage estimates.

    ``delta[t] = r[t] + GAMMA V(s[t+1]) - V(s[t])``, without ``V(s[t+1])`` where the pole fell;
    ``A[t] = delta[t] + GAMMA LAMBDA A[t+1]``, without ``A[t+1]`` where the episode ended.

    Args:
        rollout: With tensors of (steps, environments).
        values: (steps + 1, environments), float32, of ``rollout.states``.

    Returns:
        (steps, environments), float32.
    """
    deltas = (
        (1 - GAMMA) * rollout.rewards + GAMMA * (1 - rollout.terminated) * values[1:] - values[:-1]
    )
    found, later = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        later = deltas[step] + GAMMA * LAMBDA * (1 - rollout.ended[step]) * later
        found[step] = later
    return found


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout, device: torch.device
) -> None:
    """Take one step on the policy's loss and the value function's."""
    rollout = Rollout(*(tensor.to(device) for tensor in rollout))
    scores, values = model(rollout.states)
    values = values.float()
    gained = advantages(rollout, values.detach())
    targets = gained + values.detach()[:-1]
    real, number = rollout.real, rollout.real.sum()
    mean = (gained * real).sum() / number
    spread = (((gained - mean) * real).square().sum() / number).sqrt()
    gained = (gained - mean) / (spread + 1e-8)

    logs = F.log_softmax(scores[:-1], dim=-1)
    chosen = logs.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    policy_loss = -((chosen * gained + ENTROPY * entropy) * real).sum() / number
    value_loss = ((values[:-1] - targets).square() * real).sum() / number

    optimizer.zero_grad()
    with amp.scale_loss(policy_loss, optimizer, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    with amp.scale_loss(value_loss, optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
    optimizer.step()


def train(level: str, seed: int, args: argparse.Namespace) -> Iterator[Environments]:
    """Train until the task is solved or ``--max-steps`` are taken; yield after each update."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    envs = Environments(args.envs, seed)
    space = envs.vector.single_observation_space.shape[0]
    model = ActorCritic(space, int(envs.vector.single_action_space.n)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, num_losses=2, verbosity=0)

    @torch.no_grad()
    def act(states: torch.Tensor) -> torch.Tensor:
        scores, _ = model(states.to(device))
        return torch.multinomial(F.softmax(scores.float(), dim=-1).cpu(), 1).squeeze(-1)

    while envs.steps < args.max_steps and not solved(envs):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - envs.steps / args.max_steps)
        update(model, optimizer, envs.rollout(args.rollout, act), device)
        yield envs


def solved(envs: Environments) -> bool:
    """Whether 100 episodes have the average return that gymnasium asks for."""
    threshold = gymnasium.spec(TASK).reward_threshold
    return len(envs.episodes) >= EPISODES and envs.average_return() >= threshold
