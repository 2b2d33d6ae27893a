"""A pytest plugin (``-p tests.fake_gpu``): torch sees a GPU that is not there.

``CUDA_VISIBLE_DEVICES=""`` hides it, as it would a real one. Whoever still uses it fails.
"""

import os

import torch


def _visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _current(check_available=False):
    return torch.device("cuda") if _visible() or not check_available else None


torch.cuda.is_available = torch.accelerator.is_available = _visible
torch.cuda.device_count = torch.accelerator.device_count = lambda: int(_visible())
torch.cuda.init = lambda: None
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.is_bf16_supported = lambda *arguments, **options: True
torch.accelerator.current_accelerator = _current
