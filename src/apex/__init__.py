"""Apex for today's PyTorch: mixed-precision training on every device, with nothing to compile.

``import apex`` gives its parts as attributes (``apex.amp``, ``apex.optimizers``), as programs
written for NVIDIA's Apex expect, and nothing else happens: no Triton, no CUDA context, no output,
no log handler, no torch. Parts are imported when they are first asked for: ``apex debug`` runs
scripts that set variables which torch reads when it is imported. What needs an extra (the command
line's benchmark) is never imported from here.

An independent implementation, not affiliated with NVIDIA.
"""

import importlib
from typing import TYPE_CHECKING, Any

from apex._upstream import missing as _missing

if TYPE_CHECKING:
    from apex import amp
    from apex._upstream.notices import (
        DeprecatedFeatureWarning,
        RankInfoFormatter,
        check_cudnn_version_and_warn,
        deprecated_warning,
    )
    from apex.patching.models import patch

__all__ = [
    "DeprecatedFeatureWarning",
    "RankInfoFormatter",
    "__version__",
    "amp",
    "check_cudnn_version_and_warn",
    "deprecated_warning",
    "patch",
]

__version__ = "1.0.0"

_PARTS = (
    "RNN",
    "amp",
    "contrib",
    "debug",
    "fp16_utils",
    "fused_dense",
    "hub",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "reparameterization",
    "transformer",
)


_NAMES = {  # the module that each is imported from
    "DeprecatedFeatureWarning": "apex._upstream.notices",
    "RankInfoFormatter": "apex._upstream.notices",
    "check_cudnn_version_and_warn": "apex._upstream.notices",
    "deprecated_warning": "apex._upstream.notices",
    "patch": "apex.patching.models",
}


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"apex.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise _missing.attribute_error(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS, *_NAMES})


_missing.install()
