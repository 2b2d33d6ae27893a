"""``apex.patch``: the norms, gated MLPs and loss of a transformers model by the operations here.

A module is recognised by its class, of transformers' own modelling files, and by what it holds. It
stays the same object: its class becomes one of :mod:`apex._fused_layers`. So its weights, their
names, hooks, wrapped layers inside of it (LoRA) and whatever else refers to it stay as they are. A
copy or a pickle of the model is one of a patched model. The loss is transformers' own attribute,
``model.loss_function``.

Not here: rotary embeddings, which are global functions of each modelling file; GELU-gated MLPs
(Gemma, T5), for which there is no operation; losses that a model computes in its forward (T5).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from apex import _fused_layers

__all__ = ["Patched", "patch"]

_NORMS: dict[str, type[nn.Module]] = {
    **dict.fromkeys(
        ("LlamaRMSNorm", "MistralRMSNorm", "MinistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm",
         "Qwen2MoeRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"),
        _fused_layers.RMSNorm,
    ),
    **dict.fromkeys(
        ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"), _fused_layers.RMSNormZeroCentered
    ),
    **dict.fromkeys(("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm"), _fused_layers.T5RMSNorm),
}  # fmt: skip
_MLPS = ("LlamaMLP", "MistralMLP", "MinistralMLP", "Qwen2MLP", "Qwen2MoeMLP", "Qwen3MLP",
         "Qwen3MoeMLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP", "T5DenseGatedActDense",
         "MT5DenseGatedActDense", "UMT5DenseGatedActDense")  # fmt: skip
_SILU = ("SiLU", "SiLUActivation")
_LOSS = "ForCausalLMLoss"


@dataclass
class Patched:
    """What :func:`patch` replaced in a model and what it left; printed, it is a report.

    Attributes:
        replaced: Names of modules, and of models followed by ``.loss_function``, each with what
            computes it now.
        left: Names of norms, gated MLPs and losses that are as they were, each with the reason.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list, repr=False)
    _losses: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give modules their classes back, and models their losses; a second call does nothing.

        What a program has changed since then stays: a module of another class, another loss.
        """
        for module, kind in self._classes:
            if type(module).__module__ == _fused_layers.__name__:
                module.__class__ = kind
        for model, before in self._losses:
            if vars(model).get("_loss_function") is not _fused_layers.causal_lm_loss:
                continue
            if before is None:
                del model._loss_function
            else:
                model.loss_function = before
        self._classes.clear()
        self._losses.clear()

    def __str__(self) -> str:
        lines = [f"{count} x {what}" for what, count in Counter(self.replaced.values()).items()]
        lines += [f"left: {count} x {what}" for what, count in Counter(self.left.values()).items()]
        return "\n".join(lines) or "nothing to replace"


def patch(model: nn.Module) -> Patched:
    """Let the operations of apex compute norms, gated MLPs and the loss of a transformers model.

    For models of the Llama, Qwen, Mistral, Gemma and T5 kinds. Weights, their names, hooks and
    optimizers stay as they are; call it before or after :func:`apex.amp.initialize`. On a GPU the
    operations run as Triton kernels, elsewhere as PyTorch functions.

    Args:
        model: A model of transformers 4.57 or newer, or a module that contains one.

    Returns:
        What was replaced and what was left; its ``undo()`` restores the model.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> report = patch(torch.nn.Linear(2, 2))
        >>> print(report)
        nothing to replace
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is a {type(model).__name__}; pass a torch.nn.Module.")
    done = Patched()
    for name, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith("transformers.models."):
            continue
        if kind.__name__ in _NORMS or kind.__name__ in _MLPS:
            _replace_module(done, name, module)
        elif kind.__name__.endswith(("ForCausalLM", "ForConditionalGeneration")):
            _replace_loss(done, f"{name}.loss_function".lstrip("."), module)
    return done


def _replace_module(done: Patched, name: str, module: nn.Module) -> None:
    kind = type(module)
    reason = _why_not(module)
    if reason:
        done.left[name] = f"{kind.__name__}: {reason}"
        return
    new = _NORMS.get(kind.__name__, _fused_layers.SwiGLUMLP)
    module.__class__ = new
    done.replaced[name] = f"{kind.__name__} by {new.__name__}"
    done._classes.append((module, kind))


def _why_not(module: nn.Module) -> str:
    """Why a module of a known class is left as it is, or nothing."""
    if "forward" in vars(module):
        return "something has replaced its forward (accelerate, kernels)"
    if type(module).__name__ in _NORMS:
        return ""
    activation = type(getattr(module, "act_fn", getattr(module, "act", None))).__name__
    if activation not in _SILU:
        return f"its activation is {activation}, not SiLU"
    parts = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return "" if parts else "its layers are not gate_proj, up_proj and down_proj"


def _replace_loss(done: Patched, name: str, model: Any) -> None:
    kind = type(model).__name__
    if getattr(model, "loss_type", None) != "ForCausalLM":
        done.left[name] = f"loss of {kind}: not that of a causal language model"
        return
    loss = model.loss_function
    if loss is _fused_layers.causal_lm_loss:
        return
    if getattr(loss, "__name__", "") != _LOSS:
        done.left[name] = f"loss of {kind}: the program has given it another one"
        return
    done._losses.append((model, vars(model).get("_loss_function")))
    model.loss_function = _fused_layers.causal_lm_loss
    done.replaced[name] = f"{_LOSS} by {_fused_layers.causal_lm_loss.__name__}"
