"""What is inspected of :mod:`apex.kernels.group_norm`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from apex.kernels._launching import cdiv
from apex.kernels.group_norm import TILE, backward, forward
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    narrow = dict.fromkeys(("weight_ptr", "bias_ptr"), "one number a channel, once for all rows")
    narrow |= dict.fromkeys(("partial_ptr", "sums_ptr"), "two sums a channel for all rows")
    narrow |= dict.fromkeys(("stats_ptr", "means_ptr"), "two numbers of a group, for each channel")
    more: dict[str, Any] = {"writes": ("y_ptr", "dx_ptr"), "narrow": narrow, "tile": TILE}
    usual = itertools.product(("fp32", "fp16", "bf16"), (64, 1000), ("", " silu", " no weight"))
    for kind, channels, end in (*usual, ("bf16", 60, ""), ("bf16", 1, "")):
        x = meta(kind, 8, channels, 63, 65).to(memory_format=torch.channels_last)
        weight, groups = None if "no" in end else meta("fp32", channels), cdiv(channels, 16)
        known: dict[str, Any] = {"x": x, "weight": weight, "bias": weight, "groups": groups}
        known |= {"eps": 1e-5, "silu": "silu" in end}
        stats = meta("fp32", 8, groups, 2)
        back = partial(backward, x, [True] * 3, stats=stats, **known)
        more["aligned"] = channels % 8 == 0
        for call in (partial(forward, **known), back):
            yield from launched(call, "group_norm", f"{kind} {channels} channels{end}", **more)
