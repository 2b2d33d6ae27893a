"""``_amp_state``, which programs read and write: a view of the newest ``initialize``.

Nothing in amp decides by it except its three switches (``hard_override``,
``allow_incoming_model_not_fp32``, ``verbosity``): each training has its own state, found from
its optimizer or model. Programs read and write ``_amp_state.loss_scalers[0]._loss_scale``,
``_amp_state.opt_properties`` and the like, so those are here as attributes. Whose ``loss_scalers``
are shown is said in :meth:`apex.amp.training.Training.shown_scalers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from apex.amp import _speech
from apex.amp.gradients.masters import master_params

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """Bag of attributes; those of a training appear with the first ``initialize``."""

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1

    def __getattr__(self, name: str) -> Any:
        # The package attribute ``apex.amp._amp_state`` is this instance, so that after
        # ``import apex.amp._amp_state as m`` the names of the module are found here.
        if name in __all__:
            return globals()[name]
        if name == "loss_scalers" and "training" in self.__dict__:
            return self.training.shown_scalers()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def forget(self) -> None:
        """Drop everything a training has left here."""
        for name in ("opt_properties", "min_loss_scale", "max_loss_scale", "handle"):
            self.__dict__.pop(name, None)
        self.show([])

    def show(self, trainings: Sequence[Any]) -> None:
        """Show the last one of ``trainings``, or none, and drop scalers that a program put here."""
        self.__dict__.pop("loss_scalers", None)
        if trainings:
            self.training = trainings[-1]
        else:
            self.__dict__.pop("training", None)


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise ``RuntimeError(msg)``, or only warn when ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    warnings.warn(f"Warning:  {msg}", stacklevel=3)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Say ``msg`` on rank 0 when ``_amp_state.verbosity`` is above 0; ``rank0`` is implied."""
    if _amp_state.verbosity > 0:
        _speech.say(msg)
