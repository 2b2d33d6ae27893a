"""Operations on a GPU beside float64 on a CPU, lists of awkward tensors, tables in captures."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex import optimizers
from apex.contrib.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.mlp import MLP
from apex.multi_tensor_apply import multi_tensor_applier, release_captured
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.ops.lists.tensor_norms import l2_norms
from apex.ops.lists.unscale import unscale_into
from apex.optimizers import FusedAdam
from apex.transformer.functional import fused_apply_rotary_pos_emb
from tools.gpu import checking
from tools.gpu.checking import (
    BF16,
    DEVICE,
    F16,
    F32,
    Captured,
    Tensor,
    check,
    close,
    need,
    normal,
    on_a_side_stream,
    same,
)

LABELS = 33
# Largest rms of the error over the rms of the exact result. An H100 computes float32 products
# exactly enough for the first; the others are 2 and 3 roundings of 2**-11 and 2**-8.
ALLOWED = {F32: 3e-5, F16: 1e-2, BF16: 6e-2}


def _rotary(t: Tensor) -> Tensor:
    angles = torch.linspace(0, 3, 8 * 64, device=t.device, dtype=F32)
    return fused_apply_rotary_pos_emb(t, angles.view(8, 1, 1, 64))


def _xentropy(x: Tensor) -> Tensor:
    labels = torch.arange(LABELS, device=x.device)
    return SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, -1, x.dtype == F16)


def _linear_cross_entropy(x: Tensor, weight: Tensor) -> Tensor:
    labels = torch.arange(512, device=x.device)
    return linear_cross_entropy(x, weight, labels, chunk_size=128)


def _indexed(a: Tensor, b: Tensor) -> Tensor:
    return index_mul_2d(a, b, torch.arange(50, device=a.device) % 20)


class Attention(nn.Module):
    """One argument for each input."""

    def __init__(self, kind: Any, impl: str, norm: bool) -> None:
        super().__init__()
        self.inner = kind(64, 4, dropout=0.0, include_norm_add=norm, impl=impl)

    def forward(self, query: Tensor, key: Tensor | None = None) -> Tensor:
        """Attend to the key, or to the query itself."""
        key = query if key is None else key
        return self.inner(query, key, key, is_training=True)[0]


# A module or a function, and the shapes of its inputs.
CASES: dict[str, tuple[Callable[[], Any], Sequence[tuple[int, ...]]]] = {
    "mlp": (lambda: MLP([64, 96, 32]), [(7, 64)]),
    "fused dense": (lambda: FusedDense(64, 96), [(7, 64)]),
    "fused dense gelu dense": (lambda: FusedDenseGeluDense(64, 96, 32), [(7, 64)]),
    "xentropy": (lambda: _xentropy, [(LABELS, 5000)]),
    "linear cross entropy": (lambda: _linear_cross_entropy, [(512, 64), (12000, 64)]),
    "group norm": (lambda: GroupNorm(8, 64, act="silu"), [(2, 64, 9, 9)]),
    "index_mul_2d": (lambda: _indexed, [(20, 32), (50, 32)]),
    "rotary": (lambda: _rotary, [(8, 2, 4, 64)]),
    "layer norm, less memory": (lambda: FusedLayerNorm(768, memory_efficient=True), [(9, 768)]),
    **{
        f"{name}, {columns}": (partial(norm, columns), [(5, 3, columns)])
        for name, norm in (("layer norm", FusedLayerNorm), ("RMS norm", FusedRMSNorm))
        for columns in (7, 768, 1000, 8192, 40000)
    },
    **{
        f"{name}, {impl}, norm {norm}": (partial(Attention, kind, impl, norm), shapes)
        for name, kind, shapes in (
            ("self attention", SelfMultiheadAttn, [(9, 2, 64)]),
            ("encoder-decoder attention", EncdecMultiheadAttn, [(9, 2, 64), (5, 2, 64)]),
        )
        for impl in ("default", "fast")
        for norm in (False, True)
    },
}


@check(*((name, dtype) for name in CASES for dtype in (F32, F16, BF16)))
def is_near_float64(name: str, dtype: torch.dtype) -> None:
    """Values and every gradient."""
    make, shapes = CASES[name]
    torch.manual_seed(0)
    with torch.device("cpu"):
        run = make()
    exact = run
    if isinstance(run, nn.Module):
        run = run.to(DEVICE, dtype)
        exact = copy.deepcopy(run).cpu().double()
    inputs = [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]
    found = _with_gradients(run, inputs)
    for n, pair in enumerate(
        zip(found, _with_gradients(exact, [x.cpu().double() for x in inputs]), strict=True)
    ):
        if pair[0] is not None:
            close(*pair, ALLOWED[dtype], f"result {n}")


def _with_gradients(run: Any, inputs: list[Tensor]) -> list[Any]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    params = [*run.parameters()] if isinstance(run, nn.Module) else []
    y = run(*inputs)
    upstream = normal(*y.shape, seed=9, device=y.device, dtype=F32).to(y.dtype)
    return [y, *torch.autograd.grad(y, [*inputs, *params], upstream, allow_unused=True)]


@check()
def what_contrib_has_runs() -> None:
    """Modules that are compared by tests marked gpu, or have no sum in float64."""
    from apex.contrib.bottleneck import Bottleneck
    from apex.contrib.conv_bias_relu import ConvBiasReLU
    from apex.contrib.groupbn import BatchNorm2d_NHWC
    from apex.RNN import GRU, LSTM, ReLU, Tanh, mLSTM

    def leaf(*shape: int) -> Tensor:
        return normal(*shape).requires_grad_()

    Bottleneck(64, 16, 64).to(DEVICE)(leaf(2, 64, 8, 8)).sum().backward()
    convolved = ConvBiasReLU(leaf(2, 8, 9, 9), leaf(4, 8, 3, 3), leaf(1, 4, 1, 1), 1, 1)
    convolved.sum().backward()
    BatchNorm2d_NHWC(16).to(DEVICE)(leaf(2, 5, 5, 16)).sum().backward()
    for make in (LSTM, GRU, ReLU, Tanh, mLSTM):
        make(8, 8, 2).to(DEVICE)(normal(5, 3, 8))[0].sum().backward()
    labels, one = torch.zeros(9, dtype=torch.long, device=DEVICE), torch.ones(1, device=DEVICE)
    focal_loss(leaf(9, 91), labels, one, 91, 0.25, 2.0, 0.0).backward()


@check()
def functions_of_compiled_apex_run() -> None:
    """amp_C and apex_C, with an overflow."""
    import amp_C
    import apex_C

    flag = torch.zeros(1, dtype=torch.int, device=DEVICE)
    xs = [normal(30 + n, seed=n) for n in range(9)]
    ys = [torch.empty_like(x) for x in xs]
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [xs, xs, ys], 1.0, 2.0, -1)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [xs, ys], 0.5)
    same(ys, [x * 0.5 for x in xs], "scaled")
    _, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [xs], True)
    close(each, torch.stack([x.norm() for x in xs]), 1e-6, "norms")
    need(int(flag) == 0, "an overflow was found where there is none")
    same(apex_C.unflatten(apex_C.flatten(xs), xs), xs, "flattened")
    xs[3][0] = float("inf")
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [xs, ys], 0.5)
    need(int(flag) == 1, "an overflow was not found")


# --- lists of awkward tensors ---------------------------------------------------------------------


@check("FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD")
def empty_tensors_are_stepped(name: str) -> None:
    """Beside others, twice."""
    shapes: list[tuple[int, ...]] = [(0,), (5,), (3, 0), (9000,), ()]
    params = [nn.Parameter(normal(*shape, seed=n)) for n, shape in enumerate(shapes)]
    optimizer = getattr(optimizers, name)(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    need(all(bool(param.isfinite().all()) for param in params), "a weight is not finite")
    need(
        l2_norms([torch.empty(0, device=DEVICE)]).tolist() == [0.0], "the norm of nothing is not 0"
    )


@check(F32, F16, BF16)
def views_that_are_not_aligned_give_the_same_bits(dtype: torch.dtype) -> None:
    """And nothing is written beside them."""
    whole = normal(70000, dtype=dtype)
    views = [whole[1 + 7 * n :][:size] for n, size in enumerate((8192, 5, 8193, 20001))]
    close(l2_norms(views), torch.stack([view.float().norm() for view in views]), 1e-5, "norms")
    ends = []
    for offset in (0, 1, 3):
        store, grads = (torch.zeros(20020, dtype=dtype, device=DEVICE) for _ in range(2))
        param = nn.Parameter(store[offset : offset + 20000].copy_(normal(20000, dtype=dtype)))
        grad = grads[offset + 1 : offset + 20001]
        param.grad = grad.copy_(normal(20000, seed=1, dtype=dtype))
        optimizer = FusedAdam([param], lr=0.01)
        optimizer.step()
        optimizer.step()
        ends.append(param.detach().clone())
        need(not bool(store[:offset].any() or store[offset + 20000 :].any()), "wrote beside it")
    same(ends[1:], [ends[0]] * 2, "weights")


@check()
def very_many_tensors_are_stepped() -> None:
    """Of at most 12 elements each."""
    count = 200 if checking.DRY else 20_000
    params = [nn.Parameter(torch.full((n % 13,), 1.0, device=DEVICE)) for n in range(count)]
    optimizer = FusedAdam(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    close(params[-1], torch.full_like(params[-1], 0.8), 1e-5, "weights")


@check()
def unscale_finds_the_last_element() -> None:
    """Of sizes around a block of its kernel."""
    grads = [normal(n, dtype=F16) for n in (1, 8191, 8192, 8193, 100000)]
    outs = [torch.empty(grad.shape, device=DEVICE, dtype=F32) for grad in grads]
    flag = torch.zeros((), device=DEVICE, dtype=F32)
    unscale_into(grads, outs, 0.25, flag)
    same(outs, [grad.float() * 0.25 for grad in grads], "unscaled")
    need(flag.item() == 0, "an overflow was found where there is none")
    grads[4][99999] = float("nan")
    unscale_into(grads, outs, 0.25, flag)
    need(flag.item() == 1, "an overflow was not found")


@check(65535, 65536, 300001)
def many_rows(rows: int) -> None:
    """Around the largest second dimension of a grid."""
    x = normal(rows // 100 if checking.DRY else rows, 8).requires_grad_()
    norm = FusedLayerNorm(8).to(DEVICE)
    norm(x).sum().backward()
    close(norm(x), F.layer_norm(x, (8,)), 1e-5, "layer norm")
    labels = torch.zeros(len(x), dtype=torch.long, device=DEVICE)
    losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.0, -1)
    close(losses, F.cross_entropy(x, labels, reduction="none"), 1e-5, "losses")


@check(300_000, 9_000_000)
def long_rows(columns: int) -> None:
    """Far longer than a block."""
    columns = columns // 100 if checking.DRY else columns
    x = normal(2, columns).requires_grad_()
    y = FusedLayerNorm(columns).to(DEVICE)(x)
    y.square().sum().backward()
    close(y, F.layer_norm(x.detach().double(), (columns,)), 1e-4, "layer norm")
    labels = torch.tensor([0, columns - 1], device=DEVICE)
    losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.0, -1)
    losses.sum().backward()
    close(losses, F.cross_entropy(x.double(), labels, reduction="none"), 1e-5, "losses")


@check()
def strided_and_expanded_inputs() -> None:
    """Transposed, every second row, one column expanded."""
    base, norm = normal(64, 96).requires_grad_(), FusedLayerNorm(64).to(DEVICE)
    for x in (base.t(), base.t()[::2], base[:, :1].t().expand(96, 64)):
        y = norm(x)
        y.sum().backward()
        close(y, F.layer_norm(x, (64,)), 1e-5, "layer norm")
    for x in (base.t(), base[::2, 1:], base[:, :1].expand(64, 96)):
        labels = torch.zeros(len(x), dtype=torch.long, device=DEVICE)
        losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, -1)
        exact = F.cross_entropy(x, labels, reduction="none", label_smoothing=0.1)
        close(losses, exact, 1e-5, "losses")


@check()
def labels_out_of_range_give_nan() -> None:
    """And no illegal address, after which nothing would run."""
    if checking.DRY:  # torch's definition on a CPU raises
        return
    x = normal(4, 70000).requires_grad_()
    labels = torch.tensor([0, 70000, -5, 2**40], device=DEVICE)
    losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.0, -1)
    losses.nan_to_num().sum().backward()
    need(losses.isnan().tolist() == [False, True, True, True], f"losses {losses.tolist()}")


# --- tables of addresses, uploaded in a capture ---------------------------------------------------


def _column(count: int = 50, seed: int = 0) -> list[Tensor]:
    return [normal(37 + n, seed=seed + n) for n in range(count)]


def _norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors])


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
        close(captured.out, _norms(xs), 1e-6, f"replay {turn}, {len(filled)} filled")
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
    close(found, _norms(xs), 1e-6, "replayed before the other stream's upload")


@check()
def graphs_share_a_pool_and_are_freed() -> None:
    """20 graphs with 4 MiB each."""
    xs, ys = _column(seed=5000), _column(seed=6000)
    l2_norms(_column(2))
    first = Captured(lambda: l2_norms(xs))
    second = Captured(lambda: l2_norms(ys), pool=first.graph.pool())
    for one, column in ((first, xs), (second, ys)) * 2:
        one.replay()
        close(one.out, _norms(column), 1e-6, "norms")
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
    for _ in range(3 + checking.DRY):  # where a capture is a step as well
        made[1].step()
    captured = Captured(made[0].step, stream=side)
    for _ in range(3):
        captured.replay()
        made[0].step()
        made[1].step()
        made[1].step()
    same(captured_params, eager_params, "weights")
