"""RMS norm on a GPU; see :mod:`apex.ops.rms_norm` for the definition."""

import functools
from collections.abc import Iterator

from apex.kernels import _rows
from apex.kernels._cases import Case

forward = functools.partial(_rows.launch_forward, centered=False)
backward = functools.partial(_rows.launch_backward, centered=False)


def cases() -> Iterator[Case]:
    """What is inspected."""
    return _rows.cases("rms_norm", centered=False)
