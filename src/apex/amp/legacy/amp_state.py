"""``_amp_state``, which programs read and write: a view of :mod:`apex.amp.newest`.

Programs read and write ``_amp_state.loss_scalers[0]._loss_scale``, ``_amp_state.opt_properties``
and the like, so those are here as attributes. Whose ``loss_scalers`` are shown is said in
:meth:`apex.amp.training.Training.shown_scalers`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from apex.amp import _speech
from apex.amp.gradients.masters import master_params
from apex.amp.newest import newest, warn_or_err

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """What programs see of the newest ``initialize``: what they write to it is written there."""

    handle_type: ClassVar[Any] = None  # AmpHandle

    def __init__(self) -> None:
        self.__dict__ = vars(newest)

    def __getattr__(self, name: str) -> Any:
        # The package attribute ``apex.amp._amp_state`` is this instance, so that after
        # ``import apex.amp._amp_state as m`` the names of the module are found here.
        if name in __all__:
            return globals()[name]
        if name == "loss_scalers" and "training" in self.__dict__:
            return self.training.shown_scalers()
        if name == "handle" and "casts" in self.__dict__:
            self.handle = self.handle_type.of(self.casts)
            return self.handle
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Say ``msg`` on rank 0 when ``_amp_state.verbosity`` is above 0; ``rank0`` is implied."""
    if newest.verbosity > 0:
        _speech.say(msg)
