"""What differs between releases of torch, from 2.9 on.

Written for the oldest supported release; what a newer one has is asked for here alone, with the
release that has it. "2.13" means: 2.13 has it and 2.9 does not. Releases between them take the way
of 2.9, which works in both. "2.10" means 2.10 itself.
"""

from typing import Any, cast

import torch
from torch.torch_version import TorchVersion

from apex._compat import private

__all__ = [
    "ALL_GATHER",
    "CUDA_ONLY",
    "HAS_GRAD_DTYPE",
    "IS_2_10",
    "IS_2_13",
    "REDUCE_SCATTER",
    "TRACES_SET_AUTOCAST",
    "add_wide_product",
    "cpu_capabilities",
    "has_varlen_attention",
    "is_compiling",
    "root_mesh",
    "varlen_attention",
]

IS_2_10 = TorchVersion(torch.__version__) >= "2.10"
IS_2_13 = TorchVersion(torch.__version__) >= "2.13"

# What is called of torch's and has a kernel on CUDA alone, not on a CPU -> the release it needs.
CUDA_ONLY = {
    "addmm.dtype_out": "2.10",  # before: sum and products in one dtype
    "batch_norm_backward_elemt": "2.9",
    "batch_norm_backward_reduce": "2.9",
    "batch_norm_elemt": "2.9",
    "batch_norm_stats": "2.9",
    "mm.dtype": "2.9",
    "record_stream": "2.9",
}

# 2.13: Dynamo traces torch.set_autocast_enabled and set_autocast_dtype; before, a graph breaks.
TRACES_SET_AUTOCAST = IS_2_13


# 2.13: Tensor.grad_dtype, the dtype that a parameter's gradient has and is added up in.
HAS_GRAD_DTYPE = IS_2_13

# 2.13: the names of collectives on flat tensors; the older ones warn there.
REDUCE_SCATTER = "reduce_scatter_single" if IS_2_13 else "reduce_scatter_tensor"
ALL_GATHER = "all_gather_single" if IS_2_13 else "all_gather_into_tensor"


def _is_compiling() -> bool:
    """Before 2.13 ``torch.compiler.is_compiling()`` is False while AOTAutograd traces."""
    return torch.compiler.is_compiling() or private.TracingContext.try_get() is not None


is_compiling = torch.compiler.is_compiling if IS_2_13 else _is_compiling


def add_wide_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` on CUDA, of 16-bit tensors into float32; only if ``IS_2_10``."""
    torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def cpu_capabilities() -> dict[str, Any] | None:
    """``torch.cpu.get_capabilities()`` of 2.13; ``None`` in 2.9, which lacks it."""
    query = getattr(torch.cpu, "get_capabilities", None)
    return None if query is None else dict(query())


def root_mesh(mesh: Any) -> Any:
    """The ``DeviceMesh`` that ``mesh`` is a part of, or itself; in 2.9 a table has it."""
    if IS_2_13:
        return private.get_root_mesh(mesh)
    return private.mesh_resources.get_root_mesh(mesh)


def has_varlen_attention(x: torch.Tensor) -> bool:
    """Whether ``torch.nn.attention.varlen`` of 2.13 takes queries ``(tokens, ..., head_dim)``."""
    fits = x.is_cuda and x.element_size() == 2 and x.shape[-1] in range(8, 257, 8)
    new = IS_2_13 and torch.version.cuda is not None
    return fits and new and torch.cuda.get_device_capability(x.device) >= (8, 0)


def varlen_attention(qkv: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
    """Attention of packed sequences ``(tokens, 3, heads, head_dim)``; ``has_varlen_attention``."""
    from torch.nn.attention.varlen import varlen_attn

    (q, k, v), ends, attend = qkv.unbind(1), ends.int(), cast("Any", varlen_attn)
    y: torch.Tensor = attend(q, k, v, ends, ends, longest, longest)
    return y
