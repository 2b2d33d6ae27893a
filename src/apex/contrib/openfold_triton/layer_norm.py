"""``LayerNormSmallShapeOptImpl``: layer norm that is called by ``apply``."""

import torch

from apex.ops._check import ArgumentError
from apex.ops._dtypes import wide
from apex.ops._function import Applied
from apex.ops.norms.row_norms import norm


def _layer_norm(
    inputs: torch.Tensor,
    normalized_shape: tuple[int, ...],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not inputs.is_contiguous() and (inputs.dim() != 4 or len(normalized_shape) != 1):
        raise ArgumentError(
            f"LayerNormSmallShapeOptImpl: inputs of shape {[*inputs.shape]} are not contiguous and "
            f"normalized_shape is {[*normalized_shape]}. Call inputs.contiguous(). Only inputs of "
            "four dimensions, normalized over the last one, may be non-contiguous."
        )
    if {weight.dtype, bias.dtype} != {inputs.dtype}:
        weight, bias = weight.to(wide(inputs)), bias.to(wide(inputs))
    return norm(inputs, weight, bias, normalized_shape, eps, False, True, "float32", "")


class LayerNormSmallShapeOptImpl(Applied):
    """Layer norm with weight and bias. The result has the dtype of ``inputs``.

    Statistics are float32 (float64 for float64). Inputs, weight and bias have gradients.

    Raises:
        ValueError: ``inputs`` is not contiguous, unless it has four dimensions and is normalised
            over the last one; or shapes, devices or dtypes do not match.

    Example:
        >>> x, weight, bias = torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2)
        >>> LayerNormSmallShapeOptImpl.apply(x, (2,), weight, bias)
        tensor([[-1.0000,  1.0000]])
    """

    function = staticmethod(_layer_norm)
