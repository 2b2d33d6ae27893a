"""How an optimizer's weights are stored: four ways to keep what 16 bits round away.

| storage | weight | beside it | bytes per weight | what is lost |
|---|---|---|---|---|
| ``"plain"`` | float32, or 16-bit as it is | | 4 or 2 | 16-bit: updates below half an ulp |
| ``"low_bits"`` | bfloat16 | the 16 low bits, int16 | 4 | nothing: bit-equal to float32 |
| ``"kahan"`` | bfloat16 | its rounding error, bfloat16 | 4 | what 16 significant bits round away |
| ``"stochastic"`` | bfloat16 | | 2 | nothing on average |

A float32 master beside a 16-bit model weight is plain storage with a copy: 6 bytes.

The update itself never knows: a storage turns columns into float32 values before it and new values
into columns after it, in plain PyTorch here and in the same kernel launch in
:mod:`apex.kernels.storage`.

Sources: the split is that of NVIDIA Apex's distributed Adam; Kahan, "Further remarks on reducing
truncation errors", CACM 8(1), 1965, as used for weights by Zamirai et al., arXiv:2010.06192, who
also give stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apex.ops.columns import Column, Scalar
from apex.ops.multi_tensor import PLAIN as PLAIN_CODEC
from apex.ops.multi_tensor import Codec, Update, Values, run

PARAM = 1  # the column of the weight, in every optimizer's update


@dataclass(frozen=True)
class Storage:
    """A way to store weights.

    Attributes:
        name: What users call it.
        codec: Columns to values and back.
        extra: dtype of the column beside the weight, or ``None``.
        seeded: Whether the kernel draws numbers, from a seed on the device: a CUDA graph that is
            replayed draws another one each time.
    """

    name: str
    codec: Codec
    extra: torch.dtype | None = None
    seeded: bool = False

    def metered(self) -> Codec:
        """The codec, which appends to what is stored whether an update was lost."""
        codec, beside = self.codec, self.extra is not None

        def encode(raw: Values, values: Values, new: Values) -> Values:
            stored = codec.encode(raw, values, new)
            kept = stored[0].to(raw[PARAM].dtype) == raw[PARAM]
            if beside:
                kept = kept & (stored[-1].to(raw[-1].dtype) == raw[-1])
            return *stored, (kept & (new[0] != values[PARAM])).float()

        return Codec(codec.decode, encode, _METERED[self.name])


_METERED = {
    "plain": "storage:widened,metered_rounded",
    "low_bits": "storage:join_low_bits,metered_low_bits",
    "kahan": "storage:add_error,metered_error",
    "stochastic": "storage:widened,metered_stochastically",
}


class LostUpdates:
    """How many weights an update has left as they were, because it rounded to nothing.

    An update counts as lost when the new weight, computed in float32, differs from the old one, and
    what is stored does not.
    """

    def __init__(self) -> None:
        self._lost: torch.Tensor | float = 0.0
        self._weights: torch.Tensor | int = 0

    def add(
        self, lost: torch.Tensor | float, weights: int, noop: torch.Tensor | None = None
    ) -> None:
        """Add one step's counts; nothing waits.

        Args:
            lost: Updates that were lost.
            weights: All that were to be updated.
            noop: One-element tensor; nothing is counted if it is not 0.
        """
        if noop is None:
            self._lost, self._weights = _sum(self._lost, lost), _sum(self._weights, weights)
            return
        skipped = noop.reshape(()) != 0
        self._lost = _sum(self._lost, torch.where(skipped, 0.0, lost))
        self._weights = _sum(self._weights, torch.where(skipped, 0, weights))

    @property
    def share(self) -> float:
        """Lost updates by all updates since :meth:`reset`; waits for the device."""
        weights = int(self._weights)
        return float(self._lost) / weights if weights else 0.0

    def reset(self) -> None:
        """Begin again at zero."""
        self._lost, self._weights = 0.0, 0


def _sum(total: Any, more: Any) -> Any:
    if isinstance(total, torch.Tensor) and isinstance(more, torch.Tensor):
        more = more.to(total.device, non_blocking=True)
    return total + more


def _others_widened(raw: Values, param: torch.Tensor) -> Values:
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in raw[:-1]]
    wide[PARAM] = param
    return tuple(wide)


def split(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 into bfloat16, rounded half up, and the 16 low bits as int16.

    A nan loses its payload: rounding up could carry it to -0, and a GPU's own nan does.
    """
    bits = value.contiguous().view(torch.int32)
    bits = torch.where(value.isnan(), 0x7FC00000, bits)
    low = bits.bitwise_and(0xFFFF)
    high = (bits.to(torch.int64) + 0x8000) >> 16
    return _int16(high).view(torch.bfloat16), _int16(low)


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Undo :func:`split`.

    A zero beside negative low bits, which :func:`split` never makes, is a zero that was written
    over a weight: the bits are ignored, for joined they are nan.
    """
    top = high.contiguous().view(torch.int16).to(torch.int32)
    low = low.to(torch.int32)
    low = torch.where((top.bitwise_and(0x7FFF) == 0) & (low < 0), 0, low)
    return (((top - (low < 0).to(torch.int32)) << 16) | low.bitwise_and(0xFFFF)).view(torch.float32)


def _int16(bits: torch.Tensor) -> torch.Tensor:
    """The 16 low bits as int16."""
    bits = bits.bitwise_and(0xFFFF)
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)


def _decode_low_bits(raw: Values) -> Values:
    return _others_widened(raw, join(raw[PARAM], raw[-1]))


def _encode_low_bits(raw: Values, values: Values, new: Values) -> Values:
    high, low = split(new[0])
    return high, *new[1:], low


def _decode_kahan(raw: Values) -> Values:
    return _others_widened(raw, raw[PARAM].float() + raw[-1].float())


def _encode_kahan(raw: Values, values: Values, new: Values) -> Values:
    rounded = new[0].to(torch.bfloat16)
    return rounded, *new[1:], new[0] - rounded.float()


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


def _encode_stochastic(raw: Values, values: Values, new: Values) -> Values:
    return round_stochastically(new[0]), *new[1:]


PLAIN = Storage("plain", PLAIN_CODEC)
LOW_BITS = Storage(
    "low_bits",
    Codec(_decode_low_bits, _encode_low_bits, "storage:join_low_bits,split_low_bits"),
    torch.int16,
)
KAHAN = Storage(
    "kahan", Codec(_decode_kahan, _encode_kahan, "storage:add_error,keep_error"), torch.bfloat16
)
STOCHASTIC = Storage(
    "stochastic",
    Codec(PLAIN_CODEC.decode, _encode_stochastic, "storage:widened,rounded_stochastically"),
    seeded=True,
)
STORAGES = {storage.name: storage for storage in (PLAIN, LOW_BITS, KAHAN, STOCHASTIC)}


@dataclass(frozen=True, eq=False)
class How:
    """What surrounds a step, the same for every optimizer.

    Attributes:
        factor: What gradients are multiplied by: 1 / loss scale, times a clipping coefficient.
        noop: One-element tensor; nothing happens if it is not 0.
        write_grads: Whether gradients are left multiplied by ``factor``.
        storage: How the weights are stored.
        extra: The storage's own column; with plain storage 16-bit weights that get the new
            values too.
        meter: Who counts lost updates.
    """

    factor: Scalar = 1.0
    noop: torch.Tensor | None = None
    write_grads: bool = False
    storage: Storage = PLAIN
    extra: Column | None = None
    meter: LostUpdates | None = None

    @property
    def is_bare(self) -> bool:
        """Whether nothing surrounds the step but a factor that the host knows."""
        alone = self.noop is None and self.extra is None and self.meter is None
        known = not isinstance(self.factor, torch.Tensor)
        return known and alone and self.storage is PLAIN and not self._writes

    @property
    def _writes(self) -> bool:
        return self.write_grads and bool(self.factor != 1.0)


PLAINLY = How()


def run_stored(
    update: Update,
    columns: Sequence[Column],
    scalars: tuple[Scalar, ...],
    how: How,
    *,
    sums: tuple[int, ...] = (),
) -> torch.Tensor | None:
    """Run an optimizer's update on weights stored in some way.

    Args:
        update: Returns the new weight, the new states in order, then the scaled gradient.
        columns: Gradients, weights, states.
        scalars: Of the update.
        how: Skipping and storage.
        sums: Numbers of new values to sum over each position.

    Returns:
        What :func:`apex.ops.multi_tensor.run` returns.
    """
    states = len(columns) - 2
    stores = [(PARAM + i, i) for i in range(1 + states)]
    if how.write_grads:
        stores.append((0, 1 + states))
    columns = list(columns)
    if how.extra is not None:
        stores.append((len(columns), 0 if how.storage is PLAIN else 2 + states))
        columns.append(how.extra)
    seed = None
    if how.storage.seeded:
        device = columns[PARAM][0].device
        seed = torch.randint(0, 1 << 31, (), dtype=torch.int32, device=device)
    codec = how.storage.codec
    if how.meter is not None:
        codec = how.storage.metered()
        lost = (sums[-1] if sums else 1 + states) + 1
        sums = (*sums, lost + (how.storage.extra is not None))
    found = run(
        update,
        columns,
        tuple(stores),
        scalars,
        noop=how.noop,
        sums=sums,
        codec=codec,
        seed=seed,
    )
    if how.meter is None or found is None:
        return found
    how.meter.add(found[-1].sum(), 0, how.noop)
    return found[:-1]
