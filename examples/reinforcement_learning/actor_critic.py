"""Advantage actor-critic (A2C) on CartPole-v1, with ``apex.amp`` and a loss scale for each loss.

Each update takes ``--rollout`` steps in ``--envs`` environments, estimates advantages by GAE
(Schulman et al., 2016) and takes one optimizer step on two losses: the policy's is loss 0, the
value function's is loss 1. A run ends when 100 episodes in a row have an average return of 475.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

try:
    from environments import EPISODES, TASK, THRESHOLD, Environments, Rollout
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install 'gymnasium>=1.1' matplotlib") from None

GAMMA, LAMBDA = 0.99, 0.95  # discount, and decay of GAE
ENTROPY = 0.01  # weight of the entropy in the policy's loss
MAX_NORM = 0.5  # of the gradients of both losses
EVERY = 20_000  # steps from one line of progress to the next


class ActorCritic(nn.Module):
    """Two networks: scores of the actions, and the value of a state."""

    def __init__(self, inputs: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.policy = _network(inputs, width, nn.Linear(width, actions), gain=0.01)  # near uniform
        self.value = _network(inputs, width, Float32Linear(width, 1), gain=1.0)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map states ``(..., inputs)`` to scores ``(..., actions)`` and values ``(...)``."""
        return self.policy(states), self.value(states).squeeze(-1)


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32 at every level.

    In bfloat16, values between 0.5 and 1 are rounded by up to 2**-9, a fifth of what one more step
    is worth (0.01), and advantages are differences of such values.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``(..., in_features)`` to float32 ``(..., out_features)``."""
        with amp.disable_casts():
            return F.linear(inputs.float(), self.weight.float(), self.bias.float())


def _network(inputs: int, width: int, last: nn.Linear, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.Linear(width, width), last]
    for layer, size in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, size)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def advantages(rollout: Rollout, values: torch.Tensor) -> torch.Tensor:
    """Generalized advantage estimates.

    ``delta[t] = (1 - GAMMA) r[t] + GAMMA V(s[t+1]) - V(s[t])``, without ``V(s[t+1])`` where the
    pole fell; ``A[t] = delta[t] + GAMMA LAMBDA A[t+1]``, without ``A[t+1]`` where the episode
    ended. The factor ``1 - GAMMA`` keeps values below 1 (else 100), so that the value function's
    gradients do not fill the norm that both losses are clipped to.

    Args:
        rollout: With tensors of (steps, environments).
        values: (steps + 1, environments), of ``rollout.states``.

    Returns:
        (steps, environments), in the dtype of ``values``.
    """
    following = GAMMA * (1 - rollout.terminated) * values[1:]
    deltas = (1 - GAMMA) * rollout.rewards + following - values[:-1]
    found, later = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        later = deltas[step] + GAMMA * LAMBDA * (1 - rollout.ended[step]) * later
        found[step] = later
    return found


def update(model: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout) -> None:
    """Take one step on the policy's loss and the value function's."""
    scores, values = model(rollout.states)
    values = values.float()
    estimates = advantages(rollout, values.detach())
    targets = estimates + values.detach()[:-1]
    real = rollout.real.bool()
    used = estimates[real]
    used = (used - used.mean()) / (used.std(correction=0) + 1e-8)

    logs = F.log_softmax(scores[:-1].float(), dim=-1)[real]
    chosen = logs.gather(-1, rollout.actions[real].unsqueeze(-1)).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(dim=-1)
    policy_loss = -(chosen * used + ENTROPY * entropy).mean()
    value_loss = F.mse_loss(values[:-1][real], targets[real])

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
    model = ActorCritic(envs.inputs, envs.actions).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, num_losses=2, verbosity=0)

    @torch.no_grad()
    def act(states: torch.Tensor) -> torch.Tensor:
        scores, _ = model(states.to(device))  # not model.policy: at O2 the model casts its inputs
        chances = F.softmax(scores.float(), dim=-1)
        if not chances.isfinite().all():
            raise SystemExit(
                f"{level} seed {seed}: the policy is not finite after {envs.steps} steps; pass "
                f"less than --lr {args.lr:g}, or another level"
            )
        return torch.multinomial(chances.cpu(), 1).squeeze(-1)

    while envs.steps < args.max_steps and not envs.solved():
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - envs.steps / args.max_steps)
        rollout = envs.rollout(args.rollout, act)
        update(model, optimizer, Rollout(*(tensor.to(device) for tensor in rollout)))
        yield envs


def watched(updates: Iterator[Environments], title: str) -> Environments:
    """Train to the end, with a line now and then."""
    lines = 0
    for envs in updates:
        if envs.steps // EVERY > lines:
            lines = envs.steps // EVERY
            print(f"{title}: {envs.steps} steps, return {envs.average_return():.1f}", flush=True)
    return envs


def draw(curves: list[tuple[str, list[tuple[int, float]]]], path: str) -> None:
    """Draw the average return of the last 100 episodes over the steps, a line for each run.

    Args:
        curves: Level and episodes of each run; the runs of a level have one colour.
        path: File to write.
    """
    levels = list(dict.fromkeys(level for level, _ in curves))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for level, episodes in curves:
        returns = [found for _, found in episodes]
        parts = [returns[max(0, end - EPISODES) : end] for end in range(1, len(returns) + 1)]
        color = f"C{levels.index(level)}"
        axes.plot([at for at, _ in episodes], [sum(p) / len(p) for p in parts], color=color)
    for number, level in enumerate(levels):
        axes.plot([], color=f"C{number}", label=level)
    axes.axhline(THRESHOLD, color="grey", linestyle="--", label="solved")
    axes.set(xlabel="steps", ylabel=f"average return of {EPISODES} episodes", title=TASK)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options; ends the program with a message where they are wrong."""
    parser = argparse.ArgumentParser(description=f"A2C on {TASK} in mixed precision.")
    add = parser.add_argument
    levels = ["O0", "O1", "O2", "O4", "O5"]  # at O3 the eps of Adam is 0: nan
    add("--opt-level", nargs="+", choices=levels, default=["O1"], help="a run at each")
    add("--seed", nargs="+", type=int, default=[0], help="a run with each")
    add("--envs", type=int, default=8, help="environments at once (default: %(default)s)")
    add("--rollout", type=int, default=16, help="steps in each per update (default: %(default)s)")
    add("--lr", type=float, default=2e-3, help="of Adam; falls to 0 at --max-steps")
    add("--max-steps", type=int, default=300_000, help="end of a run that does not solve the task")
    add("--picture", default="returns.png", metavar="FILE.png", help="default: %(default)s")
    args = parser.parse_args(argv)
    for name in ("envs", "max_steps"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(args, name)}: it must be at least 1")
    if args.rollout < 2:  # the only step of a rollout can be one that begins an episode
        parser.error(f"--rollout {args.rollout}: it must be at least 2")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr}: it must be above 0 and finite")
    if not all(0 <= seed < 2**32 for seed in args.seed):
        parser.error(f"--seed {args.seed}: each must be 0 to 2**32 - 1")
    path, kinds = Path(args.picture), Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds or path.is_dir():
        parser.error(f"--picture {path}: pass the name of a file that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        parser.error(f"--picture {path}: there is no folder {path.parent}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Train at each level with each seed, and draw the learning curves."""
    args = parse(argv)
    curves: list[tuple[str, list[tuple[int, float]]]] = []
    try:
        for level in args.opt_level:
            for seed in args.seed:
                title, began = f"{level} seed {seed}", time.perf_counter()
                envs = watched(train(level, seed, args), title)
                curves.append((level, envs.episodes))
                print(
                    f"{title}: {'solved' if envs.solved() else 'not solved'} after {envs.steps} "
                    f"steps, {len(envs.episodes)} episodes, {time.perf_counter() - began:.0f} s; "
                    f"return {envs.average_return():.1f}",
                    flush=True,
                )
                draw(curves, args.picture)
                amp.reset()  # the next run may be at another level
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        raise SystemExit(f"--picture {args.picture}: {error.strerror}") from None


if __name__ == "__main__":
    # Small layers gain nothing from threads, and with one the sums, so the runs, are always alike.
    torch.set_num_threads(1)
    main()
