"""The pruned weights of a model: their masks, and the steps of the optimizer."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("apex.sparsity")

_BESIDE = ("master_param", "low_bits", "error")  # what apex.optimizers keep of a weight's value


class ASPError(RuntimeError, AssertionError):
    """ASP was called in the wrong order; an ``AssertionError`` too, which the original raised."""


@dataclass
class PrunedWeight:
    """A weight that is pruned. Tensors are looked up at each use: ``model.to()`` replaces them."""

    layer: str
    module: nn.Module
    name: str

    @property
    def weight(self) -> torch.Tensor:
        return self.module.get_parameter(self.name)

    @property
    def mask(self) -> torch.Tensor:
        return self.module.get_buffer(self.buffer("mask"))

    @property
    def values(self) -> torch.Tensor | None:
        """What was pruned, zero elsewhere; None without ``allow_recompute_mask``."""
        return getattr(self.module, self.buffer("pruned_p"), None)

    @property
    def is_sparse(self) -> bool:
        return not bool(self.mask.all())

    def buffer(self, kind: str) -> str:
        """The name of one of its buffers, in which dots are not allowed."""
        return f"__{self.name.replace('.', '_')}_mma_{kind}"

    def __str__(self) -> str:
        size, dtype = list(self.weight.shape), self.weight.dtype
        return f"{self.layer}::{self.name} of size={size} and type={dtype}"


@dataclass
class PrunedModel:
    """The pruned weights of a model, and the optimizer that steps them."""

    model: nn.Module
    calculate: Callable[[torch.Tensor], torch.Tensor]
    verbosity: int
    permute: bool
    was_permuted: bool = False
    pruned: list[PrunedWeight] = field(default_factory=list)
    optimizer: Any = None
    hooks: list[Any] = field(default_factory=list)

    def log(self, message: str, verbosity: int) -> None:
        """Log a line on rank 0, or write it to stdout when nobody configured logging."""
        dist = torch.distributed
        is_rank0 = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        if self.verbosity >= verbosity and is_rank0:
            if logger.hasHandlers():
                logger.info("[ASP] %s", message)
            elif sys.stdout is not None:  # the caller may have closed it: >&-
                sys.stdout.write(f"[ASP] {message}\n")

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """The float32 masters of apex.amp or an FP16_Optimizer, by weight."""
        owner = getattr(self.optimizer, "_amp_stash", None) or self.optimizer
        halves = getattr(owner, "all_fp16_params", ())
        return dict(zip(halves, getattr(owner, "all_fp32_from_fp16_params", ()), strict=True))

    def state_of(self, tensor: torch.Tensor) -> Mapping[str, Any]:
        """What the optimizer keeps for a tensor that it steps itself."""
        # Under amp `state.get(weight)` is the entry of its master: what is done to a weight and its
        # master would be done to that twice.
        return {} if self.optimizer is None else dict.get(self.optimizer.state, tensor, {})

    def weights_and_copies(self) -> Iterator[tuple[PrunedWeight, list[torch.Tensor]]]:
        """Each weight, with all tensors that its value is computed from."""
        masters = self.masters()
        for one in self.pruned:
            found = [one.weight]
            found += [masters[tensor] for tensor in found if tensor in masters]
            beside = [self.state_of(tensor).get(key) for tensor in found for key in _BESIDE]
            yield one, found + [value for value in beside if value is not None]

    def permuted_with(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Masters, gradients and state that are permuted with a parameter; None if they cannot."""
        masters = self.masters()
        own = [tensor, masters[tensor]] if tensor in masters else [tensor]
        found = own[1:] + [one.grad for one in own if one.grad is not None]
        for value in (value for one in own for value in self.state_of(one).values()):
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                found.append(value)
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                return None
        return found

    @torch.no_grad()
    def mask_grads(self) -> None:
        """Zero the gradients of pruned weights, where the optimizer looks for them."""
        masters = self.masters()
        for one in self.pruned:
            grad = masters.get(one.weight, one.weight).grad
            if grad is not None:
                grad.masked_fill_(~one.mask, 0)

    def before_step(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Mask gradients, also those that a closure computes."""
        self.mask_grads()
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0]: the optimizer

        def masked() -> Any:
            loss = closure()
            self.mask_grads()
            return loss

        if not callable(closure):
            return None
        if len(args) > 1:
            return (args[0], masked, *args[2:]), kwargs
        return args, {**kwargs, "closure": masked}

    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        """Zero pruned weights, and what the next step computes them from."""
        for one, tensors in self.weights_and_copies():
            is_pruned = ~one.mask
            for tensor in tensors:
                # .data: not counted as a write, after which optimizers drop their low bits.
                tensor.data.masked_fill_(is_pruned, 0)

    @torch.no_grad()
    def restore(self, purpose: str) -> None:
        """Bring back what was pruned; masters follow, for amp sees who writes a weight."""
        sparse = [(one, one.values) for one in self.pruned if one.is_sparse]
        for one, values in sparse:
            if values is None:
                raise ASPError(
                    f"ASP: {one} is pruned already, and ASP did not keep the pruned values. To "
                    f"{purpose}, call init_model_for_pruning with allow_recompute_mask=True."
                )
        for one, values in sparse:
            assert values is not None
            one.weight.copy_(torch.where(one.mask, one.weight, values))
            one.mask.fill_(True)
            values.zero_()

    @torch.no_grad()
    def compute(self) -> None:
        """Compute all masks from the weights and prune these."""
        masks = [self.calculate(one.weight.detach()) for one in self.pruned]
        for one, mask in zip(self.pruned, masks, strict=True):
            if mask.shape != one.weight.shape:
                raise ValueError(
                    f"ASP: mask_calculator returned a mask of shape {list(mask.shape)} for {one}; "
                    "it must have the shape of the weight."
                )
        for one, mask in zip(self.pruned, masks, strict=True):
            weight = one.weight
            before = weight.float().norm(1).clamp(min=1e-30)
            one.mask.copy_(mask)
            if one.values is not None:
                one.values.copy_(weight.masked_fill(one.mask, 0))
            weight.masked_fill_(~one.mask, 0)
            if self.verbosity >= 2:
                share = 1.0 - float(one.mask.sum()) / one.mask.numel()
                kept = float(weight.float().norm(1) / before)
                self.log(f"{share:.2%} of {one} pruned, {kept:.2%} of its magnitude kept", 2)
