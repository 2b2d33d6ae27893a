"""``apex.patch``: the norms, gated MLPs and loss of a transformers model by the operations here.

A module is recognised by its class, of transformers' own modelling files, and by what it holds; one
of a class that is not listed here by its numbers: its forward is compared with ours, on random
weights. What is a norm or a gated MLP by name or shape, and is not replaced, is listed with the
reason. A module stays the same object: its class becomes one of `_layers`. So its
weights, their names, hooks, wrapped layers inside of it (LoRA) and whatever else refers to it stay
as they are. A copy or a pickle of the model is one of a patched model. The loss is transformers'
own attribute, ``model.loss_function``.

Not here: rotary embeddings, which are global functions of each modelling file; GELU-gated MLPs
(Gemma, T5), for which there is no operation; losses that a model computes in its forward (T5).
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from apex.patching import _layers as layers

__all__ = ["Patched", "patch"]

_NORMS: dict[str, type[nn.Module]] = {
    **dict.fromkeys(
        ("LlamaRMSNorm", "MistralRMSNorm", "MinistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm",
         "Qwen2MoeRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"),
        layers.RMSNorm,
    ),
    **dict.fromkeys(
        ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"), layers.RMSNormZeroCentered
    ),
    **dict.fromkeys(("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm"), layers.T5RMSNorm),
}  # fmt: skip
_MLPS = ("LlamaMLP", "MistralMLP", "MinistralMLP", "Qwen2MLP", "Qwen2MoeMLP", "Qwen3MLP",
         "Qwen3MoeMLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP", "T5DenseGatedActDense",
         "MT5DenseGatedActDense", "UMT5DenseGatedActDense")  # fmt: skip
_OF_TORCH = (
    "torch's own layer, which is faster (an eager layer norm of 8192 x 1024: 0.23 ms, with apex "
    "0.77 ms, on an H200)"
)
_NOT_OURS = "apex has no norm with the same results"
_SOUGHT = (
    "root-mean-square norms, MLPs of gate_proj, up_proj and down_proj with SiLU, and the loss of a "
    "causal language model"
)
_SILU = ("SiLU", "SiLUActivation")
_PARTS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATIONS = ("act_fn", "act", "activation_fn")
_LOSS = "ForCausalLMLoss"


@dataclass
class Patched:
    """A report, which you can print, on what :func:`patch` replaced in a model and what it left.

    Attributes:
        replaced: Dict from a module's name, or a model's name and ``.loss_function``, to the
            operation of apex that computes it now.
        left: Dict from the name of an unchanged norm, gated MLP or loss to the reason.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list, repr=False)
    _losses: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore the classes of modules and the losses of models. A second call does nothing.

        If you set another class or loss after :func:`patch`, ``undo`` leaves it.
        """
        for module, kind in self._classes:
            if type(module).__module__ == layers.__name__:
                module.__class__ = kind
        for model, before in self._losses:
            if vars(model).get("_loss_function") is not layers.causal_lm_loss:
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

    It supports Llama, Qwen, Mistral, Gemma and T5 models, and others whose norms and MLPs compute
    the same numbers (Phi3, Olmo2, Granite, Glm4). Weights, their names, hooks and optimizers stay
    unchanged. Call it before or after :func:`apex.amp.initialize`. On a GPU the operations run as
    Triton kernels, elsewhere as PyTorch functions.

    Args:
        model: A model of transformers 4.57 or newer, or a module that contains one.

    Returns:
        A report on what was replaced and what was left. Its ``undo()`` restores the model.

    Raises:
        TypeError: ``model`` is not a module.

    Warns:
        UserWarning: Nothing was replaced. The text lists what ``patch`` looks for.

    Example:
        >>> report = patch(LlamaForCausalLM(config))  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        5 x LlamaRMSNorm by RMSNorm
        2 x LlamaMLP by SwiGLUMLP
        1 x ForCausalLMLoss by causal_lm_loss
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is a {type(model).__name__}; pass a torch.nn.Module.")
    done, is_patched = Patched(), False
    for name, module in model.named_modules():
        kind = type(module)
        is_patched |= kind.__module__.startswith("apex.")  # transformers 4 takes our norm for T5
        is_norm = _is_norm(module)
        if kind.__module__.startswith("torch.nn.") and is_norm:
            done.left[name] = f"{kind.__name__}: {_OF_TORCH}"
        elif not kind.__module__.startswith("transformers.models."):
            continue
        elif is_norm or _is_gated(module):
            _replace_module(done, name, module, is_norm=is_norm)
        elif kind.__name__.endswith(("ForCausalLM", "ForConditionalGeneration")):
            _replace_loss(done, f"{name}.loss_function".lstrip("."), module)
    if not done.replaced and not is_patched:
        why = f" What was left:\n{done}" if done.left else ""
        warnings.warn(
            f"apex.patch: nothing was replaced in the {type(model).__name__}. patch looks in "
            f"modules of transformers for {_SOUGHT}.{why}",
            stacklevel=2,
        )
    return done


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by its name, or by its weight and what it adds to a square."""
    name, weight = type(module).__name__, dict(module.named_parameters(recurse=False)).get("weight")
    is_one = weight is not None and weight.dim() == 1 and _has_eps(module)
    is_leaf = next(module.children(), None) is None
    return name in _NORMS or (is_leaf and ("Norm" in name or is_one))


def _has_eps(module: nn.Module) -> bool:
    return hasattr(module, "variance_epsilon") or hasattr(module, "eps")


def _is_gated(module: nn.Module) -> bool:
    """Whether a module is a gated MLP by its name or by its parts."""
    name, parts = type(module).__name__, {name for name, _ in module.named_children()}
    parts |= {name for name, _ in module.named_parameters(recurse=False)}
    pairs = ({"gate_proj", "up_proj"}, {"wi_0", "wi_1"}, {"w1", "w3"})
    is_mlp = any(pair <= parts for pair in pairs) or "gate_up_proj" in parts
    return name in _MLPS or is_mlp


def _replace_module(done: Patched, name: str, module: nn.Module, *, is_norm: bool) -> None:
    kind = type(module)
    new, reason = _new_class(module, is_norm=is_norm)
    if new is None:
        done.left[name] = f"{kind.__name__}: {reason}"
        return
    module.__class__ = new
    done.replaced[name] = f"{kind.__name__} by {new.__name__}"
    done._classes.append((module, kind))


def _new_class(module: nn.Module, *, is_norm: bool) -> tuple[type[nn.Module] | None, str]:
    """What computes a module from now on, or why it is left as it is."""
    name = type(module).__name__
    if "forward" in vars(module):
        return None, "something has replaced its forward (accelerate, kernels)"
    if name in _NORMS:
        return _NORMS[name], ""
    if is_norm:
        found = next((new for new in dict.fromkeys(_NORMS.values()) if _agrees(module, new)), None)
        return found, _NOT_OURS
    activation = type(
        next((getattr(module, x) for x in _ACTIVATIONS if hasattr(module, x)), None)
    ).__name__
    if activation not in _SILU:
        return None, f"its activation is {activation}, not SiLU"
    if not all(isinstance(getattr(module, part, None), nn.Module) for part in _PARTS):
        return None, "its layers are not gate_proj, up_proj and down_proj"
    if name not in _MLPS and not _agrees(module, layers.SwiGLUMLP):
        return None, "its results differ from those of SwiGLUMLP"
    return layers.SwiGLUMLP, ""


@torch.no_grad()
def _agrees(module: Any, new: Any) -> bool:
    """Whether a forward gives the same numbers and dtypes as ours, on weights of its own.

    The module is not called: one like it with small parts is, so that no hook of the program runs.
    """
    weights, is_mlp = dict(module.named_parameters(recurse=False)), new is layers.SwiGLUMLP
    if any(weight.dim() != 1 for weight in weights.values()) or not (is_mlp or _has_eps(module)):
        return False
    random = torch.Generator("cpu").manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=random, device="cpu", dtype=torch.float32)

    size = next((weight.numel() for weight in weights.values()), 8)
    again = nn.Module()
    vars(again).update({key: one for key, one in vars(module).items() if key not in vars(again)})
    for name, part in module.named_children():
        small = nn.Linear(size, size, bias=False, device="cpu", dtype=torch.float32)
        setattr(again, name, small if is_mlp and name in _PARTS else part)
    for dtype in (torch.float32, torch.bfloat16):
        for name in weights:
            setattr(again, name, nn.Parameter((draw(size) + 0.5).to(dtype)))
        for part in [getattr(again, name) for name in _PARTS if is_mlp]:
            part.to(dtype)
        x = (draw(4, size) * 4 - 2).to(dtype)
        try:
            old, now = (kind.forward(again, x) for kind in (type(module), new))
        except Exception:  # noqa: BLE001  # another signature: not ours
            return False
        same = isinstance(old, torch.Tensor) and old.dtype == now.dtype and old.shape == now.shape
        # bfloat16: theirs may round before it multiplies by the weight, which is half an ulp
        limit = 1e-5 if dtype == torch.float32 else 2.0**-6
        if not same or bool(((old - now).abs() > limit * (now.abs() + limit)).any()):
            return False
    return True


def _replace_loss(done: Patched, name: str, model: Any) -> None:
    kind = type(model).__name__
    if getattr(model, "loss_type", None) != "ForCausalLM":
        done.left[name] = f"loss of {kind}: not the loss of a causal language model"
        return
    loss = model.loss_function
    if loss is layers.causal_lm_loss:
        return
    if getattr(loss, "__name__", "") != _LOSS:
        done.left[name] = f"loss of {kind}: the program replaced it"
        return
    done._losses.append((model, vars(model).get("_loss_function")))
    model.loss_function = layers.causal_lm_loss
    done.replaced[name] = f"{_LOSS} by {layers.causal_lm_loss.__name__}"
