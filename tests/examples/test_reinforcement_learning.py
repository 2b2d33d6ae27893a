"""The actor-critic example: its estimates, its environments, its losses, and that it learns."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from tests.examples import imported
from tests.examples.imported import program
from tests.tolerance import THREE_STEPS, assert_close_to_largest


def test_without_gymnasium_it_says_what_to_install(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setattr(imported, "NEEDS", {})
    with pytest.raises(SystemExit, match=r"^gymnasium is missing: pip install 'gymnasium>=1\.1'"):
        program("reinforcement_learning", "actor_critic")


@pytest.fixture(scope="module")
def example():
    return program("reinforcement_learning", "actor_critic")


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    amp.reset()


BALANCE = torch.tensor([0.1, 0.2, 1.0, 1.0])  # pushes towards where the pole leans


def random_actions(states):
    return torch.randint(0, 2, (len(states),))


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.slow
def test_it_learns(example, level, tmp_path, capsys):
    envs = example.Environments(8, seed=0)
    envs.rollout(500, random_actions)
    chance = envs.average_return()  # 22 or so
    picture = tmp_path / "returns.png"
    words = f"--opt-level {level} --envs 32 --rollout 4 --lr 5e-3 --max-steps 10000 --picture"
    example.main([*words.split(), str(picture)])
    out = capsys.readouterr().out
    line = (
        rf"{level} seed 0: not solved after 10[01]\d\d steps, \d+ episodes, \d+ s; return (\d+\.\d)"
    )
    assert float(re.search(f"^{line}$", out.strip())[1]) > 2 * chance  # 57 to 77 over five seeds
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_seed_gives_one_run(example):
    args = example.parse(["--max-steps", "1000"])
    runs = [
        [list(envs.episodes) for envs in example.train("O1", seed, args)][-1] for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_each_loss_has_a_scale(example, monkeypatch):
    """An overflow in the value function's loss lowers its scale alone, and skips the step."""
    torch.manual_seed(0)
    model = example.ActorCritic(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", num_losses=2, verbosity=0)
    rollout = example.Environments(4, seed=0).rollout(20, random_actions)
    before = [parameter.clone() for parameter in model.parameters()]
    monkeypatch.setattr(F, "mse_loss", lambda values, _: values.sum() * float("inf"))
    example.update(model, optimizer, rollout)
    scales = [amp.state_dict()[f"loss_scaler{number}"]["loss_scale"] for number in (0, 1)]
    assert scales == [2.0**16, 2.0**15]
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(("level", "half"), [("O2", torch.float16), ("O4", torch.bfloat16)])
def test_values_are_not_rounded_to_16_bits(example, level, half):
    model = example.ActorCritic(4, 2)
    model = amp.initialize(model, opt_level=level, num_losses=2, verbosity=0)
    _, values = model(torch.randn(50, 4))
    assert values.dtype == torch.float32
    assert int((values.to(half).float() == values).sum()) < 5


def test_one_update(example):
    """At O0 it is this step of plain torch."""
    rollout = example.Environments(8, seed=0).rollout(60, random_actions)
    rollout.terminated[tuple(rollout.ended.nonzero()[0])] = 0  # as if the limit had ended it
    assert rollout.terminated.sum() > 0
    torch.manual_seed(0)
    actual = example.ActorCritic(4, 2)
    expected = example.ActorCritic(4, 2)
    expected.load_state_dict(actual.state_dict())
    optimizer = torch.optim.SGD(actual.parameters(), lr=0.1)
    amp.initialize(actual, optimizer, opt_level="O0", num_losses=2, verbosity=0)
    example.update(actual, optimizer, rollout)

    expected.double()
    rollout = example.Rollout(*(tensor.double() for tensor in rollout))
    scores, values = expected(rollout.states)
    wanted = estimates(example, rollout, values.detach())
    real = [tuple(at) for at in rollout.real.nonzero().tolist()]
    mean = sum(wanted[at] for at in real) / len(real)
    spread = (sum((wanted[at] - mean) ** 2 for at in real) / len(real)).sqrt()
    loss = 0.0
    for at in real:
        chances = scores[at].softmax(0)
        chosen = chances[int(rollout.actions[at])].log()
        entropy = -(chances * chances.log()).sum()
        loss -= chosen * (wanted[at] - mean) / (spread + 1e-8) + 0.01 * entropy
        loss += (values[at] - (wanted[at] + values[at].detach())) ** 2
    (loss / len(real)).backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    for parameter, other in zip(actual.parameters(), expected.parameters(), strict=True):
        step = other - 0.1 * other.grad
        assert_close_to_largest(parameter.detach(), step.detach(), THREE_STEPS)


def estimates(example, rollout, values):
    """GAE by its definition: a sum for each step, up to the end of its episode."""
    steps, number = rollout.rewards.shape
    wanted = torch.zeros(steps, number, dtype=torch.float64)
    for place in range(number):
        for first in range(steps):
            weight = 1.0
            for t in range(first, steps):
                at = (t, place)
                delta = 0.01 * rollout.rewards[at] - values[at]
                delta += 0.99 * (1 - rollout.terminated[at]) * values[t + 1, place]
                wanted[first, place] += weight * delta
                weight *= 0.99 * 0.95
                if rollout.ended[at]:
                    break
    return wanted


def test_environments_leave_out_the_steps_that_begin_an_episode(example):
    """Each other step gives a reward of 1."""
    envs = example.Environments(3, seed=0)
    rollouts = [envs.rollout(steps, random_actions) for steps in (1, 70, 129)]
    ended, real, rewards = (
        torch.cat([getattr(rollout, name) for rollout in rollouts])
        for name in ("ended", "real", "rewards")
    )
    assert torch.equal(real[1:], 1 - ended[:-1])
    assert torch.equal(rewards, real)
    assert envs.steps == int(real.sum())
    assert len(envs.episodes) == int(ended.sum()) > 10
    last = [200 if not column.any() else int(column.nonzero().max()) + 1 for column in ended.T]
    running = sum(int(real[begin:, place].sum()) for place, begin in enumerate(last))
    assert sum(found for _, found in envs.episodes) + running == envs.steps
    states = torch.cat([rollout.states[:-1] for rollout in rollouts])
    begun = states[1:][real[1:] == 0]  # the last states of episodes
    assert bool(((begun[:, 0].abs() > 2.4) | (begun[:, 2].abs() > 0.2095)).all())


def test_the_limit_of_500_steps_ends_an_episode(example):
    envs = example.Environments(1, seed=0)
    rollout = envs.rollout(501, lambda states: (states @ BALANCE > 0).long())
    assert rollout.ended.nonzero().tolist() == [[499, 0]]
    assert rollout.terminated.sum() == 0
    assert envs.episodes == [(500, 500.0)]


def test_solved_takes_100_episodes(example):
    envs = example.Environments(1, seed=0)
    envs.episodes = [(0, 500.0)] * 99
    assert not envs.solved()
    envs.episodes = [(0, 0.0)] * 50 + [(0, 450.0)] * 50 + [(0, 500.0)] * 50
    assert envs.solved()  # 475 on average
    envs.episodes[-1] = (0, 499.0)
    assert not envs.solved()


def test_a_policy_that_is_not_finite(example, tmp_path):
    words = f"--opt-level O1 --lr 1e30 --max-steps 5000 --picture {tmp_path / 'a.png'}"
    with pytest.raises(SystemExit, match=r"O1 seed 0: the policy is not finite after \d+ steps"):
        example.main(words.split())
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_it_without_a_traceback(example, monkeypatch, capsys):
    monkeypatch.setattr(example, "update", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        example.main([])
    assert "interrupted" in capsys.readouterr().err
