"""What an offset hides from a cosine: whether the spread of a result survives a format.

Numbers around 300 with a spread of 1 all become 300 in bfloat16, whose steps are 2 there, and the
cosine of the whole tensor is 1. So each channel is compared without its mean. A channel that is
constant in float32 has nothing to lose, and a network may have one that is large and hardly varies
(transformers do), so the mean over all channels counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from apex.debug.what_if.formats import Format

KEPT = 0.75  # mean correlation of the channels below which a result may be lost
ROWS = 4  # fewer show no spread
HIDDEN = 8.0  # times half a step of the format: a spread above it has a correlation of 0.998
NOISE = 2.0**-22  # of the mean: seven times what float32's rounding makes of a constant channel


class Spread(NamedTuple):
    """Of a result in a format.

    Attributes:
        kept: The mean over channels of the correlation with float32.
        mean: The median magnitude around which the channels lie whose spread is at stake.
        size: Their median standard deviation.
        step: From one number of the format to the next, there.
        error: The root of the mean square of what rounding changed, without its means.
    """

    kept: float
    mean: float
    size: float
    step: float
    error: float

    @property
    def is_lost(self) -> bool:
        """Whether so little is left that the layer is tried in the whole model."""
        return self.kept < KEPT

    @property
    def times(self) -> float:
        """By how much the error can grow when the training spreads the numbers.

        All of them round to one number where their spread is below a step: that changes them by
        their spread, and later by a step's uniform error, of which this is the larger. At most 1e4,
        since float32's own noise grows with it.
        """
        return min(max(1.0, self.step / math.sqrt(12.0) / max(self.error, 1e-30)), 1e4)

    def why(self, form: Format) -> str:
        """The end of a sentence."""
        numbers = f"around {self.mean:.3g} with a spread of {self.size:.2g}"
        return f"its result lies {numbers}, where {form.result_name} has steps of {self.step:.2g}"


def compared(exact: torch.Tensor, found: torch.Tensor, channel: int, form: Format) -> Spread | None:
    """How much of the spread in float32 is left; ``None`` where no offset is in the way.

    Args:
        exact: The result in float32.
        found: The result in the format, of the same shape.
        channel: The dimension of its channels, a negative number.
        form: The format.
    """
    if exact.dim() < -channel or exact.numel() < ROWS * exact.shape[channel] or exact.dim() < 2:
        return None
    others = [one for one in range(exact.dim()) if one != exact.dim() + channel]
    # Less its first number a constant channel is 0. torch.var_mean, which does as well, takes 0.65
    # ms for 128 x 512 on a CPU, and the lines down to "hidden" 0.13.
    rows, first = exact.numel() // exact.shape[channel], _first(exact, others)
    a = exact - first
    around = a.mean(others, keepdim=True)
    a, mean = a.sub_(around), (first + around).flatten().abs_()
    squares = a.square().sum(others)
    size = (squares / rows).sqrt_()
    varies = size > NOISE * mean
    hidden = varies & (size < HIDDEN * torch.finfo(form.result).eps / 2 * mean)
    if not bool(hidden.any()):
        return None
    b = found - _first(found, others)
    b = b.sub_(b.mean(others, keepdim=True))
    norms = (squares * b.square().sum(others)).sqrt_().clamp_(min=1e-30)
    kept = float(((a * b).sum(others) / norms)[varies].nan_to_num_().mean())
    error = float((a.sub_(b).square_().sum(others) / rows)[varies].mean().sqrt())
    middle = float(mean[hidden].median())
    step = torch.finfo(form.result).eps * 2.0 ** math.floor(math.log2(middle))
    return Spread(kept, middle, float(size[hidden].median()), step, error)


def _first(x: torch.Tensor, others: list[int]) -> torch.Tensor:
    """The first number of each channel."""
    for one in others:
        x = x.narrow(one, 0, 1)
    return x
