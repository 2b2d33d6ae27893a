"""Several environments of CartPole-v1 that advance together."""

from collections.abc import Callable
from typing import NamedTuple

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

__all__ = ["EPISODES", "TASK", "THRESHOLD", "Environments", "Rollout"]

TASK = "CartPole-v1"
EPISODES = 100  # that the average return is taken over
THRESHOLD = gymnasium.spec(TASK).reward_threshold  # of that average; here the task is solved


class Rollout(NamedTuple):
    """What happened in some steps; tensors of (steps, environments), float32 unless said."""

    states: torch.Tensor  # (steps + 1, environments, numbers of a state)
    actions: torch.Tensor  # int64
    rewards: torch.Tensor
    terminated: torch.Tensor  # 1 where the pole fell
    ended: torch.Tensor  # 1 there, and where the limit of 500 steps was reached
    real: torch.Tensor  # 0 where a new episode began: that step ignores the action


class Environments:
    """Environments and the returns of their episodes.

    Args:
        number: How many.
        seed: Of their first states.
    """

    def __init__(self, number: int, seed: int) -> None:
        makers = [lambda: gymnasium.make(TASK)] * number
        # In this mode the last state of an episode is in the rollout, so that its value is known.
        self._vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.inputs = self._vector.single_observation_space.shape[0]
        self.actions = int(self._vector.single_action_space.n)
        self.steps = 0  # of all environments together
        self.episodes: list[tuple[int, float]] = []  # steps taken until its end, return
        self._state = torch.from_numpy(self._vector.reset(seed=seed)[0])
        self._ended = torch.zeros(number, dtype=torch.bool)
        self._sums = torch.zeros(number)  # of the rewards in episodes that have not ended

    def rollout(self, steps: int, act: Callable[[torch.Tensor], torch.Tensor]) -> Rollout:
        """Take ``steps`` steps in each environment with the actions that ``act`` chooses."""
        states, taken = [self._state], []
        for _ in range(steps):
            actions, real = act(self._state), ~self._ended
            state, rewards, terminated, truncated, _ = self._vector.step(actions.numpy())
            self._state, rewards = torch.from_numpy(state), torch.from_numpy(rewards).float()
            self._ended = torch.from_numpy(terminated | truncated)
            self._count(rewards, real)
            states.append(self._state)
            flags = (torch.from_numpy(terminated), self._ended, real)
            taken.append((actions, rewards, *(flag.float() for flag in flags)))
        return Rollout(torch.stack(states), *map(torch.stack, zip(*taken, strict=True)))

    def _count(self, rewards: torch.Tensor, real: torch.Tensor) -> None:
        self.steps += int(real.sum())
        self._sums += rewards
        for place in self._ended.nonzero().flatten().tolist():
            self.episodes.append((self.steps, float(self._sums[place])))
            self._sums[place] = 0

    def average_return(self) -> float:
        """Average over the last 100 episodes, or those that there are."""
        returns = [found for _, found in self.episodes[-EPISODES:]]
        return sum(returns) / max(1, len(returns))

    def solved(self) -> bool:
        """Whether 100 episodes in a row have the average return that gymnasium asks for."""
        return len(self.episodes) >= EPISODES and self.average_return() >= THRESHOLD
