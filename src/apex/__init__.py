"""Apex for today's PyTorch: mixed-precision training on every device, with nothing to compile.

``import apex`` gives its parts as attributes (``apex.amp``, ``apex.optimizers``), as programs
written for NVIDIA's Apex expect, and nothing else happens: no Triton, no CUDA context, no output,
no log handler. Parts other than ``amp`` are imported when they are first asked for. What needs an
extra (the command line's benchmark) is never imported from here.

An independent implementation, not affiliated with NVIDIA.
"""

import importlib
from types import ModuleType

from apex import _missing, amp
from apex._notices import (
    DeprecatedFeatureWarning,
    RankInfoFormatter,
    check_cudnn_version_and_warn,
    deprecated_warning,
)

__all__ = [
    "DeprecatedFeatureWarning",
    "RankInfoFormatter",
    "__version__",
    "amp",
    "check_cudnn_version_and_warn",
    "deprecated_warning",
]

__version__ = "1.0.0.dev0"

_PARTS = (
    "RNN",
    "contrib",
    "debug",
    "fp16_utils",
    "fused_dense",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "reparameterization",
    "transformer",
)


def __getattr__(name: str) -> ModuleType:
    if name in _PARTS:
        return importlib.import_module(f"apex.{name}")
    raise _missing.attribute_error(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})


_missing.install()
