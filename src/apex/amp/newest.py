"""What the newest ``initialize`` has made, and three switches that programs set.

Nothing in amp decides by it except the switches (``hard_override``,
``allow_incoming_model_not_fp32``, ``verbosity``): each training has its own state, found from
its optimizer or model. Programs see it as ``_amp_state`` (:mod:`apex.amp.legacy.amp_state`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from apex.amp.scale import Scale


class Newest:
    """Bag of attributes; those of a training appear with the first ``initialize``."""

    scaler_type: ClassVar[type[Scale]] = Scale  # what initialize makes
    training: Any
    opt_properties: Any
    casts: Any  # of functions, while a level has any

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1

    def forget(self) -> None:
        """Drop everything a training has left here."""
        for name in ("opt_properties", "min_loss_scale", "max_loss_scale", "casts", "handle"):
            self.__dict__.pop(name, None)
        self.show([])

    def show(self, trainings: Sequence[Any]) -> None:
        """Show the last one of ``trainings``, or none, and drop scalers that a program put here."""
        self.__dict__.pop("loss_scalers", None)
        if trainings:
            self.training = trainings[-1]
        else:
            self.__dict__.pop("training", None)


newest = Newest()


def warn_or_err(msg: str) -> None:
    """Raise ``RuntimeError(msg)``, or only warn when ``newest.hard_override`` is set."""
    if not newest.hard_override:
        raise RuntimeError(msg)
    warnings.warn(f"Warning:  {msg}", stacklevel=3)
