"""Tensors of more than 2**31 elements, each check with 10 to 45 GB; of 2**16 in a dry run."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex.contrib.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.ops.layers.scaled_softmax import scaled_softmax
from apex.ops.layers.swiglu import swiglu
from apex.ops.lists.tensor_norms import l2_norms, max_norms
from apex.ops.lists.unscale import unscale_into
from apex.optimizers import FusedAdam, FusedSGD
from apex.transformer.functional import fused_apply_rotary_pos_emb
from tools.gpu import checking
from tools.gpu.checking import BF16, DEVICE, F16, F32, F64, Tensor, check, need, no_farther

COUNT = 2**16 + 5 if checking.DRY else 2**31 + 12345
PART = 64  # rows that are compared


def _ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def _drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=DEVICE)
    for part in made.view(-1).split(2**28):
        part.normal_()
    return made


def _ends(rows: int) -> tuple[slice, slice]:
    """The first rows and the last, beyond the 2**31st element."""
    return slice(0, PART), slice(rows - PART, rows)


def _beside(torchs: Any, given: list[Tensor], upstream: Tensor, y: Tensor, dx: Tensor) -> None:
    """Compare values and the first gradient with float64, beside torch's in the same dtype."""
    ends = []
    for dtype in (None, F64):
        inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        found = torchs(*inputs)
        ends.append((found, torch.autograd.grad(found, inputs[0], upstream.to(found.dtype))[0]))
    (beside, beside_dx), (exact, exact_dx) = ends
    no_farther(y, exact, beside, "values")
    no_farther(dx, exact_dx, beside_dx, "gradients")


@check()
def norms_of_lists() -> None:
    """The largest element is the last."""
    x = _ones(COUNT)
    x[-1] = 4096.0
    exact = torch.tensor([math.sqrt(COUNT - 1 + 4096.0**2), math.sqrt(3)], dtype=F64)
    no_farther(l2_norms([x, x[:3]]), exact, what="l2 norms")
    need(max_norms([x]).item() == 4096.0, "the largest element was not seen")


@check()
def unscale() -> None:
    """The overflow is the last element."""
    grad, out = _ones(COUNT, dtype=F16), torch.empty(COUNT, dtype=F16, device=DEVICE)
    flag = torch.zeros((), device=DEVICE, dtype=F32)
    unscale_into([grad], [out], 0.5, flag)
    need(flag.item() == 0, "an overflow was found where there is none")
    need(bool((out[:9] == 0.5).all() and (out[-20000:] == 0.5).all()), "not unscaled")
    grad[-1] = float("inf")
    unscale_into([grad], [out], 0.5, flag)
    need(flag.item() == 1, "an overflow was not found")


@check("plain", "stochastic")
def sgd(storage: str) -> None:
    """Also with random numbers of that many elements."""
    param = nn.Parameter(_ones(COUNT))
    param.grad = _ones(COUNT)
    lr = 0.5 if storage == "plain" else 2.0**-10
    FusedSGD([param], lr=lr, storage=storage).step()
    for part in (param[: 2**15], param[-(2**15) :]):
        mean = part.detach().float().mean().item()
        # Rounding of 2**15 elements to steps of 2**-8: 5 deviations of the mean.
        need(abs(mean - (1 - lr)) <= (0 if storage == "plain" else 6e-5), f"mean {mean}")


@check("plain", "8bit")
def adam(state: str) -> None:
    """With plain moments and moments in 8 bits."""
    rows = COUNT // 4096 + 1
    param = nn.Parameter(_ones(rows, 4096))
    param.grad = _ones(rows, 4096)
    FusedAdam([param], lr=0.5, weight_decay=0.0, state=state).step()
    need(bool((param[:2] == 0.5).all() and (param[-2:] == 0.5).all()), "weights are not 0.5")


@check(*((norm, columns) for norm in (FusedLayerNorm, FusedRMSNorm) for columns in (1024, 32768)))
def norm(make: Any, columns: int) -> None:
    """Values and gradients of both ends."""
    rows = max(COUNT // columns + 1, 2 * PART)
    x, upstream = _drawn(rows, columns).requires_grad_(), _drawn(rows, columns)
    layer = make(columns).to(DEVICE, BF16)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, upstream)

    def torchs(x: Tensor) -> Tensor:
        if make is FusedLayerNorm:
            return F.layer_norm(x, (columns,))
        return F.rms_norm(x, (columns,), eps=layer.eps)

    for part in _ends(rows):
        _beside(torchs, [x[part]], upstream[part], y[part], dx[part])


@check()
def swiglu_of_two() -> None:
    """Values and the first gradient."""
    rows = COUNT // 1024 + PART
    a, b = _drawn(rows, 1024).requires_grad_(), _drawn(rows, 1024)
    y = swiglu(a, b)
    (da,) = torch.autograd.grad(y, a, torch.ones_like(y))
    for part in _ends(rows):
        given = [a[part], b[part]]
        _beside(lambda a, b: F.silu(a) * b, given, torch.ones_like(y[part]), y[part], da[part])


@check()
def cross_entropy() -> None:
    """Losses and gradients, and those of a fused linear layer."""
    classes = 1024 if checking.DRY else 32768
    rows = COUNT // classes + PART
    x = _drawn(rows, classes).requires_grad_()
    labels = torch.arange(rows, device=DEVICE) % classes
    losses = SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, -1)
    (dx,) = torch.autograd.grad(losses.sum(), x)
    for part in _ends(rows):

        def torchs(x: Tensor, labels: Tensor = labels[part]) -> Tensor:
            options: dict[str, Any] = {"reduction": "none", "label_smoothing": 0.1}
            if x.dtype == F64:
                return F.cross_entropy(x, labels, **options)
            return F.cross_entropy(x.float(), labels, **options).to(losses.dtype)

        _beside(torchs, [x[part]], torch.ones_like(losses[part]), losses[part], dx[part])
    del x, dx, losses
    inputs, weight = _drawn(rows, 64), _drawn(classes, 64) * 0.1
    losses = linear_cross_entropy(inputs, weight, labels, reduction="none")
    for part in _ends(rows):
        exact, beside = (
            F.cross_entropy(logits, labels[part], reduction="none")
            for logits in (
                inputs[part].double() @ weight.double().t(),
                (inputs[part] @ weight.t()).float(),
            )
        )
        no_farther(losses[part], exact, beside.to(losses.dtype), "fused")


@check()
def focal() -> None:
    """The gradient of the last row, the only one that has a class."""
    rows = COUNT // 91 + 9
    x = _drawn(rows, 91).requires_grad_()
    labels = torch.full((rows,), -1, dtype=torch.long, device=DEVICE)
    labels[-1] = 90
    loss = focal_loss(x, labels, torch.ones(1, device=DEVICE), 91, 0.25, 2.0, 0.0)
    (dx,) = torch.autograd.grad(loss, x)
    need(bool(loss.isfinite()), "the loss is not finite")
    need(bool(dx[-1, 90] < 0 and (dx[-1, :90] >= 0).all()), "the gradient of the last row")


@check()
def group_norm() -> None:
    """Channels last."""
    images, side, channels = (9, 8, 64) if checking.DRY else (129, 256, 256)
    x = _drawn(images, side, side, channels).permute(0, 3, 1, 2)
    y = GroupNorm(16, channels).to(DEVICE, BF16)(x)
    no_farther(y[-1:], F.group_norm(x[-1:].double(), 16), F.group_norm(x[-1:], 16), "last image")


@check()
def rotary() -> None:
    """The last position."""
    length, batch, heads, size = (8, 2, 4, 64) if checking.DRY else (4100, 64, 64, 128)
    t = _drawn(length, batch, heads, size)
    angles = torch.linspace(0, 3, length * size, device=DEVICE).view(length, 1, 1, size)

    def torchs(dtype: torch.dtype) -> Tensor:
        last, cos, sin = (x.to(dtype) for x in (t[-1:], angles[-1:].cos(), angles[-1:].sin()))
        return last * cos + torch.cat((-last[..., size // 2 :], last[..., : size // 2]), -1) * sin

    found = fused_apply_rotary_pos_emb(t, angles)[-1:]
    no_farther(found, torchs(F64), torchs(t.dtype), "the last position")


@check()
def index_mul() -> None:
    """The last rows."""
    rows = COUNT // 512 + 3
    a, b = _drawn(1000, 512, dtype=F16), _drawn(rows, 512, dtype=F16)
    index = torch.arange(rows, device=DEVICE) % 1000
    found = index_mul_2d(a, b, index)
    no_farther(found[-4:], a[index[-4:]].double() * b[-4:].double(), what="the last rows")


@check()
def softmax() -> None:
    """The last head, with its gradient."""
    shape = (2, 2, 16, 16) if checking.DRY else (33, 16, 2048, 2048)
    x = _drawn(*shape, dtype=F16).requires_grad_()
    y = scaled_softmax(x, None, 0.5, False, name="softmax")
    (dx,) = torch.autograd.grad(y, x, x.detach())

    def torchs(x: Tensor) -> Tensor:
        return (x * 0.5).softmax(-1)

    _beside(torchs, [x[-1, -1]], x[-1, -1].detach(), y[-1, -1], dx[-1, -1])
