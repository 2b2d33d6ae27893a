"""How an optimizer's weights are stored: four ways to keep what 16 bits round away.

| storage | weight | beside it | bytes per weight | what is lost |
|---|---|---|---|---|
| ``"plain"`` | float32, or 16-bit as it is | | 4 or 2 | 16-bit: updates below half an ulp |
| ``"low_bits"`` | bfloat16 | the 16 low bits, int16 | 4 | nothing: bit-equal to float32 |
| ``"kahan"`` | bfloat16 | its rounding error, bfloat16 | 4 | what 16 significant bits round away |
| ``"stochastic"`` | bfloat16 | | 2 | nothing on average |

A float32 master of a 16-bit model weight is plain storage with a copy: 6 bytes. ``"auto"`` is
``"low_bits"`` for bfloat16 weights and ``"plain"`` for the others of the same optimizer.

The update does not depend on the storage. A storage turns columns into float32 values before the
update, and new values into columns after it: in plain PyTorch here, and in the same kernel launch
in :mod:`apex.kernels.storage`.

Sources: the split is that of NVIDIA Apex's distributed Adam; Kahan, "Further remarks on reducing
truncation errors", CACM 8(1), 1965, as used for weights by Zamirai et al., arXiv:2010.06192, who
also give stochastic rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from apex.ops import _runtime
from apex.ops.lists.dither import Dither
from apex.ops.lists.multi_tensor import Codec, Update, Values, run
from apex.ops.lists.quantized import Quantized
from apex.ops.lists.tensor_lists import Scalar, TensorList

PARAM = 1  # the column of the weight, in every optimizer's update


@dataclass(frozen=True)
class Storage:
    """A way to store weights.

    Attributes:
        name: What users call it.
        widen: ``weight, what is stored with it if anything is -> float32 value``.
        narrow: ``float32 value -> (weight, what is stored with it if anything is)``; writing rounds
            to the dtype of the column.
        decode: What ``widen`` is called in :mod:`apex.kernels.storage`.
        encode: What ``narrow`` is called there.
        extra: dtype of what is stored with the weight, or ``None``.
        column: What an optimizer's state calls that column.
        seeded: Whether the kernel draws numbers, from a seed on the device: a CUDA graph that is
            replayed draws another one each time.
        write: ``(float32 value, weight, what is stored with it)``: writes what ``narrow`` returns,
            in fewer passes, and may write into the value; ``None`` where there is no such way.
    """

    name: str
    widen: Callable[..., torch.Tensor]
    narrow: Callable[[torch.Tensor], Values]
    decode: str
    encode: str
    extra: torch.dtype | None = None
    column: str | None = None
    seeded: bool = False
    write: Callable[..., None] | None = None

    def codec(self, quantized: tuple[Quantized, ...] = (), dither: Dither | None = None) -> Codec:
        """How columns are stored: gradients, weights, states, what is stored with weights."""
        if not quantized and dither is None:
            return self._codec
        return replace(self._codec, quantized=quantized, dither=dither)

    @functools.cached_property
    def _codec(self) -> Codec:
        has_extra = self.extra is not None

        def decode(raw: Values) -> Values:
            others = raw[:-1] if has_extra else raw
            weight = self.widen(raw[PARAM], *raw[len(others) :])
            return _widened(raw[0]), weight, *map(_widened, others[PARAM + 1 :])

        def encode(raw: Values, values: Values, new: Values) -> Values:
            weight, *more = self.narrow(new[0])
            return weight, *new[1:], *more

        return Codec(decode, encode, f"storage:{self.decode},{self.encode}")


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def split_bits(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 into bfloat16, rounded half up, and the 16 low bits as int16.

    ``bits = (high << 16) + low``, with a sign: rounding up is carried into ``high``. A nan loses
    its payload: rounding up could carry it to -0, and a GPU's own nan does.
    """
    inf = float("inf")
    # CPU: 0.2 ms for 2**19 values, 0.6 with torch.where(value.isnan(), ...).
    bits = value.nan_to_num(float("nan"), inf, -inf).view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Undo :func:`split_bits`.

    A zero beside negative low bits, which :func:`split_bits` never makes, is a zero that was
    written over a weight: the bits are ignored, for joined they are nan.
    """
    if not _runtime.waits(high.device):  # 0.5 ns a value, 4.8 by what follows (one thread)
        joined = high.float()
        joined.view(torch.int32).add_(low)
        if _is_finite(joined):
            return joined
    top = high.view(torch.int16)
    is_not_zero = top.bitwise_and(0x7FFF).clamp(max=1)
    low = low.clamp(min=0) + low.clamp(max=0) * is_not_zero
    return ((top.to(torch.int32) << 16) + low).view(torch.float32)


def _write_bits(value: torch.Tensor, weight: torch.Tensor, low: torch.Tensor) -> None:
    """Write what :func:`split_bits` returns, without its copies; the value is overwritten."""
    if not _runtime.waits(value.device) and _is_finite(value):
        bits = value.view(torch.int32)
        low.copy_(bits)
        weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
        return
    for column, new in zip((weight, low), split_bits(value), strict=True):
        column.copy_(new)


def _is_finite(value: torch.Tensor) -> bool:
    """Whether no element is inf or nan, by one pass; a sum that overflows is taken for one."""
    return math.isfinite(value.sum().item())


def _corrected(weight: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    return weight.float() + error.float()


def _with_error(value: torch.Tensor) -> Values:
    rounded = value.to(torch.bfloat16)
    return rounded, value - rounded.float()


def round_stochastically(
    value: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Round float32 to one of its two bfloat16 neighbours, each as likely as the value is near.

    The expected result is the value itself. inf and nan stay what they are.
    """
    noise = torch.randint(
        0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    bits = value.contiguous().view(torch.int32) + noise
    rounded = bits.bitwise_and(-65536).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


PLAIN = Storage("plain", _widened, lambda value: (value,), "widened", "rounded")
LOW_BITS = Storage(
    "low_bits", join_bits, split_bits, "join_low_bits", "split_low_bits", torch.int16, "low_bits",
    write=_write_bits,
)  # fmt: skip
KAHAN = Storage(
    "kahan", _corrected, _with_error, "add_error", "keep_error", torch.bfloat16, "error"
)
STOCHASTIC = Storage(
    "stochastic",
    _widened,
    lambda value: (round_stochastically(value),),
    "widened",
    "rounded_stochastically",
    seeded=True,
)
STORAGES = {storage.name: storage for storage in (PLAIN, LOW_BITS, KAHAN, STOCHASTIC)}
AUTO = "auto"


def storage_of(name: str, dtype: torch.dtype) -> Storage:
    """How an optimizer whose storage has this name stores weights of this dtype."""
    if name == AUTO:
        return LOW_BITS if dtype == torch.bfloat16 else PLAIN
    return STORAGES[name]


class StepOptions(NamedTuple):
    """What surrounds a step, the same for every optimizer.

    Attributes:
        factor: What gradients are multiplied by: 1 / loss scale, times a clipping coefficient.
        noop: One-element tensor; nothing happens if it is not 0.
        write_grads: Whether gradients are left multiplied by ``factor``.
        storage: How the weights are stored.
        extra: The storage's own column; with plain storage 16-bit weights that get the new
            values too.
        dense: Whether no position is odd, known before, see
            :func:`apex.ops.lists.tensor_lists.odd_positions`.
        quantized: The states that are quantised to 8 bits.
        dither: The states in bfloat16 that are rounded stochastically.
    """

    factor: Scalar = 1.0
    noop: torch.Tensor | None = None
    write_grads: bool = False
    storage: Storage = PLAIN
    extra: TensorList | None = None
    dense: bool = False
    quantized: tuple[Quantized, ...] = ()
    dither: Dither | None = None

    def on(self, device: torch.device) -> StepOptions:
        """The same for launches on a device."""
        factor, noop = self.factor, self.noop
        if isinstance(factor, torch.Tensor):
            factor = factor.to(device, non_blocking=True)
        if noop is not None:
            noop = noop.to(device, non_blocking=True)
        return self._replace(factor=factor, noop=noop)


DEFAULT_OPTIONS = StepOptions()


@dataclass(frozen=True, eq=False)
class ScaledStep:
    """What amp hands to the next ``step()`` of a fused optimizer: arguments of ``step_scaled``."""

    factor: Scalar = 1.0
    noop: torch.Tensor | None = None
    copies: Mapping[torch.Tensor, torch.Tensor] | None = None
    grads: Mapping[torch.Tensor, torch.Tensor] | None = None


def run_stored(
    update: Update,
    columns: Sequence[TensorList],
    scalars: tuple[Scalar, ...],
    options: StepOptions,
    *,
    told: bool = False,
) -> None:
    """Run an optimizer's update on weights stored in some way.

    Args:
        update: Returns the new weight, the new states in order, then the scaled gradient.
        columns: Gradients, weights, states.
        scalars: Of the update.
        options: Skipping and storage.
        told: Whether autograd has been told of what is written.
    """
    stores = stores_of(
        len(columns) - 2, options.write_grads, options.extra is not None, options.storage is PLAIN
    )
    if options.extra is not None:
        columns = [*columns, options.extra]
    seed = None
    if options.storage.seeded:
        device = columns[PARAM][0].device
        seed = torch.randint(0, 1 << 31, (), dtype=torch.int32, device=device)
    run(
        update, columns, stores, scalars, noop=options.noop,
        codec=options.storage.codec(options.quantized, options.dither), seed=seed,
        dense=options.dense, also=None if told else (),
    )  # fmt: skip


@functools.cache
def stores_of(
    states: int, grads: bool = False, extra: bool = False, plain: bool = True
) -> tuple[tuple[int, int], ...]:
    """Which new value is written to which column."""
    stores = [(PARAM + i, i) for i in range(1 + states)]
    if grads:
        stores.append((0, 1 + states))
    if extra:
        stores.append((2 + states, 0 if plain else 2 + states))
    return tuple(stores)
