"""`apex bench kernels`: the command, its cases, and how they are timed."""

__all__: list[str] = []
