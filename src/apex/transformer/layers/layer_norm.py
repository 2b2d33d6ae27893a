"""Layer norms with ``sequence_parallel_enabled``, an attribute of each of their parameters.

Where a sequence is split over ranks, a norm's weight and bias get a part of their gradient on each.
Megatron's programs add the parts up for the parameters that have the attribute.
"""

from typing import Any

from apex.contrib import layer_norm as contrib
from apex.normalization import fused_layer_norm as normalization
from apex.transformer._marks import Marked


class _Marked(Marked):
    _by_position: tuple[str, ...] = ("size", "eps")  # as in Apex
    sequence_parallel_enabled = False  # where an older Apex has pickled the whole module

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        if len(args) > len(self._by_position):  # the last would be taken for memory_efficient
            raise TypeError(
                f"{type(self).__name__} got {len(args)} positional arguments; only "
                f"{', '.join(self._by_position)} may be positional. Pass the others by name: "
                "sequence_parallel_enabled=True."
            )
        super().__init__(*args, **kwargs)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self._mark()

    def _mark(self) -> None:
        for parameter in self.parameters(recurse=False):
            parameter.sequence_parallel_enabled = self.sequence_parallel_enabled  # type: ignore[attr-defined]


class FusedLayerNorm(_Marked, normalization.FusedLayerNorm):
    """:class:`apex.normalization.FusedLayerNorm` with one more argument.

    Args:
        sequence_parallel_enabled: Value of the attribute of this name that its parameters get.
            Keyword only; ``False`` by default.

    Example:
        >>> FusedLayerNorm(4, sequence_parallel_enabled=True).bias.sequence_parallel_enabled
        True
    """

    _by_position = ("size", "eps", "elementwise_affine")


class MixedFusedLayerNorm(_Marked, normalization.MixedFusedLayerNorm):
    """:class:`apex.normalization.MixedFusedLayerNorm` with ``sequence_parallel_enabled`` too."""


class FastLayerNorm(_Marked, contrib.FastLayerNorm):
    """:class:`apex.contrib.layer_norm.FastLayerNorm` with ``sequence_parallel_enabled`` too."""
