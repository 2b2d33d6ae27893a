"""Apex for today's PyTorch: mixed-precision training on every device, with nothing to compile.

``import apex`` gives its parts as attributes (``apex.amp``), as programs written for NVIDIA's
Apex expect, and nothing else happens: no Triton, no CUDA context, no output, no log handler.
What needs an extra (the command line's benchmark) is never imported from here.

An independent implementation, not affiliated with NVIDIA.
"""

from apex import amp

__all__ = ["__version__", "amp"]

__version__ = "1.0.0.dev0"
