"""``Bottleneck``: the block of ResNet-50, with batch norms whose statistics and weights are fixed.

Composed of PyTorch's functions, for a compiler to fuse: ``use_cudnn`` chose a kernel of the
original and changes nothing. Images that are split between GPUs are left out (``REFUSED``).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from apex.ops._check import ArgumentError, check_unused
from apex.ops._function import Applied

Tensor = torch.Tensor

_USE = (
    "It exchanged rows of images that are split between GPUs. Split the batch instead "
    "(apex.parallel.DistributedDataParallel), or exchange rows by "
    "torch.distributed.batch_isend_irecv and use Bottleneck."
)
#: Names of the original that are here to be imported and raise when they are used, with the reason.
REFUSED = {
    "HaloExchangerAllGather": _USE, "HaloExchangerNoComm": _USE, "HaloExchangerPeer": _USE,
    "HaloExchangerSendRecv": _USE, "SpatialBottleneck": _USE, "spatial_bottleneck_function": _USE,
}  # fmt: skip


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"apex does not have apex.contrib.bottleneck.{name}. {REFUSED[name]}")


class _Refused:
    """Raises ``NotImplementedError``; see ``REFUSED``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(type(self).__name__)


HaloExchangerAllGather = type("HaloExchangerAllGather", (_Refused,), {})
HaloExchangerNoComm = type("HaloExchangerNoComm", (_Refused,), {})
HaloExchangerPeer = type("HaloExchangerPeer", (_Refused,), {})
HaloExchangerSendRecv = type("HaloExchangerSendRecv", (_Refused,), {})
SpatialBottleneck = type("SpatialBottleneck", (_Refused,), {})
spatial_bottleneck_function = functools.partial(_refuse, "spatial_bottleneck_function")


def kaiming_uniform_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> None:
    """``torch.nn.init.kaiming_uniform_``, without a result."""
    nn.init.kaiming_uniform_(tensor, a, mode, nonlinearity)  # type: ignore[arg-type]


def conv1x1(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    """A convolution of one pixel, without bias."""
    return nn.Conv2d(in_planes, out_planes, 1, stride, bias=False)


def conv3x3(
    in_planes: int, out_planes: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """A convolution of 3 x 3 pixels, padded, without bias."""
    return nn.Conv2d(in_planes, out_planes, 3, stride, dilation, dilation, groups, bias=False)


def compute_scale_bias_one(
    nhwc: bool, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    w_scale: Tensor, w_bias: Tensor,
) -> None:  # fmt: skip
    """Write what a frozen batch norm multiplies by, and what it adds; ``nhwc`` has no effect."""
    w_scale.copy_(weight * running_var.rsqrt())
    w_bias.copy_(bias - running_mean * w_scale)


def compute_scale_bias_method(nhwc: bool, args: Iterable[Sequence[Tensor]]) -> None:
    """:func:`compute_scale_bias_one` of each of ``args``."""
    for each in args:
        compute_scale_bias_one(nhwc, *each)


def drelu_dscale1(grad_o: Tensor, output: Tensor, scale1: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients before ReLU and scale, and before ReLU alone."""
    return drelu_dscale2(grad_o, output, scale1, torch.ones_like(scale1))


def drelu_dscale2(
    grad_o: Tensor, output: Tensor, scale1: Tensor, scale2: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients before ReLU and each of two scales."""
    before = grad_o.masked_fill(output <= 0, 0.0)
    return before * scale1, before * scale2


class FrozenBatchNorm2d(nn.Module):
    """``(x - running_mean) / sqrt(running_var) * weight + bias``, all of them buffers ``(n,)``."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.register_buffer(name, torch.full((n,), float(value), device=None, dtype=None))

    def get_scale_bias(self, nhwc: bool) -> tuple[Tensor, Tensor]:
        """What x is multiplied by, and what is added; channels are last with ``nhwc``."""
        shape = (1, 1, 1, -1) if nhwc else (1, -1, 1, 1)
        scale = self.weight * self.running_var.rsqrt()
        return scale.view(shape), (self.bias - self.running_mean * scale).view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``(N, C, H, W)``."""
        scale, bias = self.get_scale_bias(False)
        return x * scale + bias


def _block(
    nhwc: bool, stride_1x1: int, scale: Sequence[Tensor], bias: Sequence[Tensor], x: Tensor,
    *conv: Tensor,
) -> Tensor:  # fmt: skip
    if nhwc:
        x, conv = x.permute(0, 3, 1, 2), tuple(each.permute(0, 3, 1, 2) for each in conv)

    def step(y: Tensor, i: int, stride: int = 1, padding: int = 0) -> Tensor:
        y = F.conv2d(y, conv[i], None, stride, padding)
        return y * scale[i].view(1, -1, 1, 1) + bias[i].view(1, -1, 1, 1)

    y = step(step(step(x, 0, stride_1x1).relu(), 1, 1, 1).relu(), 2)
    y = (y + (step(x, 3, stride_1x1) if len(conv) > 3 else x)).relu()
    return y.permute(0, 2, 3, 1) if nhwc else y


class BottleneckFunction(Applied):
    """The block as an autograd function: ``apply(nhwc, stride, scales, biases, x, *weights)``."""

    function = staticmethod(_block)
    gradient, autocasts = "grad_o", True


bottleneck_function = BottleneckFunction.apply


class Bottleneck(nn.Module):
    """ResNet's bottleneck: 1x1, 3x3 and 1x1 convolutions with frozen batch norms, and a shortcut.

    Args:
        in_channels: Number of channels of the input.
        bottleneck_channels: Number of channels between the convolutions.
        out_channels: Number of channels of the output. If it differs from ``in_channels``, or with
            a stride, the shortcut has a 1x1 convolution.
        stride: Stride of the first convolution.
        groups: Must be 1.
        dilation: Must be 1.
        norm_func: Must be None.
        use_cudnn: Has no effect.
        explicit_nhwc: Whether input and output are ``(N, H, W, C)``, and weights ``(K, h, w, C)``.

    Raises:
        ArgumentError: An option has an unsupported value. It is a ``RuntimeError``.
    """

    # What modules that an older Apex pickled whole may lack.
    stride, use_cudnn, explicit_nhwc = 1, False, False
    w_scale: Any = None
    w_bias: Any = None

    def __init__(
        self, in_channels: int, bottleneck_channels: int, out_channels: int, stride: int = 1,
        groups: int = 1, dilation: int = 1, norm_func: Callable[[int], nn.Module] | None = None,
        use_cudnn: bool = False, explicit_nhwc: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_unused("Bottleneck", use_cudnn=use_cudnn)
        if (groups, dilation, norm_func) != (1, 1, None):
            raise ArgumentError(
                f"Bottleneck: groups is {groups}, dilation {dilation} and norm_func {norm_func}. "
                "Only 1, 1 and None are supported; for others use "
                "torchvision.models.resnet.Bottleneck."
            )
        self.downsample = None  # first, as there: optimizers number the parameters
        if stride != 1 or in_channels != out_channels:
            aside = conv1x1(in_channels, out_channels, stride)
            self.downsample = nn.Sequential(aside, FrozenBatchNorm2d(out_channels))
        self.conv1 = conv1x1(in_channels, bottleneck_channels, stride)
        self.conv2 = conv3x3(bottleneck_channels, bottleneck_channels)
        self.conv3 = conv1x1(bottleneck_channels, out_channels)
        self.bn1, self.bn2 = (FrozenBatchNorm2d(bottleneck_channels) for _ in range(2))
        self.bn3 = FrozenBatchNorm2d(out_channels)
        self.stride, self.use_cudnn, self.explicit_nhwc = stride, use_cudnn, explicit_nhwc
        self.w_scale = self.w_bias = None
        for convolution, _ in self._pairs():
            weight = convolution.weight
            kaiming_uniform_(weight, a=1)
            weight.data = weight.permute(0, 2, 3, 1).contiguous() if explicit_nhwc else weight.data

    def _pairs(self) -> list[Any]:
        pairs = [(self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)]
        aside = getattr(self, "downsample", None)
        return pairs if aside is None else [*pairs, tuple(aside)]

    def get_scale_bias_callable(self) -> Callable[[], None]:
        """Compute the scales and biases of the batch norms once, instead of in each forward.

        Returns:
            A function to call after you change the batch norms' buffers. It computes them again.
        """
        norms = [norm for _, norm in self._pairs()]
        own = [(n.weight, n.bias, n.running_mean, n.running_var) for n in norms]
        self.w_scale, self.w_bias = ([torch.empty_like(n.weight) for n in norms] for _ in range(2))
        args = [(*o, *kept) for o, *kept in zip(own, self.w_scale, self.w_bias, strict=True)]
        recompute = functools.partial(compute_scale_bias_method, self.explicit_nhwc, args)
        recompute()
        return recompute

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for ``(N, C, H, W)``, or ``(N, H, W, C)`` with ``explicit_nhwc``."""
        pairs, kept = self._pairs(), iter((self.w_scale, self.w_bias))
        if self.w_scale is None:
            kept = zip(*(norm.get_scale_bias(False) for _, norm in pairs), strict=True)
        weights = [convolution.weight for convolution, _ in pairs]
        return _block(self.explicit_nhwc, self.stride, *kept, x, *weights)
