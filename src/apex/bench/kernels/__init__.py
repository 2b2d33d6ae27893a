"""`apex bench kernels` times each operation; `apex kernels` reads their machine code."""

__all__: list[str] = []
