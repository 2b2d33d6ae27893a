"""Triton kernels and their launchers, one file for each operation.

These are the only files that import triton at the top; ``apex.ops`` imports them when a kernel is
about to run. Nothing here chooses a path or checks what a user passed: ``apex.ops`` does.
"""
