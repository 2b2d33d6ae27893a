"""ASP: train a network whose weights are 2:4 sparse.

The recipe (Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021): train, prune once by
magnitude, train again with the same schedule while the pruned weights stay zero::

    ASP.prune_trained_model(model, optimizer)

Masks are buffers of the layers, ``__weight_mma_mask``, so checkpoints have them. Two step hooks of
the optimizer apply them: gradients are masked before a step, weights after it, and with them their
float32 masters (of :mod:`apex.amp` and FP16_Optimizer, and in the state of :mod:`apex.optimizers`).

As in the original there is one model and one optimizer for the process, kept by the class; its
state is one object, and :meth:`ASP.reset` drops it.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from apex._compat import private
from apex.contrib.sparsity._permutation import permute
from apex.contrib.sparsity._pruned import ASPError, PrunedModel, PrunedWeight
from apex.contrib.sparsity.sparse_masklib import create_mask

__all__ = ["ASP", "ASPError", "eligible_modules"]

_PARAMETERS: dict[type, Sequence[str]] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), ("weight",)),
    nn.MultiheadAttention: ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"),
}


def eligible_modules(
    model: nn.Module,
    whitelist_layer_types: type | tuple[type, ...],
    allowed_layer_names: Sequence[str] | None,
    disallowed_layer_names: Sequence[str],
) -> list[tuple[str, nn.Module]]:
    """Return the layers of these classes, named as allowed (None: all) and not as disallowed."""
    if isinstance(allowed_layer_names, str) or isinstance(disallowed_layer_names, str):
        raise TypeError("ASP: names of layers were one string; pass a list of names.")
    kinds: Any = whitelist_layer_types
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    if allowed_layer_names is not None:
        named = [(name, module) for name, module in named if name in allowed_layer_names]
    return [(name, module) for name, module in named if name not in disallowed_layer_names]


class ASP:
    """2:4 sparsity of one model in this process. All methods are class methods.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> ASP.init_model_for_pruning(model, verbosity=0)
        >>> ASP.init_optimizer_for_pruning(optimizer)
        >>> ASP.compute_sparse_masks()
        >>> ASP.is_sparsity_enabled(), int((model[0].weight[0] != 0).sum())
        (True, 8)
        >>> ASP.reset()
    """

    _state: ClassVar[PrunedModel | None] = None
    _permutation: ClassVar[tuple[bool, str | None]] = (True, None)  # allowed, folder to save to

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[torch.Tensor], torch.Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type] = [*_PARAMETERS],
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = [],
        allow_recompute_mask: bool = False,
        custom_layer_dict: Mapping[type, Sequence[str]] = {},
        allow_permutation: bool = True,
    ) -> None:
        """Choose the weights to prune, and register their masks as buffers of ones.

        It chooses weights that require gradients. Their numbers of output and input channels must
        be multiples of 8 and 16, as tensor cores need. Others are skipped with a log message. To
        resume a training, call this and :meth:`init_optimizer_for_pruning`, then load the
        checkpoint.

        Args:
            model: The network, before you wrap it.
            mask_calculator: A pattern of :func:`~apex.contrib.sparsity.create_mask`, or a function
                that returns the mask of a weight.
            verbosity: 1 logs what is skipped and why, 2 also what is pruned, 3 also what will be.
            whitelist: Classes of layers to prune.
            allowed_layer_names: Names of layers to prune; None for all layers of these classes.
            disallowed_layer_names: Names of layers not to prune.
            allow_recompute_mask: Keep pruned values, so that you can compute masks again or restore
                the weights. The buffers, ``__<parameter>_mma_pruned_p``, are as large as the
                weights.
            custom_layer_dict: Further classes, with the names of their parameters to prune.
            allow_permutation: See :meth:`set_permutation_saving_params`.

        Raises:
            ASPError: ASP has a model already. Call :meth:`reset` to remove it.
            TypeError: ``model`` is not a module, the calculator is not a function, or a list of
                names is a string.
            ValueError: A pattern is unknown, the parameters of a class are not known, or a layer
                lacks a parameter of ``custom_layer_dict``.
        """
        if cls._state is not None:
            raise ASPError(
                "ASP has a model already, and supports only one in a process. Call ASP.reset() "
                "first."
            )
        if not isinstance(model, nn.Module):
            raise TypeError(f"ASP: model was a {type(model).__name__}; it must be a nn.Module.")
        private.need("ASP")
        calculate = _calculator(mask_calculator)
        parameters = {**_PARAMETERS, **custom_layer_dict}
        kinds = (*whitelist, *custom_layer_dict)
        for kind in kinds:
            if not any(base in parameters for base in kind.__mro__):
                raise ValueError(
                    f"ASP: whitelist contains {kind.__name__}, whose parameters ASP does not know. "
                    f"Name them: custom_layer_dict={{{kind.__name__}: ['weight']}}."
                )
        state = PrunedModel(model, calculate, verbosity, allow_permutation)
        if allow_permutation and mask_calculator != "m4n2_1d":
            state.permute = False
            state.log("will not permute channels, because the search supports only m4n2_1d", 1)
        layers = eligible_modules(model, kinds, allowed_layer_names, disallowed_layer_names)
        for layer, module in layers:
            kind = next(base for base in type(module).__mro__ if base in parameters)
            found = [PrunedWeight(layer, module, name) for name in parameters[kind]]
            state.pruned += [one for one in found if _is_prunable(one, state)]
        for one in state.pruned:
            weight = one.weight.detach()
            if not hasattr(one.module, one.buffer("mask")):  # a copy of a pruned model has it
                one.module.register_buffer(one.buffer("mask"), torch.ones_like(weight).bool())
            if allow_recompute_mask and not hasattr(one.module, one.buffer("pruned_p")):
                one.module.register_buffer(one.buffer("pruned_p"), torch.zeros_like(weight))
            state.log(f"will prune {one}", 3)
        cls._state = state

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Make each step of ``optimizer`` mask the gradients first and the weights at the end.

        Call it before or after ``amp.initialize``.

        Raises:
            TypeError: ``optimizer`` does not support step hooks.
            ASPError: You called this already, or before :meth:`init_model_for_pruning`; or channels
                were permuted after the optimizer's state was made.
        """
        state = cls._needed("init_optimizer_for_pruning")
        if state.optimizer is not None:
            raise ASPError(
                "ASP has an optimizer already, and supports only one in a process. Call "
                "ASP.reset() first."
            )
        _check_optimizer(optimizer)
        if state.was_permuted and optimizer.state:
            raise ASPError(
                "ASP: channels were permuted without the optimizer's state. Call "
                "init_optimizer_for_pruning before compute_sparse_masks."
            )
        state.optimizer = optimizer
        state.hooks = [
            optimizer.register_step_pre_hook(state.before_step),
            optimizer.register_step_post_hook(state.after_step),
        ]

    @classmethod
    def compute_sparse_masks(cls) -> None:
        """Compute the masks from the weights, and prune the weights.

        The first call permutes channels before; see :meth:`set_permutation_saving_params`.

        Raises:
            ASPError: Weights are pruned already, for example by a loaded checkpoint, and
                ``allow_recompute_mask`` is not set; or ASP has no model.
        """
        state = cls._needed("compute_sparse_masks")
        state.restore("compute masks again")
        allowed, folder = cls._permutation
        if state.permute and allowed:
            state.was_permuted = permute(state, folder) > 0
        state.permute = False
        state.compute()

    @classmethod
    def restore_pruned_weights(cls) -> None:
        """Restore the pruned values, bit for bit. Needs ``allow_recompute_mask``."""
        cls._needed("restore_pruned_weights").restore("restore pruned weights")

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Return whether the weights are pruned.

        Raises:
            ASPError: Only some of the weights are pruned, or ASP has no model.
        """
        pruned = cls._needed("is_sparsity_enabled").pruned
        dense = [one for one in pruned if not one.is_sparse]
        if 0 < len(dense) < len(pruned):
            raise ASPError(
                f"ASP: {len(dense)} of {len(pruned)} weights are not pruned, such as {dense[0]}. "
                "Did the program load a checkpoint only in part?"
            )
        return not dense and bool(pruned)

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Return whether :meth:`init_model_for_pruning` was called."""
        return cls._state is not None

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prune the ``Linear``, ``Conv2d`` and ``MultiheadAttention`` layers of a trained model.

        Continue the training afterwards. For other layers or masks call
        :meth:`init_model_for_pruning`, :meth:`init_optimizer_for_pruning` and
        :meth:`compute_sparse_masks` instead.
        """
        _check_optimizer(optimizer)
        kinds = [nn.Linear, nn.Conv2d, nn.MultiheadAttention]
        cls.init_model_for_pruning(model, verbosity=2, whitelist=kinds)
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = True,
        save_permutation_graph: bool = False,
        permutation_output_dir: str = ".",
    ) -> None:
        """Choose whether to permute channels, and whether to save the permutations.

        Permuting the channels between two layers changes which weights share a group of four.
        Except for rounding it does not change the output of the network. If :mod:`torch.fx` cannot
        trace the model, or the order of some channels matters, they stay in place, with a log
        message.

        Args:
            allow_permutation: Whether :meth:`compute_sparse_masks` may permute channels. It does so
                only if you passed True to :meth:`init_model_for_pruning` too.
            save_permutation_graph: Write ``model_offline_permutation_graph.json``. It lists the
                layers of each set of channels, and their order or the reason why they have none.
            permutation_output_dir: Folder for this file.
        """
        if save_permutation_graph:
            pathlib.Path(permutation_output_dir).mkdir(parents=True, exist_ok=True)
        folder = permutation_output_dir if save_permutation_graph else None
        cls._permutation = allow_permutation, folder

    @classmethod
    def reset(cls) -> None:
        """Remove ASP's hooks and buffers from the model and the optimizer. Weights stay pruned.

        Checkpoints are then those of the plain network, and you can prune another model. The
        original has no ``reset``.
        """
        state, cls._state, cls._permutation = cls._state, None, (True, None)
        for hook in state.hooks if state else ():
            hook.remove()
        for one in state.pruned if state else ():
            for kind in ("mask", "pruned_p"):
                if hasattr(one.module, one.buffer(kind)):
                    delattr(one.module, one.buffer(kind))

    @classmethod
    def _needed(cls, method: str) -> PrunedModel:
        if cls._state is None:
            raise ASPError(f"ASP.{method} was called before ASP.init_model_for_pruning.")
        return cls._state


def _calculator(given: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(given, str):
        zeros = torch.zeros(4, device="cpu", dtype=torch.float32)
        create_mask(zeros, given)  # raises if there is none of this name
        return functools.partial(create_mask, pattern=given)
    if not callable(given):
        raise TypeError(f"ASP: mask_calculator was {given!r}; pass a pattern or a function.")
    return given  # type: ignore[no-any-return]


def _is_prunable(one: PrunedWeight, state: PrunedModel) -> bool:
    owner, _, last = one.name.rpartition(".")
    try:
        weight = getattr(one.module.get_submodule(owner), last)
    except AttributeError:
        raise ValueError(f"ASP: layer {one.layer} has no parameter {one.name!r}.") from None
    why = ""
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
        why = "it is not a parameter that requires gradients"
    elif weight.dim() < 2 or weight.shape[0] % 8 or weight.shape[1] % 16:
        why = f"its shape {list(weight.shape)} is not a multiple of 8 output and 16 input channels"
    if why and weight is not None:  # MultiheadAttention has four, and uses one or three of them
        state.log(f"skipped {one.layer}::{one.name}: {why}", 1)
    return not why


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, type) or not hasattr(optimizer, "register_step_post_hook"):
        raise TypeError(
            f"ASP: optimizer was {optimizer!r}; it must be a torch.optim.Optimizer, whose step "
            "hooks mask gradients and weights."
        )
