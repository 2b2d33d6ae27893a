"""Layer norms with ``sequence_parallel_enabled``, an attribute of each of their parameters.

Where a sequence is split over ranks, a norm's weight and bias get a part of their gradient on each.
Megatron's programs add the parts up for the parameters that have the attribute.
"""

from collections.abc import Callable
from typing import Any

import torch

from apex.contrib import layer_norm as contrib
from apex.normalization import fused_layer_norm as normalization


class _Marked(torch.nn.Module):
    """Marks parameters, also those that torch makes anew, which have no attributes of their own."""

    _by_position: tuple[str, ...] = ("size", "eps")  # as in Apex

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        if len(args) > len(self._by_position):  # the last would be taken for memory_efficient
            raise TypeError(
                f"{type(self).__name__} got {len(args)} arguments by position and takes "
                f"{', '.join(self._by_position)}. Name the others: sequence_parallel_enabled=True."
            )
        super().__init__(*args, **kwargs)
        self._mark(sequence_parallel_enabled)

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
    """:class:`apex.normalization.FusedLayerNorm`, with its arguments and one more.

    Args:
        sequence_parallel_enabled: What the attribute of this name of its parameters says;
            ``False`` by default, by keyword only.

    Example:
        >>> FusedLayerNorm(4, sequence_parallel_enabled=True).bias.sequence_parallel_enabled
        True
    """

    _by_position = ("size", "eps", "elementwise_affine")


class MixedFusedLayerNorm(_Marked, normalization.MixedFusedLayerNorm):
    """:class:`apex.normalization.MixedFusedLayerNorm`, likewise."""


class FastLayerNorm(_Marked, contrib.FastLayerNorm):
    """:class:`apex.contrib.layer_norm.FastLayerNorm`, likewise."""
