"""Operations on a GPU beside float64 on a CPU and torch's own; lists of awkward tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from apex.contrib.transducer import TransducerLoss
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.mlp import MLP
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.ops import _runtime
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
    F64,
    Tensor,
    check,
    need,
    no_farther,
    normal,
    off,
    same,
)

LABELS = 33
SMOOTHING = 0.1


def _rotary(t: Tensor) -> Tensor:
    angles = torch.linspace(0, 3, 8 * 64, device=t.device, dtype=F32)
    return fused_apply_rotary_pos_emb(t, angles.view(8, 1, 1, 64))


def _xentropy(x: Tensor) -> Tensor:
    labels = torch.arange(LABELS, device=x.device)
    return SoftmaxCrossEntropyLoss.apply(x, labels, SMOOTHING, -1, x.dtype == F16)


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


# --- torch's own functions, with the parameters of a module of ours -------------------------------


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == F64 else x.float()


def _torchs_rotary(t: Tensor) -> Tensor:
    angles = torch.linspace(0, 3, 8 * 64, device=t.device, dtype=F32).view(8, 1, 1, 64)
    turned = torch.cat((-t[..., 32:], t[..., :32]), -1)
    return t * angles.cos().to(t.dtype) + turned * angles.sin().to(t.dtype)


def _torchs_xentropy(x: Tensor) -> Tensor:
    labels = torch.arange(LABELS, device=x.device)
    return F.cross_entropy(_wide(x), labels, reduction="none", label_smoothing=SMOOTHING)


def _torchs_linear_cross_entropy(x: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(_wide(F.linear(x, weight)), torch.arange(512, device=x.device))


def _torchs_indexed(a: Tensor, b: Tensor) -> Tensor:
    return a[torch.arange(50, device=a.device) % 20] * b


def _torchs_mlp(m: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        for weight, bias in zip(m.weights, m.biases, strict=True):
            x = F.linear(x, weight, bias).relu()
        return x

    return run


def _torchs_dense_gelu_dense(m: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        between = F.gelu(F.linear(x, m.weight1, m.bias1), approximate="tanh")
        return F.linear(between, m.weight2, m.bias2)

    return run


def _torchs_group_norm(m: Any) -> Any:
    return lambda x: F.silu(F.group_norm(x, m.num_groups, m.weight, m.bias, m.eps))


def _torchs_norm(m: Any) -> Any:
    shape = tuple(m.normalized_shape)
    if isinstance(m, FusedRMSNorm):
        return lambda x: F.rms_norm(x, shape, m.weight, m.eps)
    return lambda x: F.layer_norm(x, shape, m.weight, m.bias, m.eps)


def _definition(m: Any) -> Any:
    """Of modules that torch has not: their formula in torch's functions, on this device."""

    def run(*inputs: Tensor) -> Tensor:
        with _runtime.use("reference"):
            return m(*inputs)

    return run


@dataclass(frozen=True)
class Case:
    """A module or a function, the shapes of its inputs, and torch's, which may get the module."""

    make: Callable[[], Any]
    shapes: Sequence[tuple[int, ...]]
    torchs: Callable[[Any], Any] = _definition


CASES: dict[str, Case] = {
    "mlp": Case(lambda: MLP([64, 96, 32]), [(7, 64)], _torchs_mlp),
    "fused dense": Case(
        lambda: FusedDense(64, 96), [(7, 64)], lambda m: lambda x: F.linear(x, m.weight, m.bias)
    ),
    "fused dense gelu dense": Case(
        lambda: FusedDenseGeluDense(64, 96, 32), [(7, 64)], _torchs_dense_gelu_dense
    ),
    "xentropy": Case(lambda: _xentropy, [(LABELS, 5000)], lambda _: _torchs_xentropy),
    "linear cross entropy": Case(
        lambda: _linear_cross_entropy,
        [(512, 64), (12000, 64)],
        lambda _: _torchs_linear_cross_entropy,
    ),
    "group norm": Case(lambda: GroupNorm(8, 64, act="silu"), [(2, 64, 9, 9)], _torchs_group_norm),
    "index_mul_2d": Case(lambda: _indexed, [(20, 32), (50, 32)], lambda _: _torchs_indexed),
    "rotary": Case(lambda: _rotary, [(8, 2, 4, 64)], lambda _: _torchs_rotary),
    "layer norm, less memory": Case(
        lambda: FusedLayerNorm(768, memory_efficient=True), [(9, 768)], _torchs_norm
    ),
    **{
        f"{name}, {columns}": Case(partial(norm, columns), [(5, 3, columns)], _torchs_norm)
        for name, norm in (("layer norm", FusedLayerNorm), ("RMS norm", FusedRMSNorm))
        for columns in (7, 768, 1000, 8192, 40000)
    },
    **{
        f"{name}, {impl}, norm {norm}": Case(partial(Attention, kind, impl, norm), shapes)
        for name, kind, shapes in (
            ("self attention", SelfMultiheadAttn, [(9, 2, 64)]),
            ("encoder-decoder attention", EncdecMultiheadAttn, [(9, 2, 64), (5, 2, 64)]),
        )
        for impl in ("default", "fast")
        for norm in (False, True)
    },
}


@check(*((name, dtype) for name in CASES for dtype in (F32, F16, BF16)))
def is_near_float64(name: str, dtype: torch.dtype) -> str:
    """Values and every gradient beside torch's in float64, and torch's on the same device."""
    case = CASES[name]
    torch.manual_seed(0)
    with torch.device("cpu"):
        run = case.make()
    exact = run
    if isinstance(run, nn.Module):
        run = run.to(DEVICE, dtype)
        exact = copy.deepcopy(run).cpu().double()
    inputs = [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(case.shapes)]
    found = _with_gradients(run, run, inputs)
    beside = _with_gradients(case.torchs(run), run, inputs)
    wanted = _with_gradients(case.torchs(exact), exact, [x.cpu().double() for x in inputs])
    ratios = []
    for n, (ours, torchs, exactly) in enumerate(zip(found, beside, wanted, strict=True)):
        if ours is not None and torchs is not None and exactly is not None:
            no_farther(ours, exactly, torchs, f"result {n}")
            ratios.append(off(ours, exactly) / (off(torchs, exactly) or math.inf))
    return f"at most {max(ratios):.2f} times torch's error"


def _with_gradients(run: Any, owner: Any, inputs: list[Tensor]) -> list[Tensor | None]:
    """The result, and gradients of the inputs and of the parameters that ``owner`` has."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    params = [*owner.parameters()] if isinstance(owner, nn.Module) else []
    y = run(*inputs)
    upstream = normal(*y.shape, seed=9, device=y.device, dtype=F32).to(y.dtype)
    found = torch.autograd.grad(y, [*inputs, *params], upstream, allow_unused=True)
    return [y, *found]


@check(*((dtype, packed) for dtype in (F16, BF16, F32) for packed in (False, True)))
def transducer_losses(dtype: torch.dtype, packed: bool) -> None:
    """In float32 from inputs of any dtype, rounded once."""
    times, labels = (torch.tensor(n, device=DEVICE) for n in ([9, 4, 1], [4, 0, 2]))
    words = torch.tensor([[1, 2, 3, 4], [1, 1, 1, 1], [5, 6, 0, 0]], device=DEVICE)
    ends = (times * (labels + 1)).cumsum(0)
    x = normal(*((int(ends[-1]), 8) if packed else (3, 9, 5, 8)), dtype=dtype)

    def loss(x: Tensor) -> list[Tensor | None]:
        def run(x: Tensor) -> Tensor:
            given = [t.to(x.device) for t in (words, times, labels, ends)]
            return TransducerLoss(packed_input=packed)(x, *given[:3], 7, given[3], 9)

        return _with_gradients(run, None, [x])

    for n, (ours, exact) in enumerate(zip(loss(x), loss(x.cpu().double()), strict=True)):
        if ours is not None and exact is not None:
            no_farther(ours, exact, what=f"result {n}")


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
    no_farther(each, torch.stack([x.double().norm() for x in xs]), what="norms")
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
    no_farther(l2_norms(views), torch.stack([v.double().norm() for v in views]), what="norms")
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
    no_farther(params[-1], torch.full_like(params[-1], 0.8, dtype=F64), what="weights")


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


def _losses_are_right(losses: Tensor, x: Tensor, labels: Tensor, smoothing: float = 0.0) -> None:
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
    exact = F.cross_entropy(x.double(), labels, **options)
    no_farther(losses, exact, F.cross_entropy(x, labels, **options), "losses")


@check(65535, 65536, 300001)
def many_rows(rows: int) -> None:
    """Around the largest second dimension of a grid."""
    x = normal(rows // 100 if checking.DRY else rows, 8).requires_grad_()
    norm = FusedLayerNorm(8).to(DEVICE)
    norm(x).sum().backward()
    no_farther(norm(x), F.layer_norm(x.double(), (8,)), F.layer_norm(x, (8,)), "layer norm")
    labels = torch.zeros(len(x), dtype=torch.long, device=DEVICE)
    losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.0, -1)
    _losses_are_right(losses, x, labels)


@check(300_000, 9_000_000)
def long_rows(columns: int) -> None:
    """Far longer than a block."""
    columns = columns // 100 if checking.DRY else columns
    x = normal(2, columns).requires_grad_()
    y = FusedLayerNorm(columns).to(DEVICE)(x)
    y.square().sum().backward()
    no_farther(y, F.layer_norm(x.double(), (columns,)), F.layer_norm(x, (columns,)), "layer norm")
    labels = torch.tensor([0, columns - 1], device=DEVICE)
    losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.0, -1)
    losses.sum().backward()
    _losses_are_right(losses, x, labels)


@check()
def strided_and_expanded_inputs() -> None:
    """Transposed, every second row, one column expanded."""
    base, norm = normal(64, 96).requires_grad_(), FusedLayerNorm(64).to(DEVICE)
    for x in (base.t(), base.t()[::2], base[:, :1].t().expand(96, 64)):
        y = norm(x)
        y.sum().backward()
        no_farther(y, F.layer_norm(x.double(), (64,)), F.layer_norm(x, (64,)), "layer norm")
    for x in (base.t(), base[::2, 1:], base[:, :1].expand(64, 96)):
        labels = torch.zeros(len(x), dtype=torch.long, device=DEVICE)
        losses = SoftmaxCrossEntropyLoss.apply(x, labels, SMOOTHING, -1)
        _losses_are_right(losses, x, labels, SMOOTHING)


@check()
def labels_out_of_range_give_nan() -> None:
    """And no illegal address, after which nothing would run."""
    if checking.DRY:
        raise checking.NotDry("the definition on a CPU raises; on a GPU the loss is nan")
    x = normal(4, 70000).requires_grad_()
    labels = torch.tensor([0, 70000, -5, 2**40], device=DEVICE)
    losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.0, -1)
    losses.nan_to_num().sum().backward()
    need(losses.isnan().tolist() == [False, True, True, True], f"losses {losses.tolist()}")
