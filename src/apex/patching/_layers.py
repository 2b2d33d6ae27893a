"""Forwards of the layers of transformers' models by the operations here, and their loss.

The layers have no constructor and no state of their own: each is the forward of a module that
exists already, whose weights keep their names. They are used in two ways: `models` makes them
the class of modules, and the package ``kernels`` binds their ``forward`` (``apex.hub``).

Dtypes of outputs are those of the originals. Norms compute in float32 and round once; those of
Llama round before they multiply by the weight, too. Autocast does not cast what a norm is given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex._compat import private
from apex.ops import _runtime
from apex.ops._dtypes import NARROW
from apex.ops.layers.swiglu import swiglu
from apex.ops.losses.cross_entropy import cross_entropy
from apex.ops.norms.row_norms import OP, norm


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, module: Any, dtype: torch.dtype
) -> torch.Tensor:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    if x.dtype == weight.dtype == dtype and not private.is_any_autocast_enabled():
        return norm(x, weight, None, weight.shape, eps, False, False, "same", "")
    with _runtime.without_autocast(x.device.type):
        return OP(x, weight, None, weight.shape, eps, False, dtype)


class RMSNorm(nn.Module):
    """Of Llama, Qwen, Mistral: the wider of the dtypes of input and weight."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm of the last dimension; the module has ``weight`` and ``variance_epsilon``."""
        module: Any = self
        dtype = torch.promote_types(hidden_states.dtype, module.weight.dtype)
        return _rms_norm(hidden_states, module.weight, module, dtype)


class T5RMSNorm(nn.Module):
    """Of T5, whose output has the dtype of a 16-bit weight."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm of the last dimension; the module has ``weight`` and ``variance_epsilon``."""
        module: Any = self
        dtype: torch.dtype = module.weight.dtype
        if dtype not in NARROW:
            dtype = torch.promote_types(hidden_states.dtype, dtype)
        return _rms_norm(hidden_states, module.weight, module, dtype)


class RMSNormZeroCentered(nn.Module):
    """Of Gemma: multiplies by ``1 + weight``; the dtype of the input."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm of the last dimension; the module has ``weight`` and ``eps``."""
        module: Any = self
        weight: torch.Tensor = module.weight
        one_more = 1.0 + (weight.float() if weight.dtype in NARROW else weight)
        return _rms_norm(x, one_more, module, x.dtype)


class LayerNorm(nn.Module):
    """``torch.nn.LayerNorm``."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Norm of the last dimensions; the module has what ``torch.nn.LayerNorm`` has."""
        module: Any = self
        weight, bias, shape = module.weight, module.bias, module.normalized_shape
        with _runtime.without_autocast(input.device.type):
            return OP(input, weight, bias, shape, module.eps, True, input.dtype)


class SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, of Llama, Qwen and Mistral."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two products, their SwiGLU and a third product."""
        module: Any = self
        y: torch.Tensor = module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))
        return y


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Cross-entropy of the next token, as ``ForCausalLMLoss`` of transformers computes it.

    It reads 16-bit logits as they are, without a float32 copy. On a CPU a call of up to 4 million
    logits goes through torch's log-softmax of a float32 copy, which takes less time.

    Args:
        logits: ``(..., tokens, vocab_size)``.
        labels: ``(..., tokens)``, of the same tokens: they are shifted here.
        vocab_size: Number of classes.
        num_items_in_batch: What the sum is divided by; by default the number of labels that count.
        ignore_index: Label of tokens that do not count.
        shift_labels: Labels that are shifted already.
        **kwargs: Ignored, as there.

    Returns:
        0-dim, float32, or float64 for float64 logits.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows, targets = logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
    total = cross_entropy(rows, targets, padding_idx=ignore_index).sum()
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
