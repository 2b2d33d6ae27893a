"""Choices that NVIDIA's kernels were tuned to on an A100. There are none: any key gives ``{}``."""

from collections import defaultdict
from typing import Any

_auto_tuned_config_ampere: dict[Any, dict[str, Any]] = defaultdict(dict)
