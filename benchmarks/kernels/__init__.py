"""``python -m benchmarks.kernels``: times of each operation, ours and those of other packages."""

__all__: list[str] = []
