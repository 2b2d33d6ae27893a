"""Times beside torch's: trainings at each level, steps and lists, operations, the host's calls.

The rows of a group run in turns, so that a slower minute of the machine meets all of them; a row is
the median of its turns. The group's control, one of torch's rows, is also timed before and after
all others. If the two differ by more than 10 %, the rows of the group are marked as unsteady.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp, optimizers
from apex.catalogue.entry import IMAGES, MATRICES, Op
from apex.catalogue.ops import OPS
from apex.catalogue.optimizers import beside_torch
from apex.commands.info.clocks import on_gpu
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.ops import _runtime
from apex.transformer.functional import fused_apply_rotary_pos_emb
from benchmarks.turns import ratio, take_turns
from tools.gpu import checking
from tools.gpu.checking import BF16, DEVICE, F16, F32, LEVELS, Tensor, on_a_side_stream
from tools.gpu.part import in_a_line
from tools.gpu.rows import MISSING, NOT_DRY, RIGHT, UNSTEADY, WRONG, Rows

DIFFER = 0.10  # of the two times of a control
WARM_UP = 3
Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Work that is timed, and the row that it is compared with; made when its group begins."""

    name: str
    make: Callable[[], Work]
    over: str | None = None


@dataclass(frozen=True)
class Clock:
    """How often work is repeated in a turn, how many turns; whether the host's time counts.

    The two times of a control may ``differ`` by this share.
    """

    repeat: int
    turns: int
    host: bool = False
    differ: float = DIFFER

    def __call__(self, work: Work) -> float:
        """Milliseconds of one call: until the GPU has done it, or until the calls returned."""
        found = on_gpu(work, self.repeat)
        return found.host_ms if self.host else found.ms


def measure(which: str, rows: Rows, *, dry: bool) -> None:
    """Time the groups of a part."""
    for group, (made, clock) in GROUPS[which]().items():
        if dry:  # one call each, whose time means nothing
            clock = Clock(1, 1, clock.host, differ=math.inf)
        rows.note(group)
        time_group(group, made, clock, rows)
        torch.cuda.empty_cache()


def time_group(group: str, made: list[Row], clock: Clock, rows: Rows) -> None:
    """Time rows in turns; the first is the control."""
    works = _warmed(group, made, rows)
    control = made[0].name
    if control not in works:
        return
    before = clock(works[control])
    so_far: dict[str, list[float]] = {name: [] for name in works}
    rows.content["unfinished"] = {group: so_far}  # what a process leaves that is killed in a group

    def timed(name: str) -> float:
        so_far[name].append(clock(works[name]))
        rows.save()
        return so_far[name][-1]

    taken = take_turns({name: partial(timed, name) for name in works}, clock.turns)
    del rows.content["unfinished"]
    after = clock(works[control])
    steady = abs(after / before - 1) <= clock.differ
    said = "" if steady else f"{control} took {before:.4f} ms before and {after:.4f} ms after"
    for row in made:
        if row.name not in works:
            continue
        ms = statistics.median(taken[row.name])
        found: dict[str, Any] = {"ms": ms, "turns": taken[row.name], "host": clock.host}
        if row.over in works:
            found.update(over=row.over, ratio=ratio(taken[row.name], taken[row.over]).median)
        rows.add(f"{group}: {row.name}", RIGHT if steady else UNSTEADY, said, **found)


def _warmed(group: str, made: list[Row], rows: Rows) -> dict[str, Work]:
    """Make the work of each row; what cannot run is a row that says why."""
    works: dict[str, Work] = {}
    for row in made:
        try:
            work = row.make()
            for _ in range(WARM_UP):
                work()
            torch.cuda.synchronize()
        except checking.NotDry as reason:
            rows.add(f"{group}: {row.name}", NOT_DRY, str(reason))
        except ModuleNotFoundError as error:
            rows.add(f"{group}: {row.name}", MISSING, f"{error.name} is not installed")
        except Exception as error:  # noqa: BLE001  the others are timed
            rows.add(f"{group}: {row.name}", WRONG, in_a_line(error))
        else:
            works[row.name] = work
    return works


# --- trainings ------------------------------------------------------------------------------------

FP32, TF32, TORCH_F16, TORCH_BF16 = "fp32", "TF32", "torch float16", "torch bfloat16"
BESIDE = dict(zip(LEVELS, (FP32, *[TORCH_F16] * 3, *[TORCH_BF16] * 2), strict=True))


def _deep(width: int = 64) -> tuple[nn.Module, Tensor, Tensor]:
    layers: list[nn.Module] = []
    for _ in range(30):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(DEVICE)
    x = torch.randn(64, width, device=DEVICE)
    return model, x, torch.randint(0, 10, (64,), device=DEVICE)


class Transformer(nn.Module):
    """Of torch's layers, with a vocabulary."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, **options)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Return a row of scores for each position."""
        return self.out(self.layers(self.embedding(x))).flatten(0, 1)


def _transformer() -> tuple[nn.Module, Tensor, Tensor]:
    layers, width, words, shape = (12, 768, 30528, (64, 128))
    if checking.DRY:
        layers, width, words, shape = (1, 64, 100, (2, 8))
    model = Transformer(layers, width, words).to(DEVICE)
    x, labels = (torch.randint(0, words, shape, device=DEVICE) for _ in range(2))
    return model, x, labels


def _torchs(
    make: Any, dtype: torch.dtype | None, tf32: bool = False, capturable: bool = False
) -> Callable[[], Work]:
    def build() -> Work:
        model, x, labels = make()
        options: Any = {"lr": 1e-5, "fused": True, "capturable": capturable}
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype is F16)

        def step() -> None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype or BF16, enabled=dtype is not None):
                loss = F.cross_entropy(model(x).float(), labels.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    return build


def _level(make: Any, level: str, capturable: bool = False) -> Callable[[], Work]:
    def build() -> Work:
        model, x, labels = make()
        options: Any = {"lr": 1e-5, "capturable": capturable}
        optimizer = optimizers.FusedAdam(model.parameters(), **options)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

        def step() -> None:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), labels.flatten())
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        return step

    return build


def _of(make: Any) -> list[Row]:
    return [
        Row(FP32, _torchs(make, None)),
        Row(TF32, _torchs(make, None, tf32=True), FP32),
        Row(TORCH_F16, _torchs(make, F16), FP32),
        Row(TORCH_BF16, _torchs(make, BF16), FP32),
        *(Row(level, _level(make, level), BESIDE[level]) for level in LEVELS),
    ]


def trainings() -> dict[str, tuple[list[Row], Clock]]:
    """A network whose time is the host's, and a transformer of BERT's size."""
    return {
        "30 small layers": (_of(_deep), Clock(10, 5)),
        "30 small layers, host": (_of(_deep), Clock(10, 5, host=True)),
        "transformer of 110M": (_of(_transformer), Clock(4, 4)),
    }


# --- steps in CUDA graphs -------------------------------------------------------------------------


def _in_a_graph(build: Callable[[], Work]) -> Callable[[], Work]:
    def captured() -> Work:
        step = build()
        side = on_a_side_stream(step, WARM_UP)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
        return partial(_replayed, graph, step)

    return captured


def _replayed(graph: torch.cuda.CUDAGraph, _: Work) -> None:
    """Replay. It reads what the step holds, a model and its inputs, so this is held as well."""
    graph.replay()


def _by_capture(build: Callable[[], Work]) -> Callable[[], Work]:
    """``amp.capture``: the graph, what is looked at before a replay, and the copies."""

    def captured() -> Work:
        step = amp.capture(build())
        for _ in range(WARM_UP + 1):
            step()
        if not step.replays:
            raise RuntimeError(repr(step))
        return step

    return captured


def _reduced_overhead() -> Callable[[], Work]:
    """Forward and backward in torch.compile's graphs; optimizer and scaler outside."""

    def make() -> tuple[Any, Tensor, Tensor]:
        if checking.DRY:
            raise checking.NotDry("nothing is compiled")
        model, x, labels = _transformer()
        return torch.compile(model, mode="reduce-overhead"), x, labels

    return _torchs(make, BF16)


def _beside_graphs(make: Any, levels: Iterable[str]) -> list[Row]:
    build = _torchs(make, BF16, capturable=True)
    rows = [Row(TF32, _torchs(make, None, tf32=True)), Row(TORCH_BF16, build)]
    rows.append(Row(f"{TORCH_BF16}, graph", _in_a_graph(build), TORCH_BF16))
    for level in levels:
        build = _level(make, level, capturable=True)
        rows += [Row(level, build, TF32), Row(f"{level}, graph", _in_a_graph(build), level)]
        rows.append(Row(f"{level}, amp.capture", _by_capture(build), f"{level}, graph"))
    return rows


def captured() -> dict[str, tuple[list[Row], Clock]]:
    """What a graph leaves of a step, over the step; a large one keeps its activations (10 GB).

    A bare replay is the time of the kernels; ``amp.capture`` is to take 10 % more at most. To
    compile takes longest, so that comes last.
    """
    compiled = Row("torch bfloat16, reduce-overhead", _reduced_overhead(), TORCH_BF16)
    large, name = Clock(4, 4), "graph, transformer of 110M"
    return {
        "graph, 30 small layers": (_beside_graphs(_deep, LEVELS), Clock(10, 5)),
        f"{name}, O2": (_beside_graphs(_transformer, ["O2"]), large),
        f"{name}, O5": ([*_beside_graphs(_transformer, ["O5"]), compiled], large),
    }


# --- steps and lists ------------------------------------------------------------------------------


def _shapes(layers: int, width: int, words: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(words, width), (1024, width)]
    for _ in range(layers):
        found += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        found += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width)]
        found += [(width,)]
    return found


def _lists() -> dict[str, list[tuple[int, ...]]]:
    if checking.DRY:
        return {"5 tensors": [(8, 8)] * 5}
    return {"355M": _shapes(24, 1024, 50304), "300 of 8 x 8": [(8, 8)] * 300}


def _steps(shapes: list[tuple[int, ...]]) -> list[Row]:
    params = [nn.Parameter(torch.randn(shape, device=DEVICE) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    every = beside_torch()
    torchs = {f"torch {name}.step": make for _, name, make in every.values()}
    ours = {name: (make, f"torch {other}.step") for name, (make, other, _) in every.items()}
    return [
        *(Row(name, partial(_step_of, make, params)) for name, make in torchs.items()),
        *(
            Row(f"{k}.step", partial(_step_of, make, params), over)
            for k, (make, over) in ours.items()
        ),
    ]


def _step_of(make: Callable[[Any], Any], params: list[nn.Parameter]) -> Work:
    return make(params).step


def _functions(shapes: list[tuple[int, ...]]) -> list[Row]:
    import amp_C

    from apex.multi_tensor_apply import multi_tensor_applier

    tensors = [torch.randn(shape, device=DEVICE) for shape in shapes]
    outs = [torch.empty_like(tensor) for tensor in tensors]
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def norm() -> object:
        return multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [tensors], False)

    def scale() -> object:
        return multi_tensor_applier(amp_C.multi_tensor_scale, flag, [tensors, outs], 0.5)

    return [
        Row("torch norms", lambda: lambda: torch._foreach_norm(tensors)),
        Row("torch products", lambda: lambda: torch._foreach_mul(tensors, 0.5)),
        Row("multi_tensor_l2norm", lambda: norm, "torch norms"),
        Row("multi_tensor_scale", lambda: scale, "torch products"),
    ]


def lists() -> dict[str, tuple[list[Row], Clock]]:
    """Steps of optimizers and functions of amp_C."""
    found: dict[str, tuple[list[Row], Clock]] = {}
    for name, shapes in _lists().items():
        found[f"step, {name}"] = (_steps(shapes), Clock(10, 7))
        found[f"lists, {name}"] = (_functions(shapes), Clock(10, 7))
    return found


# --- operations -----------------------------------------------------------------------------------


def _both_ways(run: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], Work]:
    """Forward and backward with respect to the leaves."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    upstream = torch.ones_like(run(*leaves))
    return lambda: lambda: torch.autograd.grad(run(*leaves), leaves, upstream)


def _norms(rows: int, columns: int, dtype: torch.dtype) -> list[Row]:
    x = torch.randn(rows, columns, device=DEVICE, dtype=dtype)
    found = []
    for ours, theirs in ((FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)):
        name = theirs.__name__
        made = [kind(columns).to(DEVICE, dtype) for kind in (theirs, ours)]
        found.append(Row(f"torch {name}", _both_ways(made[0], x)))
        found.append(Row(ours.__name__, _both_ways(made[1], x), f"torch {name}"))
    return found


def _losses(rows: int, classes: int, dtype: torch.dtype) -> list[Row]:
    x = torch.randn(rows, classes, device=DEVICE, dtype=dtype)
    labels = torch.randint(1, classes, (rows,), device=DEVICE)

    def theirs(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), labels, reduction="none", label_smoothing=0.1)

    def ours(x: Tensor) -> Tensor:
        return SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, 0, True)

    name = "torch cross_entropy"
    return [Row(name, _both_ways(theirs, x)), Row("xentropy", _both_ways(ours, x), name)]


def _rotary(length: int, heads: int) -> list[Row]:
    t = torch.randn(length, 2, heads, 64, device=DEVICE, dtype=BF16)
    angles = torch.randn(length, 1, 1, 64, device=DEVICE)

    def theirs(t: Tensor) -> Tensor:
        turned = torch.cat((-t[..., 32:], t[..., :32]), -1)
        return t * angles.cos().to(t.dtype) + turned * angles.sin().to(t.dtype)

    def ours(t: Tensor) -> Tensor:
        return fused_apply_rotary_pos_emb(t, angles)

    name = "rotary in torch"
    return [Row(name, _both_ways(theirs, t)), Row("rotary", _both_ways(ours, t), name)]


def ops() -> dict[str, tuple[list[Row], Clock]]:
    """Forward and backward of sizes at which a GPU is busy."""
    clock, small = Clock(20, 7), checking.DRY
    found: dict[str, tuple[list[Row], Clock]] = {}
    for rows, columns in [(4, 64)] if small else [(16384, 768), (8192, 4096), (2048, 16384)]:
        for dtype in (BF16, F32):
            made = _norms(rows, columns, dtype)
            found[f"{rows} x {columns}, {str(dtype)[6:]}"] = (made, clock)
    for rows, classes in [(4, 64)] if small else [(8192, 32000), (2048, 128256)]:
        found[f"{rows} x {classes} classes"] = (_losses(rows, classes, BF16), clock)
    found["rotary"] = (_rotary(4 if small else 4096, 2 if small else 32), clock)
    return found


# What tuned kernels are judged by, bfloat16; sizes are those of `python -m benchmarks.kernels`.
ANCHORS = (
    ("rms_norm", "middle", (20, 96)),
    ("rms_norm", "wide", (2, 8200)),
    ("layer_norm", "wide", (2, 8200)),
    ("group_norm, SiLU", "middle", (2, 32, 6, 4)),
    ("group_norm, SiLU", "wide", (2, 32, 6, 4)),
)


def anchors() -> dict[str, tuple[list[Row], Clock]]:
    """Kernels, at any preference, beside torch and torch.compile: forward and backward.

    Last, algorithms that are off by default until these rows decide.
    """
    found: dict[str, tuple[list[Row], Clock]] = {}
    for name, of, small in ANCHORS:
        op = next(op for op in OPS if op.name == name)
        sizes = MATRICES if op.layout == torch.contiguous_format else IMAGES
        (shape,) = [small] if checking.DRY else sizes[of](True)
        size = " x ".join(map(str, shape))
        rows = [
            Row("torch", partial(_beside, op, shape, op.theirs)),
            Row("torch.compile", partial(_beside, op, shape, None), "torch"),
            Row("apex", partial(_beside, op, shape, op.ours), "torch"),
        ]
        found[f"anchor, {name}, {of}, {size}"] = (rows, Clock(20, 7))
    found["anchor, Muon, 48 matrices"] = (_muons(), Clock(10, 7))
    found["anchor, Muon, 48 matrices, host"] = (_muons(), Clock(10, 7, host=True))
    three = (20, 8, 50) if checking.DRY else (4096, 4096, 128256)
    found[f"anchor, linear loss, {' x '.join(map(str, three))}"] = (
        _linear_losses(*three), Clock(4, 5),
    )  # fmt: skip
    return found


def _linear_losses(rows: int, features: int, classes: int) -> list[Row]:
    """The ways of `linear_cross_entropy`, beside torch's with all logits; made when they run."""

    def torchs(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    def made(run: Callable[..., Tensor]) -> Callable[[], Work]:
        def build() -> Work:
            x = torch.randn(rows, features, device=DEVICE, dtype=BF16)
            weight = torch.randn(classes, features, device=DEVICE, dtype=BF16) * 0.02
            labels = torch.randint(1, classes, (rows,), device=DEVICE)
            return _both_ways(lambda x, weight: run(x, weight, labels), x, weight)()

        return build

    def compiled() -> Work:
        if checking.DRY:
            raise checking.NotDry("nothing is compiled")
        return made(torch.compile(torchs))()

    def ours(**options: Any) -> Callable[[], Work]:
        return made(partial(linear_cross_entropy, **options))

    name = "torch, all logits"
    return [
        Row(name, made(torchs)),
        Row("torch.compile", compiled, name),
        Row("linear_cross_entropy", ours(), name),
        Row("compact", ours(acc_policy="compact"), "linear_cross_entropy"),
        Row(
            "compact, float32 sum", ours(acc_policy="compact", acc_dtype=F32),
            "linear_cross_entropy",
        ),
    ]  # fmt: skip


def _muons() -> list[Row]:
    """Steps of 48 matrices of width 768, those of a transformer of twelve layers."""
    width, layers = (8, 1) if checking.DRY else (768, 12)
    shapes = [(width, width)] * 2 + [(4 * width, width), (width, 4 * width)]

    def made(kind: Callable[[Any], Any]) -> Callable[[], Work]:
        def build() -> Work:
            params = [nn.Parameter(torch.randn(s, device=DEVICE) * 0.02) for s in shapes * layers]
            for param in params:
                param.grad = torch.randn_like(param) * 1e-3
            step: Work = kind(params).step
            return step

        return build

    gram = partial(optimizers.FusedMuon, ns_algorithm="gram_newton_schulz")
    return [
        Row("torch Muon.step", made(torch.optim.Muon)),
        Row("FusedMuon.step", made(optimizers.FusedMuon), "torch Muon.step"),
        Row("FusedMuon.step, gram", made(gram), "FusedMuon.step"),
    ]


def _beside(op: Op, shape: tuple[int, ...], function: Callable[..., Tensor] | None) -> Work:
    """Work of a function, or of torch's compiled; tensors are made when the group begins."""
    if function is None:
        if checking.DRY:
            raise checking.NotDry("nothing is compiled")
        torch._dynamo.reset()  # a shape of its own, not one of changing sizes
        function = torch.compile(op.theirs, dynamic=False)
    leaves, rest = op.inputs(shape, BF16, DEVICE)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    upstream = torch.ones_like(function(*leaves, *rest))
    kernels = function is op.ours and not checking.DRY

    def work() -> object:
        with _runtime.use("triton") if kernels else contextlib.nullcontext():
            return torch.autograd.grad(function(*leaves, *rest), leaves, upstream)

    return work


# --- the host -------------------------------------------------------------------------------------


class Empty(torch.autograd.Function):
    """Allocates what a layer norm does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return an output that nothing is written to."""
        ctx.save_for_backward(x, weight)
        ctx.statistics = torch.empty((2, len(x)), dtype=F32, device=x.device)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients that nothing is written to."""
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _with_kernels(make: Callable[[], Work]) -> Callable[[], Work]:
    """Make work that runs the kernels at any size."""

    def build() -> Work:
        if checking.DRY:
            raise checking.NotDry("kernels are not compiled")
        inner = make()

        def work() -> None:
            with _runtime.use("triton"):
                inner()

        return work

    return build


def _launches() -> list[Row]:
    """Where the host's time of a layer norm goes: its function, its launcher, Triton's launch."""
    x, dy = (torch.randn(64, 1024, device=DEVICE, dtype=BF16) for _ in range(2))
    theirs: Any = nn.LayerNorm(1024).to(DEVICE, BF16)
    ours: Any = FusedLayerNorm(1024).to(DEVICE, BF16)
    leaves = (x, ours.weight, ours.bias)

    def without_grad() -> Work:
        return torch.no_grad()(lambda: ours(x))

    def launcher(way: str) -> Callable[[], Work]:
        def make() -> Work:
            from apex.kernels import row_norms
            from apex.kernels._launching import cdiv
            from apex.kernels.row_norms.kernels import row_norm_forward as kernel

            weight, bias, shape = ours.weight.detach(), ours.bias.detach(), (1024,)
            given = (x, weight, bias, shape, 1e-5, True, BF16)
            y, mean, rstd = row_norms.forward(*given)
            saved: Any = {"weight": weight, "bias": bias, "rstd": rstd, "x": x, "mean": mean}
            options: Any = {"shape": shape, "eps": 1e-5, "centered": True, "x_dtype": BF16}
            rows, block, warps = row_norms._tile(1024)
            launched = (x, weight, bias, y, mean, rstd, 64, 2048, 1e-5, True, rows, block)
            grid = (cdiv(64, rows), 1, 1)
            ways: dict[str, Work] = {
                "forward": lambda: row_norms.forward(*given),
                "backward": lambda: row_norms.backward(dy, [True] * 3, **saved, **options),
                "launch": lambda: kernel[grid](*launched, num_warps=warps),
            }
            if way == "compiled":
                found = kernel[grid](*launched, num_warps=warps)
                stream, nothing = torch.cuda.current_stream().cuda_stream, (None, None, None)
                fixed = (*grid, stream, found.function, found.packed_metadata, *nothing)
                return lambda: found.run(*fixed, *launched)
            return ways[way]

        return _with_kernels(make)

    name = "torch LayerNorm"
    return [
        Row(name, _both_ways(theirs, x)),
        Row("one function of torch", lambda: lambda: dy.add(1), name),
        Row(
            "torch.empty", lambda: lambda: torch.empty((64, 1024), dtype=BF16, device=DEVICE), name
        ),
        Row("as called", _both_ways(ours, x), name),
        Row("empty autograd.Function", _both_ways(Empty.apply, *leaves), name),
        Row("kernels", _with_kernels(_both_ways(ours, x)), name),
        Row("kernels, no_grad", _with_kernels(without_grad), name),
        Row("launcher, forward", launcher("forward"), name),
        Row("launcher, backward", launcher("backward"), name),
        Row("Triton's launch", launcher("launch"), name),
        Row("Triton's compiled launch", launcher("compiled"), name),
    ]


def host() -> dict[str, tuple[list[Row], Clock]]:
    """Time until calls return, where the GPU has next to nothing to do."""
    clock = Clock(50, 9, host=True)
    shapes: list[tuple[int, ...]] = [(8, 8)] * (5 if checking.DRY else 300)
    return {
        "host, 64 x 1024": (_launches(), Clock(100, 7, host=True)),
        "host, 8 x 64": (_norms(8, 64, BF16), clock),
        "host, 8 x 64 classes": (_losses(8, 64, BF16), clock),
        "host, 300 of 8 x 8": (_steps(shapes), clock),
        "host, lists of 300": (_functions(shapes), clock),
    }


GROUPS: dict[str, Callable[[], dict[str, tuple[list[Row], Clock]]]] = {
    "trainings": trainings,
    "captured": captured,
    "lists": lists,
    "ops": ops,
    "anchors": anchors,
    "host": host,
}
