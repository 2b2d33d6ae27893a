"""Inspect compiled kernels without a GPU (``./dev kernels``); begin with :mod:`.finding`."""
