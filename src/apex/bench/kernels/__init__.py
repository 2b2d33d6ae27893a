"""Two commands about the kernels of `apex.kernels`.

`apex bench kernels` (``timing_command``) times each operation. `apex kernels`
(``inspection_command``) compiles them and reads their machine code.
"""

__all__: list[str] = []
