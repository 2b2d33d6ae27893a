"""CUDA graphs: training steps, the scale and the counts in them, tables of addresses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from apex import amp, debug
from apex.catalogue.optimizers import BY_NAME, makers
from apex.multi_tensor_apply import release_captured
from apex.ops.lists.tensor_norms import l2_norms
from apex.optimizers import FusedAdam
from tools.gpu import checking
from tools.gpu.checking import (
    DEVICE,
    LEVELS,
    Captured,
    Tensor,
    check,
    copies,
    need,
    no_farther,
    normal,
    on_a_side_stream,
    same,
)
from tools.gpu.training import Training, clip

STATIC = 128.0
DYNAMIC = ("O1", "O2")  # levels with a dynamic scale
WARM_UP = 3
STEPS = 8
OVERFLOWS = (1, 2, 5)  # twice in a row; the scale grows after two steps without one

# What counts its steps on the device, or not at all; and what does where a step can be skipped.
OURS = makers(lr=0.01, eps=1e-4)  # which float16 holds
COUNTING = [name for name in OURS if BY_NAME[name].make._counts_steps and name != "FusedAdam"]  # type: ignore[attr-defined]
ALWAYS: dict[str, Callable[[Any], Any]] = {
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01, capturable=True),
    **{name: OURS[name] for name in OURS if name not in ("FusedAdam", *COUNTING)},
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, capturable=True),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
}
WITH_A_FLAG: dict[str, Callable[[Any], Any]] = {
    **{name: OURS[name] for name in COUNTING},
    "FusedAdam without capturable": OURS["FusedAdam"],
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"between": clip},
    "fused step": {"between": clip, "fused_step": True},
    "two losses": {"num_losses": 2},
}


# --- training steps -------------------------------------------------------------------------------


def _trained(in_a_graph: bool, level: str, make: Any, **options: Any) -> list[Any]:
    """Steps with overflows, if the scale is dynamic; all that a program can see of them."""
    dynamic = level in DYNAMIC and "loss_scale" not in options
    if dynamic:
        options = {"init_scale": 1024.0, "growth_interval": 2, **options}
    training = Training(level, make, norm=False, **options)
    seen: list[Any] = []
    if in_a_graph:
        side = on_a_side_stream(training, WARM_UP)
        captured = Captured(training, stream=side)
    else:
        for _ in range(WARM_UP):
            training()
    for number in range(STEPS):
        training.x.copy_(normal(8, 16, seed=number + 1))
        if dynamic and number in OVERFLOWS:
            training.x[0, 0] = float("inf")
        if in_a_graph:
            captured.replay()
        loss = captured.out if in_a_graph else training()
        seen.append((str(loss.item()), amp.state_dict(), amp.outcome(training.optimizer).numbers()))
    if dynamic:
        taken, skipped = seen[-1][2][1:3]
        need(skipped >= len(OVERFLOWS), f"{skipped} of {taken + skipped} steps were skipped")
    left = copies([*training.model.parameters(), *amp.master_params(training.optimizer)])
    amp.reset()
    return [seen, left]


def _replays_are_single_steps(level: str, make: Any, **options: Any) -> None:
    (seen, left), (expected, exact) = (
        _trained(in_a_graph, level, make, **options) for in_a_graph in (True, False)
    )
    for number, (found, wanted) in enumerate(zip(seen, expected, strict=True)):
        need(found == wanted, f"replay {number}: {found}; a single step: {wanted}")
    same(left, exact, "weights and masters")


@check(*((level, name) for level in LEVELS for name in ALWAYS))
def replays_are_single_steps(level: str, name: str) -> None:
    """Losses, scale, counts and weights; the scale backs off and grows in replays."""
    if checking.DRY and (level, name) == ("O3", "torch SGD"):
        raise checking.NotDry("torch 2.13: wrong momenta of 16 bits on a CPU")
    _replays_are_single_steps(level, ALWAYS[name])


@check(*((level, name) for level in DYNAMIC for name in WITH_A_FLAG))
def replays_count_where_a_step_can_be_skipped(level: str, name: str) -> None:
    """Optimizers that count on the device under a dynamic scale."""
    _replays_are_single_steps(level, WITH_A_FLAG[name])


@check(*((level, way) for level in LEVELS for way in WAYS if way != "plain"))
def replays_are_single_steps_when(level: str, way: str) -> None:
    """Clipped, with the step fused, with two losses and scales."""
    _replays_are_single_steps(level, ALWAYS["FusedAdam"], **WAYS[way])


@check("FusedAdam", "FusedSGD", "torch Adam")
def replays_at_a_static_scale_are_single_steps(name: str) -> None:
    """At O2."""
    _replays_are_single_steps("O2", ALWAYS[name], loss_scale=STATIC)


@check(*WITH_A_FLAG)
def a_count_of_the_host_is_refused(name: str) -> str:
    """Without a flag replays would keep the bias corrections of the capture."""
    try:
        _trained(True, "O0", WITH_A_FLAG[name])
    except RuntimeError as error:
        need("capturable=True" in str(error), f"refused without a remedy: {error}")
        return f"refused: {str(error)[:80]}"
    raise AssertionError("captured, and its bias corrections stay as they were")


@check()
def a_scale_that_always_overflows_backs_off() -> None:
    """From far above what float16 holds, single steps and replays find one."""
    for in_a_graph in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, device="cpu", dtype=torch.float32).to(DEVICE)
        x = normal(32, 64)
        options: Any = {"opt_level": "O2", "verbosity": 0, "init_scale": 2.0**24}
        model, optimizer = amp.initialize(model, ALWAYS["FusedAdam"](model.parameters()), **options)

        def step(model: Any = model, optimizer: Any = optimizer, x: Tensor = x) -> None:
            optimizer.zero_grad()
            with amp.scale_loss(model(x).float().square().mean() * 100, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        again: Callable[[], None] = step
        if in_a_graph:
            again = Captured(step, stream=on_a_side_stream(step, 1)).replay
        before = copies(model.parameters())
        for _ in range(30):
            again()
        moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        need(all(moved), f"no weight moved {'in 30 replays' if in_a_graph else 'in 30 steps'}")
        amp.reset()


@check()
def a_watch_and_a_capture() -> str:
    """A watched step is refused with words, or its replays are single steps."""
    training = Training("O0", ALWAYS["FusedAdam"], norm=False)
    with debug.watch(training.model, training.optimizer):
        side = on_a_side_stream(training, WARM_UP)
        try:
            Captured(training, stream=side)
        except RuntimeError as error:
            need("apex.debug" in str(error), f"refused by {error}")
            return f"refused: {str(error)[:80]}"
    return "captured"


# --- tables of addresses, uploaded in a capture ---------------------------------------------------


def _column(count: int = 50, seed: int = 0) -> list[Tensor]:
    return [normal(37 + n, seed=seed + n) for n in range(count)]


def _norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double().norm() for tensor in tensors])


@check("global", "thread_local", "relaxed")
def a_table_uploaded_in_a_capture_stays(mode: str) -> None:
    """Memory that is freed and filled with -1 afterwards is not the table's."""
    xs = _column(seed=1000 + len(mode))
    l2_norms(_column(3, 500))  # compiles
    captured = Captured(lambda: l2_norms(xs), capture_error_mode=mode)
    filled = [torch.full((64,), -1, dtype=torch.int64, device=DEVICE) for _ in range(200)]
    if not checking.DRY:
        filled += [torch.full((64,), -1, dtype=torch.int64).pin_memory() for _ in range(200)]
    gc.collect()
    for turn in range(3):
        for n, x in enumerate(xs):
            x.copy_(normal(*x.shape, seed=100 * turn + n))
        captured.replay()
        no_farther(captured.out, _norms(xs), what=f"replay {turn}, {len(filled)} filled")
    release_captured()


@check()
def a_bare_capture_does_not_take_a_table_on_its_way() -> None:
    """CUDAGraph.capture_begin does not synchronise, as torch.cuda.graph does."""
    xs, other, here = _column(seed=3000), torch.cuda.Stream(), torch.cuda.Stream()
    l2_norms(_column(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(400_000_000)
        l2_norms(xs)  # the upload waits behind the sleep
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(here):
        graph.capture_begin()
        found = l2_norms(xs)
        graph.capture_end()
        graph.replay()
    here.synchronize()
    found = found.clone()
    torch.cuda.synchronize()
    no_farther(found, _norms(xs), what="replayed before the other stream's upload")


@check()
def graphs_share_a_pool_and_are_freed() -> None:
    """20 graphs with 4 MiB each."""
    xs, ys = _column(seed=5000), _column(seed=6000)
    l2_norms(_column(2))
    first = Captured(lambda: l2_norms(xs))
    second = Captured(lambda: l2_norms(ys), pool=first.graph.pool())
    for one, column in ((first, xs), (second, ys)) * 2:
        one.replay()
        no_farther(one.out, _norms(column), what="norms")
    del first, second, one
    release_captured()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for turn in range(20):
        column = _column(20, seed=7000 + 50 * turn)
        held = Captured(partial(l2_norms, column))
        held.replay()
        del held
    release_captured()
    gc.collect()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved() - before
    need(after <= 4 * 2**20, f"{after / 2**20:.0f} MiB are still reserved")


@check()
def eager_steps_between_replays() -> None:
    """A count of steps in a graph goes on where eager steps left it."""
    captured_params = [nn.Parameter(normal(100, seed=n)) for n in range(5)]
    eager_params = [nn.Parameter(param.detach().clone()) for param in captured_params]
    made = [FusedAdam(p, lr=0.1, capturable=True) for p in (captured_params, eager_params)]
    for param in (*captured_params, *eager_params):
        param.grad = torch.ones_like(param)
    side = on_a_side_stream(made[0].step)
    for _ in range(3):
        made[1].step()
    captured = Captured(made[0].step, stream=side)
    for _ in range(3):
        captured.replay()
        made[0].step()
        made[1].step()
        made[1].step()
    same(captured_params, eager_params, "weights")
