"""What ``apex bench kernels`` times of layers and losses: norms, cross-entropy, focal loss.

Each is timed forward, backward and both, as operations of their own. Forward is as in training:
with what backward needs. Providers beside ours: torch's function, the expression that people write
out where there is one, torch.compile of torch's function, and Liger-Kernel on a GPU.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from apex.bench.kernel_cases import Op, Shapes
from apex.bench.layer_modes import IMAGES, Inputs, compiled, each_mode, given, liger
from apex.bench.transformer_cases import TRANSFORMER
from apex.contrib.focal_loss.focal_loss import focal_loss
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.ops.norms.group_norm import group_norm
from apex.ops.norms.row_norms import layer_norm, rms_norm

__all__ = ["LAYERS"]

EPS = 1e-5
FEATURES = 256  # of the linear layer before the cross-entropy
GROUPS = 32
# --- inputs ---------------------------------------------------------------------------------------


def _rows(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Rows, and the weight and bias of a norm."""
    [shape] = shapes
    columns = shape[1]
    return (
        torch.randn(shape, device=device).to(dtype),
        torch.ones(columns, dtype=dtype, device=device),
        torch.zeros(columns, dtype=dtype, device=device),
    )


def _logits(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    [(rows, classes)] = shapes
    logits = torch.randn(rows, classes, device=device).to(dtype)
    return logits, torch.randint(classes, (rows,), device=device)


def _before_logits(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    [(rows, classes)] = shapes
    return (
        torch.randn(rows, FEATURES, device=device).to(dtype),
        torch.randn(classes, FEATURES, device=device).mul(FEATURES**-0.5).to(dtype),
        torch.randint(classes, (rows,), device=device),
    )


def _images(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Channels-last images, and the weight and bias of a group norm."""
    [shape] = shapes
    images = torch.randn(shape, device=device).to(dtype)
    weight = torch.ones(shape[1], dtype=dtype, device=device)
    return images.to(memory_format=torch.channels_last), weight, torch.zeros_like(weight)


# --- operations -----------------------------------------------------------------------------------


def _layer_norm() -> Iterator[Op]:
    def torch_s(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, EPS)

    who = (
        given("apex", lambda x, weight, bias: layer_norm(x, weight, bias, weight.shape, EPS)),
        given("torch", torch_s),
        compiled(torch_s),
        liger(lambda liger, inputs: liger.liger_layer_norm(*inputs, EPS)),
    )
    return each_mode("layer_norm", _rows, who, columns=(2, 3))


def _rms_norm() -> Iterator[Op]:
    def torch_s(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, EPS)

    def written_out(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return weight * wide.to(x.dtype)

    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        return _rows(shapes, dtype, device)[:2]

    who = (
        given("apex", lambda x, weight: rms_norm(x, weight, weight.shape, EPS)),
        given("torch", torch_s),
        given("torch, written out", written_out),
        compiled(torch_s),
        liger(lambda liger, inputs: liger.liger_rms_norm(*inputs, EPS, in_place=False)),
    )
    return each_mode("rms_norm", make, who, columns=(2, 3))


def _cross_entropy() -> Iterator[Op]:
    """A loss for each row, of logits."""

    def torch_s(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none")

    who = (
        given(
            "apex", lambda logits, labels: SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, -1)
        ),
        given("torch", torch_s),
        compiled(torch_s),
        liger(lambda liger, inputs: liger.liger_cross_entropy(*inputs, reduction="none")),
    )
    return each_mode("cross_entropy", _logits, who, columns=(1, 2))


def _focal_loss() -> Iterator[Op]:
    """The sum over anchors and classes, divided by the number of positive anchors."""
    alpha, gamma = 0.25, 2.0

    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        logits, labels = _logits(shapes, dtype, device)
        labels[::2] = -1  # background
        return logits, labels, (labels >= 0).sum(dtype=torch.float32).view(1)

    def ours(logits: torch.Tensor, labels: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
        return focal_loss(logits, labels, positives.detach(), logits.shape[1], alpha, gamma)

    def torch_s(
        logits: torch.Tensor, labels: torch.Tensor, positives: torch.Tensor
    ) -> torch.Tensor:
        x = logits.float()
        y = (labels[:, None] == torch.arange(x.shape[1], device=x.device)).to(x.dtype)
        p = torch.sigmoid(x)
        entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none")
        weight = (alpha * y + (1 - alpha) * (1 - y)) * (p * (1 - y) + (1 - p) * y) ** gamma
        return (weight * entropy).sum() / positives.detach()[0]

    who = (given("apex", ours), given("torch", torch_s), compiled(torch_s))
    return each_mode("focal_loss", make, who, columns=(1, 2))


def _linear_cross_entropy() -> Iterator[Op]:
    """The mean loss, of what makes the logits."""

    def torch_s(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    who = (
        given("apex", linear_cross_entropy),
        given("torch", torch_s),
        compiled(torch_s),
        liger(lambda liger, inputs: liger.liger_fused_linear_cross_entropy(*inputs)),
    )
    return each_mode("linear_cross_entropy", _before_logits, who, columns=None)


def _group_norm() -> Iterator[Op]:
    def groups(images: torch.Tensor) -> int:
        return math.gcd(GROUPS, images.shape[1])

    def torch_s(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # What F.group_norm calls after it has refused the single element of the host's cost.
        return torch.group_norm(images, groups(images), weight, bias, EPS)

    def liger_s(liger: Any, inputs: Inputs) -> torch.Tensor:
        images = inputs[0]
        y: torch.Tensor = liger.liger_group_norm(*inputs, images.shape[1], groups(images), EPS)
        return y

    who = (
        given("apex", lambda x, weight, bias: group_norm(x, groups(x), weight, bias, eps=EPS)),
        given("torch", torch_s),
        compiled(torch_s),
        liger(liger_s),
    )
    return each_mode("group_norm", _images, who, columns=(2, 3), shapes=IMAGES)


LAYERS: tuple[Op, ...] = (
    *_layer_norm(),
    *_rms_norm(),
    *_cross_entropy(),
    *_focal_loss(),
    *_linear_cross_entropy(),
    *_group_norm(),
    *TRANSFORMER,
)
