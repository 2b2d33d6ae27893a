"""Inspect compiled kernels without a GPU; :mod:`.finding` is where to start."""
