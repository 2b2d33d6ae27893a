"""Layer norms with ``sequence_parallel_enabled``, an attribute of each of their parameters.

Where a sequence is split over ranks, a norm's weight and bias get a part of their gradient on each.
Megatron's programs add the parts up for the parameters that have the attribute.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex.contrib import layer_norm as contrib
from apex.normalization import fused_layer_norm as normalization

__all__ = ["FastLayerNorm", "FusedLayerNorm", "MixedFusedLayerNorm"]


class _Marked(torch.nn.Module):
    """Marks parameters, also those that torch makes anew, which have no attributes of their own."""

    sequence_parallel_enabled: bool

    def _mark(self, enabled: bool) -> None:
        self.sequence_parallel_enabled = enabled
        for parameter in self.parameters(recurse=False):
            parameter.sequence_parallel_enabled = enabled  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:  # copy.deepcopy, torch.load
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark(self.sequence_parallel_enabled)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:  # from the meta device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark(self.sequence_parallel_enabled)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:  # with assign=True
        super()._load_from_state_dict(*args)
        self._mark(self.sequence_parallel_enabled)


class FusedLayerNorm(_Marked, normalization.FusedLayerNorm):
    """`apex.normalization.FusedLayerNorm` that marks its parameters.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight and a bias.
        sequence_parallel_enabled: What the attribute of this name says.
        **kwargs: ``memory_efficient``, ``device`` and ``dtype`` of that class.

    Example:
        >>> FusedLayerNorm(4, sequence_parallel_enabled=True).bias.sequence_parallel_enabled
        True
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **kwargs)
        self._mark(sequence_parallel_enabled)


class MixedFusedLayerNorm(_Marked, normalization.MixedFusedLayerNorm):
    """`apex.normalization.MixedFusedLayerNorm` that marks its parameters.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the variance.
        sequence_parallel_enabled: What the attribute of this name says.
        **kwargs: ``memory_efficient``, ``device``, ``dtype`` and others of that class.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        sequence_parallel_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, **kwargs)
        self._mark(sequence_parallel_enabled)


class FastLayerNorm(_Marked, contrib.FastLayerNorm):
    """`apex.contrib.layer_norm.FastLayerNorm` that marks its parameters.

    Args:
        hidden_size: Of the last dimension.
        eps: Added to the variance.
        sequence_parallel_enabled: What the attribute of this name says.
        **kwargs: ``memory_efficient`` of that class.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(hidden_size, eps, **kwargs)
        self._mark(sequence_parallel_enabled)
