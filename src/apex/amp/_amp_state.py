"""The old global state object, kept as a view of the newest ``initialize``.

Nothing in amp decides by it except its three switches (``hard_override``,
``allow_incoming_model_not_fp32``, ``verbosity``): each training has its own state, found from
its optimizer or model. Programs read and write ``_amp_state.loss_scalers[0]._loss_scale``,
``_amp_state.opt_properties`` and the like, so those are here as attributes. Whose ``loss_scalers``
are shown is said in :meth:`apex.amp.training.Training.shown_scalers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.amp import _speech

_NAMES = ("AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err")


class AmpState:
    """Bag of attributes; those of a training appear with the first ``initialize``."""

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1

    def __getattr__(self, name: str) -> Any:
        # The package attribute ``apex.amp._amp_state`` is this instance, so that after
        # ``import apex.amp._amp_state as m`` the names of the module are found here.
        if name in _NAMES:
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


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor the optimizer steps: the float32 masters at O2 and O5.

    Args:
        optimizer: Anything with ``param_groups``.

    Raises:
        TypeError: It has none, such as a model.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"amp.master_params was given {type(optimizer).__name__}; pass the optimizer, which "
            "knows the masters."
        )
    expose = getattr(getattr(optimizer, "_amp_stash", None), "expose", None)
    if expose is not None:
        expose()
    for group in optimizer.param_groups:
        yield from group["params"]
