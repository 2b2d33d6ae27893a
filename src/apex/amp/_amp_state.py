"""Old path of :mod:`apex.amp.legacy.amp_state`."""

from apex.amp.legacy.amp_state import AmpState, _amp_state, master_params, maybe_print, warn_or_err

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]
