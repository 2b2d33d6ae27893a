"""``timing_command``: `apex bench kernels`. ``inspection_command``: `apex kernels`."""

__all__: list[str] = []
