"""The line of the program that a warning is about."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__))
)


def stacklevel() -> int:
    """How far above its caller the line of the program is, for ``warnings.warn``.

    What ``skip_file_prefixes`` of Python 3.12 does.
    """
    frame: FrameType = sys._getframe(1)
    depth = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, depth = frame.f_back, depth + 1
    return depth
