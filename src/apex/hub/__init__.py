"""Layers of apex for the package ``kernels``, through which transformers can load them.

The folder of this module is a repository that ``kernels.LocalLayerRepository`` can read. It has one
build for all devices. Tested with transformers 5.20 and kernels 0.17.
"""

from pathlib import Path
from typing import Any

__all__ = ["LAYERS", "PATH", "kernel_mapping"]

#: Path of this folder, for ``KernelConfig({"RMSNorm": f"{PATH}:RMSNorm"}, use_local_kernel=True)``.
#:
#: :meta hide-value:
PATH = Path(__file__).parent
#: Names of the layers that transformers registers, and ``LayerNorm`` for your own models.
LAYERS = ("LayerNorm", "RMSNorm", "RMSNormZeroCentered", "SwiGLUMLP")


def kernel_mapping(*devices: str) -> dict[str, dict[str, Any]]:
    """Return the mapping for ``kernels.use_kernel_mapping`` and ``register_kernel_mapping``.

    Args:
        *devices: Device types, named as in ``kernels``; by default ``"cuda"``, ``"rocm"`` and
            ``"cpu"``.

    Raises:
        ModuleNotFoundError: The package ``kernels`` is not installed.
    """
    try:
        from kernels import LocalLayerRepository
    except ModuleNotFoundError as error:
        said = "apex.hub.kernel_mapping needs the package kernels: pip install kernels"
        raise ModuleNotFoundError(said, name=error.name) from error
    devices = devices or ("cuda", "rocm", "cpu")
    return {
        layer: dict.fromkeys(devices, LocalLayerRepository(PATH, layer_name=layer))
        for layer in LAYERS
    }
