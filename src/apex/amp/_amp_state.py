"""Old path of :mod:`apex.amp.newest`."""

from apex.amp.newest import AmpState, _amp_state, master_params, maybe_print, warn_or_err

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]
