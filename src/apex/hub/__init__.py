"""``apex.hub``: the layers here for the package ``kernels``, through which transformers takes them.

This folder is a repository as ``kernels.LocalLayerRepository`` reads one: a folder for each build,
here one for all devices, with ``metadata.json`` and a module that has ``layers``. Tested with
transformers 5.20 and kernels 0.17.
"""

from pathlib import Path
from typing import Any

__all__ = ["LAYERS", "PATH", "kernel_mapping"]

#: The folder; ``KernelConfig({"RMSNorm": f"{PATH}:RMSNorm"}, use_local_kernel=True)``.
PATH = Path(__file__).parent
#: Names of layers: those that transformers registers, and ``LayerNorm`` for models of your own.
LAYERS = ("LayerNorm", "RMSNorm", "RMSNormZeroCentered", "SwiGLUMLP")


def kernel_mapping(*devices: str) -> dict[str, dict[str, Any]]:
    """Return the mapping for ``kernels.use_kernel_mapping`` and ``register_kernel_mapping``.

    Args:
        *devices: Types of devices, as ``kernels`` names them; by default ``"cuda"``, ``"rocm"`` and
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
