"""All optimizers, and the ways to make them that differ in what a kernel computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from apex import optimizers
from apex.bench.catalogue import formulas
from apex.bench.catalogue.entry import DTYPES
from apex.bench.catalogue.formulas import Formula
from apex.bench.catalogue.peers import Peer, foreach_novograd, of_torch, timms_lamb
from apex.contrib import optimizers as contrib

__all__ = ["OPTIMIZERS", "Optimizer", "TimedStep", "Variant"]

EVERY = tuple(DTYPES)


@dataclass(frozen=True)
class Variant:
    """A way to make an optimizer.

    Attributes:
        title: What is special, for people; the first of an optimizer has none.
        options: Of the constructor.
        dtypes: Of the weights, names of `DTYPES`.
        every_test: Whether the tests that hold for all optimizers run it. It has state, and the
            variants that do have weight decay in both of its modes.
        larc: Whether it is wrapped by `apex.parallel.LARC`.
    """

    title: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32",)
    every_test: bool = False
    larc: bool = False


@dataclass(frozen=True)
class TimedStep:
    """How `apex bench kernels` times a step.

    Attributes:
        peers: Others who take the same step, by name, from parameters and ``numbers``.
        numbers: Options of ours and theirs.
        states: How many numbers are kept for each weight.
        float32_states: Whether ours are float32 for 16-bit weights too.
        more_reads: Bytes of further passes, from the bytes of a weight.
    """

    peers: Mapping[str, Peer]
    numbers: Mapping[str, Any]
    states: int
    float32_states: bool = False
    more_reads: Callable[[int], int] = lambda size: 0


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        make: The class.
        formula: A step for one tensor, in float64.
        variants: The ways to make it.
        name: For people, where the class's is not enough.
        options: Of the constructor, in all variants.
        max_norm: To which all gradients together are clipped by default; 0 for not at all.
        training: Numbers by which `apex bench` trains with it, if it does.
        launches: Kernels of a step, for one group and one dtype.
        shared_launches: How many of these are there once for all groups.
        timed: How it is timed, if it is.
    """

    make: Callable[..., Any]
    formula: Formula
    variants: tuple[Variant, ...]
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    max_norm: float = 0.0
    training: Mapping[str, float] = field(default_factory=dict)
    launches: int = 1
    shared_launches: int = 0
    timed: TimedStep | None = None

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.name or str(getattr(self.make, "__name__", self.make))

    def called(self, variant: Variant) -> str:
        """The name of a variant for people."""
        return f"{self.title}, {variant.title}" if variant.title else self.title


MOMENTUM = {"momentum": 0.9}
OPTIMIZERS: tuple[Optimizer, ...] = (
    Optimizer(
        optimizers.FusedAdam, formulas.adam,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("L2", {"adam_w_mode": False}, every_test=True),
            Variant("clipped", {"max_grad_norm": 1.0}),
            Variant("capturable", {"capturable": True}, ("fp32", "bf16")),
            Variant(
                "fp32 masters", {"capturable": True, "master_weights": True}, ("fp16", "bf16")
            ),
            *(
                Variant(f"storage={storage}", {"storage": storage}, ("bf16",))
                for storage in ("low_bits", "kahan", "stochastic")
            ),
        ),
        training={"lr": 0.005, "weight_decay": 0.01},
        timed=TimedStep(of_torch("AdamW"), {"weight_decay": 0.01}, 2, float32_states=True),
    ),
    Optimizer(
        contrib.FusedAdam, formulas.adam_eps_inside,
        (Variant("eps inside the root", {"eps_inside_sqrt": True}),),
        name="FusedAdam of apex.contrib",
    ),
    Optimizer(
        optimizers.FusedSGD, formulas.sgd,
        (
            Variant("", {**MOMENTUM, "dampening": 0.5}, EVERY, every_test=True),
            Variant("decay after momentum", {**MOMENTUM, "wd_after_momentum": True},
                    every_test=True),
            Variant("no momentum"),
            Variant("no dampening", MOMENTUM),
            Variant("Nesterov", {**MOMENTUM, "nesterov": True}),
            Variant("LARC", MOMENTUM, larc=True),
        ),
        options={"lr": 0.05}, training={"lr": 0.05, "momentum": 0.9},
        timed=TimedStep(of_torch("SGD"), {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}, 1),
    ),
    Optimizer(
        optimizers.FusedAdagrad, formulas.adagrad,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("decoupled decay", {"adagrad_w_mode": True}, every_test=True),
        ),
        options={"lr": 0.05}, training={"lr": 0.05},
        timed=TimedStep(of_torch("Adagrad"), {"lr": 1e-2}, 1),
    ),
    Optimizer(
        optimizers.FusedLAMB, formulas.lamb,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("L2", {"adam_w_mode": False}, every_test=True),
            Variant("storage=low_bits", {"storage": "low_bits"}, ("bf16",)),
        ),
        max_norm=1.0, training={"lr": 0.005, "weight_decay": 0.01},
        launches=5, shared_launches=2,  # the norm of all gradients
        timed=TimedStep(
            {
                "timm foreach": partial(timms_lamb, foreach=True),
                "timm loop": partial(timms_lamb, foreach=False),
            },
            {"weight_decay": 0.01}, 2,
            # The gradients once for their norm, then weight and update for the step.
            more_reads=lambda size: size + (2 * size + 4),
        ),
    ),
    Optimizer(
        optimizers.FusedMixedPrecisionLamb, formulas.lamb,
        (Variant("", {"reduced_precision_dtype": torch.float16}, ("fp16",)),),
        max_norm=1.0, launches=5, shared_launches=2,
    ),
    Optimizer(
        optimizers.FusedNovoGrad, formulas.novograd,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("decay inside", {"reg_inside_moment": True}, every_test=True),
            Variant("largest", {"norm_type": 0}),
        ),
        training={"lr": 0.3}, launches=3,
        timed=TimedStep(
            {"torch foreach": foreach_novograd},
            {"lr": 1e-3, "betas": (0.95, 0.98), "weight_decay": 0.01}, 1,
            more_reads=lambda size: size,  # the norms'
        ),
    ),
    Optimizer(
        optimizers.FusedLion, formulas.lion, (Variant(dtypes=EVERY, every_test=True),),
        training={"lr": 0.0005, "weight_decay": 0.01},
    ),
)  # fmt: skip
