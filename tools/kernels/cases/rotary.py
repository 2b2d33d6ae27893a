"""What is inspected of :mod:`apex.kernels.rotary`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from apex.kernels.rotary import TILE, forward
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is compiled and inspected."""
    narrow = dict.fromkeys(("cos_ptr", "sin_ptr"), "one row a position, once for all heads")
    narrow["positions_ptr"] = "one number a position"
    shapes = [(128, 64, 1), (96, 32, 1), (80, 40, 2)]
    for kind, more in (("fp16", []), ("bf16", [(8192, 4096, 1), (71, 35, 1)]), ("fp32", [])):
        for channels, half, groups in shapes + more:
            table = meta("fp32", 500, 2 * half)
            positions = None if groups == 1 else meta("i64", 500, groups)
            t = meta(kind, 500, 8, 64, channels * groups)
            yield from launched(
                partial(forward, t, table, table, positions, 0, half < 64), "rotary",
                f"{kind} {2 * half} of {channels}, times {groups}", prefix="rotary_kernel",
                writes=("y_ptr",), narrow=narrow, aligned=channels % 16 == 0,
                tile=max(1, TILE // max(half, 64)) * t.shape[-1], amd={"num_warps": 2},
            )  # fmt: skip
