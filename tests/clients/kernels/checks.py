"""The package kernels: our layers through its mapping, and through transformers' KernelConfig."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read by Triton where a kernel is decorated

from tests.test_hub import *  # noqa: F403
