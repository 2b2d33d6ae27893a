"""``GroupNorm``: torch's layer, fast for channels-last images, with SiLU built in if wanted."""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch.nn import Parameter, init

from apex.ops._check import ArgumentError
from apex.ops.norms import group_norm as ops
from apex.ops.norms._scripted import left_to_python

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class GroupNorm(torch.nn.Module):
    """Normalize groups of channels, and optionally apply SiLU.

    A drop-in for ``torch.nn.GroupNorm``, with the same parameters. It supports any shape, floating
    dtype and number of groups. The original's lists of supported values, such as
    ``SUPPORTED_CHANNELS``, exist but have no effect. The docstring of
    :mod:`apex.ops.norms.group_norm` has the formula.

    Args:
        num_groups: Number of groups. It must divide ``num_channels``.
        num_channels: Size of the input's second dimension.
        eps: Added to the variance.
        affine: Whether to have a weight and a bias for each channel.
        device: Device of the parameters.
        dtype: dtype of the parameters, which may differ from the input's.
        act: ``"silu"`` or ``"swish"`` to apply SiLU to the result; ``None`` or ``""`` for none.

    Raises:
        ArgumentError: ``num_groups`` does not divide ``num_channels``, or ``act`` is unknown.

    Example:
        >>> images = torch.ones(1, 4, 2, 2).to(memory_format=torch.channels_last)
        >>> GroupNorm(2, 4, act="silu")(images).sum()
        tensor(0., grad_fn=<SumBackward0>)
    """

    SUPPORTED_CHANNELS = frozenset(
        {
            128, 256, 320, 384, 448, 512, 640, 768, 896, 960, 1024, 1280, 1344, 1536, 1792, 1920,
            2048, 2240, 2560, 2688, 3072, 3136, 3584, 4096,
        }
    )  # fmt: skip
    SUPPORTED_GROUPS = frozenset({16, 32})
    SUPPORTED_DTYPES = frozenset((x, weight) for x in _DTYPES for weight in _DTYPES)
    GN_V2_SUPPORTED_CHANNELS = frozenset(
        (pixels, channels)
        for pixels, some in {
            64: (1280, 2560),
            256: (640, 1280, 1920, 2560),
            1024: (320, 640, 960, 1280, 1920),
            4096: (320, 640, 960),
        }.items()
        for channels in some
    )
    GN_V2_SUPPORTED_DTYPES = frozenset((dtype, dtype) for dtype in _DTYPES[1:])
    GN_V2_SUPPORTED_GROUPS_SWISH = frozenset({(16, True), (32, False)})
    # compute capability -> the fewest multiprocessors; a B200 has 148
    GN_V2_SUPPORTED_LOWER_BOUND_SM_COUNT = MappingProxyType({(10, 0): 148})

    # What modules that an older Apex pickled whole may lack.
    eps, affine, act = 1e-5, True, ""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            sizes = f"{num_channels} and {num_groups}"
            raise ArgumentError(f"num_channels must be divisible by num_groups; got {sizes}.")
        if act is not None and act.lower() not in ops.ACTIVATIONS:
            raise ArgumentError(f"act is {act!r}; allowed are 'silu', 'swish', '' and None.")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self.act = "" if act is None else act.lower()
        self.weight: Parameter | None
        self.bias: Parameter | None
        if affine:
            self.weight = Parameter(torch.empty(num_channels, device=device, dtype=dtype))
            self.bias = Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weights to 1 and biases to 0."""
        if self.weight is not None and self.bias is not None:
            init.ones_(self.weight)
            init.zeros_(self.bias)

    @left_to_python
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(images, channels, ...)`` to the same shape, dtype and memory format."""
        return ops.group_norm(
            input, self.num_groups, self.weight, self.bias, eps=self.eps, act=self.act
        )

    def extra_repr(self) -> str:
        """Show the options in ``print(model)``."""
        text = f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
        return f"{text}, act={self.act}" if self.act else text


def cuda_group_norm_nhwc_one_pass(
    x: torch.Tensor,
    G: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    act: str | None = None,
) -> torch.Tensor:
    """Normalize an image, on any device; the result has its channels last in memory."""
    return _channels_last(x, G, weight, bias, eps, act)


# How often an image is read is the kernel's own decision here.
cuda_group_norm_nhwc_two_pass = cuda_group_norm_v2_nhwc = cuda_group_norm_nhwc_one_pass


@left_to_python
def _channels_last(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    act: str | None,
) -> torch.Tensor:
    if x.dim() in ops.FORMATS:
        x = x.contiguous(memory_format=ops.FORMATS[x.dim()])
    return ops.group_norm(x, groups, weight, bias, eps=eps, act=act)


def torch_group_norm(
    x: torch.Tensor,
    g: int,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    eps: float,
    act: str | None = "",
) -> torch.Tensor:
    """Compute ``F.group_norm`` and SiLU if wanted, with torch's functions as they are."""
    y = F.group_norm(x, g, w, b, eps)
    activated = act is not None and act in ["silu", "swish"]  # as TorchScript takes it
    return F.silu(y) if activated else y


def get_cc_and_sm_count(device: torch.device | int | None = None) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors of a CUDA device; zeros without one."""
    if not torch.cuda.is_available():
        return (0, 0), 0
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count
