"""Train a policy in float16 under ``fully_shard``, with ``apex.amp.GradScaler``.

    torchrun --nproc-per-node 2 examples/reinforcement_learning/on_shards.py

Training and rollouts read the same gathered float16 weights, so a ratio of probabilities is 1
where the weights are the same (Qi et al., "Defeating the Training-Inference Mismatch via FP16",
arXiv:2510.26788). Each forward gathers weights, so all ranks make as many rollouts.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from apex import amp
from apex.optimizers import FusedAdam

STATES, ACTIONS = 16, 4


def policy(mesh: DeviceMesh, width: int = 64) -> tuple[nn.Module, FusedAdam, amp.GradScaler]:
    """The sharded model, its optimizer and its scaler, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(STATES, width), nn.Tanh(), nn.Linear(width, ACTIONS))
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=half)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)  # steps the float32 shards
    return model, optimizer, amp.GradScaler(mesh.device_type)


def log_probabilities(model: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Those of float16 logits, in float32."""
    return torch.log_softmax(model(states).float(), dim=1)


def reward_of(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """1 for the position of the largest of the first numbers, else 0."""
    return (states[:, :ACTIONS].argmax(dim=1) == actions).float()


def rollout(model: nn.Module, count: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
    """States, actions, their log probabilities and their rewards."""
    states = torch.randn(count, STATES, generator=generator)
    with torch.no_grad():
        logs = log_probabilities(model, states)
    actions = torch.multinomial(logs.exp(), 1, generator=generator)
    return states, actions, logs.gather(1, actions), reward_of(states, actions[:, 0])


def train(
    model: nn.Module,
    optimizer: FusedAdam,
    scaler: amp.GradScaler,
    generator: torch.Generator,
    rollouts: int = 40,
    epochs: int = 2,
    clip: float = 0.2,
) -> tuple[list[float], torch.Tensor]:
    """Mean rewards of the rollouts, and ratios of the first epochs."""
    rewards, first_ratios = [], []
    for _ in range(rollouts):
        states, actions, sampled, reward = rollout(model, 128, generator)
        advantage = (reward - reward.mean())[:, None]
        for epoch in range(epochs):
            logs = log_probabilities(model, states).gather(1, actions)
            ratio = (logs - sampled).exp()
            bounded = ratio.clamp(1 - clip, 1 + clip)
            loss = -torch.minimum(ratio * advantage, bounded * advantage).mean()
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)  # by the norm over all shards
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if epoch == 0:
                first_ratios.append(ratio.detach())
        rewards.append(reward.mean().item())
    return rewards, torch.cat(first_ratios)


def main(device: str = "cpu", backend: str = "gloo") -> None:  # on GPUs: "cuda", "nccl"
    """Train on the ranks that torchrun started, and print the first and the last reward."""
    torch.distributed.init_process_group(backend)
    ranks = torch.distributed.get_world_size()
    training = policy(init_device_mesh(device, (ranks,)))
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())  # own rollouts
    rewards, _ = train(*training, generator)
    print(rewards[0], rewards[-1])  # about 0.25 and 0.87
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
