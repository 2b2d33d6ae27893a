"""``GradScaler`` and tensors in parts, on two ranks and without torch.distributed."""

import functools

import pytest
import torch

from apex.transformer.amp import GradScaler
from tests.transformer import ranks as programs


@pytest.mark.dist
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "custom", "flag in step"])
def test_an_inf_on_one_rank_skips_on_both(two, kind, unscale):
    first, second = two.run(functools.partial(programs.training, kind, unscale, False))
    assert first == second
    assert first[0] == [(8.0, True), (4.0, False), (4.0, True)]
    assert first[1] == (3 if kind == "custom" else None)


@pytest.mark.dist
def test_a_rank_without_gradients_takes_part(two):
    first, second = two.run(functools.partial(programs.training, "no gradient", False, False))
    assert [scale for scale, _ in first[0]] == [scale for scale, _ in second[0]] == [8.0, 4.0, 4.0]


@pytest.mark.dist
def test_only_ranks_of_the_group_skip(two):
    first, second = two.run(functools.partial(programs.training, "sgd", False, True))
    assert first[0] == [(8.0, True)] * 3
    assert second[0] == [(8.0, True), (4.0, False), (4.0, True)]
    assert two.run(programs.without_reduction) == [8.0, 4.0]  # so the tests above see something


@pytest.mark.dist
def test_by_default_the_ranks_of_a_model_skip_together(two):
    skipped, none = [8.0, 4.0, 4.0], [8.0, 8.0, 8.0]
    assert two.run(functools.partial(programs.in_a_megatron_program, 2)) == [skipped, skipped]
    assert two.run(functools.partial(programs.in_a_megatron_program, 1)) == [none, skipped]


@pytest.mark.dist
def test_tensors_in_parts(two):
    flat = torch.arange(12.0).view(3, 4).t().flatten().tolist()
    for rank, (part, both, alone, undivided, said) in enumerate(two.run(programs.parts)):
        assert part == flat[6 * rank : 6 * rank + 6]
        assert both == flat
        assert alone
        assert undivided == 12
        outside = f"rank {rank} is not in the group. Pass a group that contains it"
        assert said[0] == "AssertionError: 3 is not divisible by 2"
        assert [f"Error: group: {outside}" in text for text in said[1:3]] == [True, True]
        assert f"Error: GradScaler: {outside}" in said[3]


def test_one_process_is_torchs():
    for make in (lambda: GradScaler(8.0, 4.0, 0.25, 1), lambda: GradScaler(8.0, device="cpu")):
        scaler = make()
        assert scaler.is_enabled()  # torch's own is for cuda by default, and off without one
        assert programs._plain(scaler, 0) == (32.0 if scaler.get_growth_interval() == 1 else 8.0)
        scaler = make()
        assert programs._plain(scaler, 1) == (2.0 if scaler.get_growth_interval() == 1 else 4.0)


def test_state_and_switch():
    scaler = GradScaler()
    state = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7}
    scaler.load_state_dict({**state, "_growth_tracker": 3})
    assert scaler.state_dict() == {**state, "_growth_tracker": 3}
    assert GradScaler(enabled=False).scale(torch.tensor(3.0)).item() == 3.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):  # torch's own
        scaler.step(optimizer)
