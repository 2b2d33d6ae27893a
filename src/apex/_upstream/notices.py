"""Deprecation warnings, a check of cuDNN's version and a log formatter, as in NVIDIA's Apex.

Nothing in this package uses them: nothing here is deprecated, needs cuDNN or sets up logging.
Programs import them from ``apex``.
"""

import logging
import warnings
from typing import Any

import torch

from apex.amp._speech import is_rank0

__all__ = [
    "DeprecatedFeatureWarning",
    "RankInfoFormatter",
    "check_cudnn_version_and_warn",
    "deprecated_warning",
]


class DeprecatedFeatureWarning(FutureWarning):
    """The category of :func:`deprecated_warning`."""


def deprecated_warning(msg: str) -> None:
    """Warn with the text ``msg``, on rank 0 or where there is no process group.

    Call it in the deprecated function itself: the warning names the line that called that one.
    """
    if is_rank0():
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=3)


def check_cudnn_version_and_warn(global_option: str, required_cudnn_version: int) -> bool:
    """Return whether torch has cuDNN of a version or a newer one, and warn where it has not.

    Args:
        global_option: What needs it; named in the warning.
        required_cudnn_version: As ``torch.backends.cudnn.version()`` gives it: 8900 for 8.9.0.
    """
    cudnn: Any = torch.backends.cudnn
    found = cudnn.version() if cudnn.is_available() else None
    if found is not None and found >= required_cudnn_version:
        return True
    warnings.warn(
        f"{global_option} needs cuDNN {required_cudnn_version} or newer, and "
        + ("this torch has none." if found is None else f"torch has cuDNN {found}."),
        stacklevel=2,
    )
    return False


class RankInfoFormatter(logging.Formatter):
    """A formatter whose formats may hold ``%(rank_info)s``, this process's rank.

    It is 0 where there is no process group. In the original it was a tuple of four ranks, in the
    groups of ``apex.transformer.parallel_state``.

    Example:
        >>> handler = logging.StreamHandler()
        >>> handler.setFormatter(RankInfoFormatter("rank %(rank_info)s: %(message)s"))
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format ``record``, to which the attribute ``rank_info`` is added."""
        distributed = torch.distributed
        has_group = distributed.is_available() and distributed.is_initialized()
        record.rank_info = distributed.get_rank() if has_group else 0
        return super().format(record)
