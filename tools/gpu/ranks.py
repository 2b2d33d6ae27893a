"""One rank over NCCL (gloo in a dry run): wrappers, sharded optimizers, steps that do not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsWrapper

from apex import amp, debug
from apex.commands.selftest.gpu import waits_refused
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.optimizers import FusedAdam, FusedLAMB
from apex.parallel import DistributedDataParallel, Reducer, convert_syncbn_model
from apex.parallel.distributed import flat_dist_call
from tools.gpu import checking
from tools.gpu.checking import (
    BF16,
    DEVICE,
    F16,
    F32,
    F64,
    LEVELS,
    Captured,
    Tensor,
    check,
    close,
    copies,
    default,
    gradients,
    need,
    network,
    normal,
    on_a_side_stream,
    one_rank,
    same,
    without_waits,
)

WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced in float32": {"allreduce_always_fp32": True},
    "delayed": {"delay_allreduce": True},
    "kept buffers": {"retain_allreduce_buffers": True},
    "divided before": {"gradient_predivide_factor": 2.0},
    "small buckets": {"message_size": 100},
    "sums": {"gradient_average": False},
}
SHARDED: dict[str, dict[str, Any]] = {
    "overlapping": {"overlap_param_sync": True},
    "in buffers": {"contiguous_grad_buffer": True, "contiguous_param_buffer": True},
    "gradients sent in bfloat16": {"grad_sync_dtype": BF16},
    "weights sent in 8 bits": {"param_sync_dtype": torch.uint8},
    "no weights of its own": {"dtype": F32, "store_params": False},
    "small buckets": {"bucket_cap_mb": 0.001, "pipeline_size": 3},
}


def _train(
    model: nn.Module, optimizer: Any, steps: int = 4, run: Any = None, dtype: torch.dtype = F32
) -> list[Tensor]:
    run = model if run is None else run
    for number in range(steps):
        optimizer.zero_grad()
        run(normal(8, 16, seed=number, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    if hasattr(optimizer, "param_sync"):
        optimizer.param_sync()
    return copies(model.parameters())


def _adam(model: nn.Module, **options: Any) -> FusedAdam:
    return FusedAdam(model.parameters(), lr=0.01, **options)


def _all_close(found: list[Tensor], exact: list[Tensor], allowed: float) -> None:
    for n, (a, b) in enumerate(zip(found, exact, strict=True)):
        close(a, b, allowed, f"weight {n}")


@check(*((dtype, way) for dtype in (F32, F16, BF16) for way in WRAPPERS))
def a_wrapper_of_one_rank_changes_nothing(dtype: torch.dtype, way: str) -> None:
    """DistributedDataParallel, in each way of sending."""
    one_rank()
    wrapped, plain = network(norm=False).to(dtype), network(norm=False).to(dtype)
    run = DistributedDataParallel(wrapped, **WRAPPERS[way])
    found = _train(wrapped, _adam(wrapped), run=run, dtype=dtype)
    _all_close(found, _train(plain, _adam(plain), dtype=dtype), 1e-6 if dtype == F32 else 1e-2)


def _amp_step(model: nn.Module, run: Any, level: str) -> Callable[[], None]:
    optimizer = _adam(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run = run(model)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(run(normal(8, 16)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    return step


@check(*LEVELS)
def a_wrapper_at_each_level(level: str) -> None:
    """With SyncBatchNorm and clipping."""
    one_rank()
    ends = []
    for wrap in (False, True):
        model = convert_syncbn_model(network()) if wrap else network()
        step = _amp_step(model, DistributedDataParallel if wrap else (lambda m: m), level)
        for _ in range(4):
            step()
        ends.append(copies(model.parameters()))
        amp.reset()
    first, second = ends
    _all_close(first, second, 2e-2)


@check(*LEVELS)
def steps_of_torchs_wrapper_do_not_wait(level: str) -> None:
    """With a pass under no_sync."""
    one_rank()
    model, x = network(norm=False), normal(8, 16)
    optimizer = _adam(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run = TorchsWrapper(model)

    def backward() -> None:
        with amp.scale_loss(run(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()

    def step() -> None:
        optimizer.zero_grad()
        with run.no_sync():
            backward()
        backward()
        optimizer.step()

    without_waits(step)


@check()
def steps_of_our_wrapper_do_not_wait() -> None:
    """At O2, in small buckets."""
    one_rank()
    model, x = network(norm=False), normal(8, 16)
    optimizer = _adam(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    run = DistributedDataParallel(model, message_size=500)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(run(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    without_waits(step)


@check()
def a_parameter_without_a_gradient() -> None:
    """Is passed over by the wrapper's hooks."""
    one_rank()
    model = network(norm=False)
    model.extra = nn.Linear(3, 3).to(DEVICE)
    model.forward = lambda x: nn.Sequential(*[*model][:-1])(x)  # type: ignore[method-assign]
    run = DistributedDataParallel(model)
    for _ in range(3):
        run(normal(8, 16)).sum().backward()
    need(model.extra.weight.grad is None, "a gradient from nowhere")


@check(*((c, d) for c in (DistributedFusedAdam, DistributedFusedLAMB) for d in (F32, BF16, F16)))
def a_sharded_optimizer_counts_its_steps(make: Any, dtype: torch.dtype) -> None:
    """With apex.amp.GradScaler."""
    one_rank()
    model = network(norm=False).to(dtype)
    optimizer = make(model.parameters(), lr=0.01)
    scaler = amp.GradScaler(DEVICE.type, init_scale=64.0)
    for number in range(4):
        optimizer.zero_grad()
        loss = model(normal(8, 16, dtype=dtype, seed=number)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    need(all(bool(p.isfinite().all()) for p in model.parameters()), "a weight is not finite")
    need(scaler.outcome(optimizer).numbers()[1] == 4, "steps were lost")


@check(DistributedFusedAdam, DistributedFusedLAMB)
def steps_of_a_sharded_optimizer_do_not_wait(make: Any) -> None:
    """With their gradients in buckets."""
    one_rank()
    model, x = network(norm=False), normal(8, 16)
    optimizer = make(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    without_waits(step)


@check(*SHARDED)
def a_sharded_adam_is_near_adam(way: str) -> None:
    """In each way of keeping and sending."""
    one_rank()
    sharded, plain = network(norm=False), network(norm=False)
    optimizer = DistributedFusedAdam(sharded.parameters(), lr=0.01, **SHARDED[way])
    _all_close(_train(sharded, optimizer), _train(plain, _adam(plain)), 2e-2)


@check(F64, F16, BF16)
def a_default_dtype_changes_no_norm(dtype: torch.dtype) -> None:
    """A sum of squares in float16 would overflow at a norm of 256."""
    one_rank()
    norms = []
    for one in (dtype, F32):
        torch.set_default_dtype(one)
        param = nn.Parameter(torch.ones(64, 64, device=DEVICE, dtype=F32))
        optimizer = DistributedFusedAdam([param], lr=0.1)
        (param * 10.0).sum().backward()
        norms.append(optimizer.grad_norm())
        torch.set_default_dtype(F32)
    same(norms[:1], norms[1:], "norm")


@check()
def a_step_of_the_wrapper_is_captured() -> None:
    """Replays end with the bits of single steps."""
    one_rank()
    ends = []
    for in_a_graph in (True, False):
        model, x = network(norm=False), normal(8, 16)
        optimizer = _adam(model, capturable=True)
        run = DistributedDataParallel(model, message_size=500)

        def step(optimizer: Any = optimizer, run: Any = run, x: Tensor = x) -> None:
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()

        again: Callable[[], None] = step
        if in_a_graph:
            side = on_a_side_stream(step, 11)  # 11, as torch's own wrapper needs
            again = Captured(step, stream=side).replay
        for _ in range(0 if in_a_graph else 11):
            step()
        for number in range(3):
            x.copy_(normal(8, 16, seed=number))
            again()
        ends.append(copies(model.parameters()))
    first, second = ends
    same(first, second, "weights")


@check("with a device", "without a backend")
def a_group_may_be_made(how: str) -> None:
    """As torch's newer programs make it."""
    dist = torch.distributed
    if how == "with a device":
        one_rank(device_id=DEVICE)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(rank=0, world_size=1, store=store)
    model = network(norm=False)
    DistributedDataParallel(model)(normal(8, 16)).sum().backward()
    sharded = network(norm=False)
    optimizer = DistributedFusedAdam(sharded.parameters())
    sharded(normal(8, 16)).sum().backward()
    optimizer.step()


@check()
def ranks_without_gradients() -> None:
    """What ranks agree on is on the GPU: of a watch, and of a pass at O2."""
    dist = one_rank()
    model = network(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with debug.watch(model, optimizer) as watch:
        watch._group = dist.group.WORLD  # as process_group= sets it where there are several ranks
        optimizer.step()
    adam = _adam(model)
    options = {"opt_level": "O2", "verbosity": 0, "process_group": dist.group.WORLD}
    model, adam = amp.initialize(model, adam, **options)
    for number in range(3):
        adam.zero_grad()
        loss = model(normal(8, 16)).float().square().mean()
        with amp.scale_loss(loss, adam) as scaled:
            if number != 1:
                scaled.backward()
        adam.step()


@check()
def flat_calls_and_buffers() -> None:
    """Reducer, flat_dist_call, and buffers of the dtypes that NCCL can send."""
    dist = one_rank()
    model = network(norm=False)
    reducer = Reducer(model)
    model(normal(8, 16)).sum().backward()
    before = copies(gradients(model))
    reducer.reduce()
    same(gradients(model), before, "mean of one rank")
    flat_dist_call([normal(3), normal(4, dtype=F16), normal(5, dtype=BF16)], dist.broadcast, (0,))
    layer = nn.Linear(4, 4).to(DEVICE)
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, F16, BF16, F64)
    for n, dtype in enumerate(dtypes):
        layer.register_buffer(f"b{n}", torch.ones(3, dtype=dtype, device=DEVICE))
    DistributedDataParallel(layer)(normal(2, 4)).sum().backward()


@check()
def a_buffer_of_16_bit_integers() -> str:
    """Which NCCL cannot send: ours takes it, or torch's own wrapper does not either."""
    one_rank()
    layer = nn.Linear(4, 4, device="cpu", dtype=F32).to(DEVICE)
    layer.register_buffer("count", torch.ones(3, dtype=torch.int16, device=DEVICE))
    outcomes = {}
    for name, wrap in (("torch's", TorchsWrapper), ("ours", DistributedDataParallel)):
        try:
            wrap(layer)(normal(2, 4)).sum().backward()
            outcomes[name] = "runs"
        except (RuntimeError, ValueError, TypeError) as error:
            outcomes[name] = f"{type(error).__name__}: {str(error)[:80]}"
    said = ", ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
    need(outcomes["ours"] == "runs" or outcomes["torch's"] != "runs", said)
    return said


@check()
def a_module_on_the_cpu_is_refused() -> str:
    """NCCL sends nothing from there."""
    one_rank()
    if checking.DRY:
        raise checking.NotDry("gloo sends tensors of the CPU")
    try:
        DistributedDataParallel(network("cpu"))
    except (RuntimeError, ValueError) as error:
        return f"refused: {str(error)[:80]}"
    raise AssertionError("accepted")


@check("device", "type")
def a_default_device_changes_no_sampling(which: str) -> None:
    """parallel_state, seeds, samples and batches of apex.transformer."""
    from apex.transformer import parallel_state, tensor_parallel
    from apex.transformer._data import MegatronPretrainingRandomSampler

    one_rank()
    found: list[list[Tensor]] = []
    for one in (which, "none"):
        with default(one):
            parallel_state.initialize_model_parallel(1, 1)
            try:
                tensor_parallel.model_parallel_cuda_manual_seed(1)
                with tensor_parallel.get_cuda_rng_tracker().fork():
                    drawn = torch.randn(3, device=DEVICE, dtype=F32)
                words = torch.arange(6, device=DEVICE).view(2, 3)
                sent = tensor_parallel.broadcast_data(["text"], {"text": words}, torch.int64)
            finally:
                parallel_state.destroy_model_parallel()
            samples = next(iter(MegatronPretrainingRandomSampler(32, 0, 2, 0, 1)))
        found.append([drawn.cpu(), sent["text"].cpu(), torch.tensor(samples, device="cpu")])
    same(found[0], found[1], "numbers, words and samples")


class Slow(torch.autograd.Function):
    """Whose backward takes the GPU 0.2 s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Pass it on."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Pass it on late."""
        torch.cuda._sleep(300_000_000)
        return grad * 2.0


class OnTwoStreams(nn.Module):
    """One layer on a side stream, one on the current."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.side = nn.Linear(256, 256), nn.Linear(256, 256), torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            late = Slow.apply(self.a(x))
        early = self.b(x)
        here.wait_stream(self.side)
        return (late + early).sum()


@check()
def a_forward_on_two_streams() -> str:
    """A bucket is copied on the stream of its last hook; as right as torch's own wrapper."""
    one_rank()
    ends = {}
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda m: m,
        "ours": DistributedDataParallel,
        "torch's": TorchsWrapper,
    }
    for name, wrap in wrappers.items():
        torch.manual_seed(0)
        model = OnTwoStreams().to(DEVICE)
        run = wrap(model)
        for turn in range(3):
            model.zero_grad()
            run(normal(32, 256) * (turn + 1)).backward()
        torch.cuda.synchronize()
        ends[name] = copies(gradients(model))
    right = {
        name: all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(end, ends["plain"], strict=True))
        for name, end in ends.items()
    }
    need(right["ours"] or not right["torch's"], f"gradients are right: {right}")
    return f"gradients are right: {right}"


@check("FusedAdam", "FusedLAMB")
def fully_sharded_weights(name: str) -> None:
    """fully_shard in float16, with a scaler, without waits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one_rank()
    model, x = network(norm=False).half(), normal(8, 16, dtype=F16)
    fully_shard(model, mesh=init_device_mesh(DEVICE.type, (1,)))
    make = {"FusedAdam": FusedAdam, "FusedLAMB": FusedLAMB}[name]
    optimizer, scaler = make(model.parameters(), lr=0.01), amp.GradScaler(DEVICE.type, 64.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    with waits_refused():
        step()
    need(scaler.outcome(optimizer).numbers()[1] == 4, "steps were lost")
