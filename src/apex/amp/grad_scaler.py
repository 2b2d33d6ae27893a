"""``GradScaler``: torch's, for float16 gradients and for models that are spread over ranks.

Scale, growth, state and the order of calls are those of ``torch.amp.GradScaler``, and so is every
bit of a step with float32 gradients. What differs:

* Gradients are unscaled and checked as local tensors, by :mod:`apex.ops.lists.unscale`, as in amp.
* The flag is reduced, MAX, over the root mesh of the *parameters* or over ``process_group``, which
  does not depend on which gradients a rank has. Plain tensors alone reduce nothing.
* 16-bit gradients are not unscaled in memory: of a new perceptron of width 256 at scale 4096, 14 %
  became subnormal in float16. The inverse scale and the coefficient of
  :meth:`GradScaler.clip_grad_norm_` go to the optimizer as one number, as with ``fused_step``.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from apex._compat import private
from apex.amp._pickled_group import PickledGroup, _default_group
from apex.amp.checks import group_of_several, refuse_other_state
from apex.amp.gradients import captures
from apex.amp.gradients.agreement import agree_over_, groups_of, root_meshes
from apex.amp.gradients.overflow import Outcome, TakenSteps, counts_of
from apex.amp.gradients.parameters import grads_of
from apex.amp.optimizer import state_of
from apex.amp.scale import check, iter_params
from apex.ops import _runtime
from apex.ops.lists import clip
from apex.ops.lists.placements import is_sharded, placed
from apex.ops.lists.storage import ScaledStep
from apex.ops.lists.tensor_lists import scalar_on
from apex.ops.lists.unscale import check_and_multiply_

__all__ = ["GradScaler"]

_HALF = (torch.float16, torch.bfloat16)
_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that also supports float16 gradients and sharded parameters.

    **16-bit gradients.** ``step`` passes the scale on to the optimizer, and the gradients stay
    scaled. The optimizer must support this: use one of ``apex.optimizers``, or
    ``torch.optim.Adam(fused=True)``.

    **Sharded parameters.** All ranks of the parameters' root mesh take or skip each step together.
    This costs an all-reduce of one number for each dimension of the mesh. All ranks must call
    ``unscale_`` or ``step`` for the same optimizers in the same order, even without gradients. An
    optimizer without DTensors decides alone until the scaler has stepped a sharded one.

    **Optimizers that unscale by themselves.** Their ``_custom_amp_unscale_grads`` is true. Their
    ``unscale_grads(inv_scale, found_inf, allow_fp16)`` returns the overflow flags as a dict from
    device to tensor, equal on all ranks that the optimizer shards over.

    Args:
        process_group: The ranks that take or skip steps together, if the parameters' mesh does not
            contain all of them. Pass it for a pipeline, for example. Copies keep it; to pickle the
            scaler it must be the default group. The other arguments are torch's.

    Raises:
        TypeError: ``process_group`` is not a process group, or does not contain this rank.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        >>> optimizer, scaler = apex.optimizers.FusedAdam([weight]), GradScaler("cpu")
        >>> scaler.scale(weight.float().mean()).backward()
        >>> norm = scaler.clip_grad_norm_(optimizer, 1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.outcome(optimizer).numbers()
        (True, 1, 0, 65536.0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: Any = None,
    ) -> None:
        private.need("GradScaler")
        private.need("amp.GradScaler")
        group = group_of_several("apex.amp.GradScaler", process_group)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = group
        self._mesh: Any = None  # the root mesh of the parameters, once known
        self._counts: Any = weakref.WeakKeyDictionary()  # from optimizer to TakenSteps

    # -- gradients and the flag ----------------------------------------------------------------

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale, or only check by an ``inv_scale`` of 1; called by torch's methods."""
        by_itself = _unscales_itself(optimizer)
        if not (by_itself or allow_fp16) and torch.float16 in _dtypes(optimizer):
            raise ValueError(_about_float16(optimizer))
        groups = self._groups_of(optimizer)
        if by_itself:
            flags = [*optimizer.unscale_grads(inv_scale, found_inf, allow_fp16).values()]
        else:
            grads = _placed_grads(optimizer)
            flags = [check_and_multiply_(grads, inv_scale)] if grads else []
        if not flags and not groups:
            return {}  # torch raises: there was nothing to check
        for flag in flags:
            found_inf = torch.maximum(found_inf, flag.to(found_inf.device, found_inf.dtype))
        self._per_optimizer_states[id(optimizer)]["is_alone"] = not groups
        return {found_inf.device: agree_over_(found_inf, groups)}

    def _groups_of(self, optimizer: Any) -> list[Any]:
        """The process groups that decide about a step, after all checks."""
        meshes = root_meshes([*iter_params(optimizer.param_groups)], self.process_group)
        known = [*meshes, *([] if self._mesh is None else [self._mesh])]
        if len({*known}) > 1:
            where = "an optimizer" if len(meshes) > 1 else "the optimizers of a scaler"
            raise RuntimeError(
                f"apex.amp.GradScaler: parameters of {where} are on two root meshes, {known[0]} "
                f"and {known[1]}, which could skip different steps. Slice both from one mesh, pass "
                "a process_group= of all their ranks, or use one scaler for each mesh."
            )
        self._mesh = known[0] if known else None
        return groups_of(known[:1], self.process_group)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as torch's ``GradScaler`` does, equally on all ranks of the mesh."""
        if self._enabled and new_scale is None and self._mesh is not None:
            # of optimizers without DTensors that were stepped before the first sharded one
            states = self._per_optimizer_states.values()
            alone = [state for state in states if state.get("is_alone")]
            for flag in (flag for state in alone for flag in _flags_of(state)):
                agree_over_(flag, groups_of([self._mesh], self.process_group))
        super().update(new_scale)

    # -- clipping ------------------------------------------------------------------------------

    @_runtime.not_compiled
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        optimizer: Any,
        max_norm: float | torch.Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip the gradients to a total norm of ``max_norm`` for the next step.

        Call it before ``step``, on all ranks of the mesh, with or without ``unscale_``. The norm is
        that of the unscaled gradients. It includes all shards of DTensors, but only this rank's
        other tensors, even with a ``process_group``. An optimizer that accepts a scale receives the
        clipping coefficient in ``step``, and its gradients stay as they are. The gradients of other
        optimizers change in place. To drop a batch instead of stepping, call ``zero_grad()``.

        See :func:`apex.amp.clip_grad_norm_` for the arguments and the result.

        Raises:
            RuntimeError: You called ``step`` already, or the norm is not finite and
                ``error_if_nonfinite`` is set.
            TypeError: ``optimizer`` is not an optimizer, or unscales its gradients itself.
            ValueError: Gradients are float16, and the optimizer does not accept a scale.
        """
        user, name = "apex.amp.GradScaler.clip_grad_norm_", type(optimizer).__name__
        if not hasattr(optimizer, "param_groups") or _unscales_itself(optimizer):
            raise TypeError(
                f"{user} was given {name}. Pass the optimizer. If it unscales its gradients "
                "itself, call scaler.unscale_(optimizer) and then the optimizer's own clipping "
                "function."
            )
        takes_scale, state = False, {}
        if self._enabled:
            self._check_scale_growth_tracker("clip_grad_norm_")
            takes_scale, state = _takes_scale(optimizer), self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError(f"{user} is being called after step().")
            _forget_dropped(state)
            if state["stage"] is OptState.READY and not takes_scale:
                self.unscale_(optimizer)
        params = [*iter_params(optimizer.param_groups)]
        grads, factor = _placed_grads(optimizer), self._factor(state)
        if not grads and not any(map(is_sharded, params)):
            return torch.zeros((), device="cpu", dtype=torch.float32)
        norm = clip.total_norm(grads, norm_type, params)  # also over ranks without gradients
        norm = norm if factor is None else norm * scalar_on(factor, norm.device)
        coefficient = clip.coefficient(norm, max_norm, norm_type, error_if_nonfinite)
        if takes_scale:
            state["clip"] = (coefficient * state.get("clip", 1.0)).float()
            one = min(params, key=lambda param: (param.grad is None, param.numel()))
            state["clipped"] = one, one.grad  # a small one: it is kept until the next step
        else:
            clip.multiply_by_(grads, coefficient)
        return norm

    # -- the step ------------------------------------------------------------------------------

    @_runtime.not_compiled
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, unless a gradient is inf or NaN.

        With 16-bit gradients, or after :meth:`clip_grad_norm_`, an optimizer of ``apex.optimizers``
        decides on the device whether to skip, so the host does not wait.

        Raises:
            RuntimeError: You called ``step`` already, or parameters are on two root meshes.
            ValueError: Gradients are float16, and the optimizer does not accept a scale.
        """
        if not self._enabled:
            result = super().step(optimizer, *args, **kwargs)
            self._counts_of(optimizer).count(True)
            return result
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        _forget_dropped(state)
        has_own = hasattr(optimizer, "step_scaled") and _takes_scale(optimizer)
        if has_own and ("clip" in state or not _dtypes(optimizer).isdisjoint(_HALF)):
            result = self._step_by_factor(optimizer, state, args, kwargs)
        elif _wants_scaler(optimizer):
            _check_step(state, args, kwargs)
            if state["stage"] is OptState.READY and _unscales_itself(optimizer):
                self.unscale_(optimizer)
            elif "is_alone" not in state:  # unscaled by unscale_grads(grad_scaler=self)
                for flag in _flags_of(state):
                    agree_over_(flag, self._groups_of(optimizer))
            result = optimizer.step(*args, grad_scaler=self, **kwargs)
        elif _is_marked(optimizer) and not has_own and self._host_skips(optimizer, state):
            _check_step(state, args, kwargs)
            result = None
        else:
            if "clip" in state:  # torch multiplies its scale by it
                optimizer.grad_scale = state["clip"].reciprocal()
            result = super().step(optimizer, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        flags = _flags_of(state)
        self._counts_of(optimizer).count(torch.stack(flags).amax() == 0 if flags else True)
        return result

    def _host_skips(self, optimizer: Any, state: dict[str, Any]) -> bool:
        """Whether a step is skipped that would leave state of torch's SGD uninitialised."""
        if not captures.may_leave_uninitialized(optimizer):
            return False
        if _runtime.capturing():
            captures.refuse_read(optimizer, takes_flag=True, is_watched=False)
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        return any([flag.item() for flag in _flags_of(state)])

    def _step_by_factor(
        self, optimizer: Any, state: dict[str, Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        _check_step(state, args, kwargs)
        factor = self._factor(state)
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        flags = _flags_of(state)
        if not flags:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        optimizer._scaled_step = ScaledStep(1.0 if factor is None else factor, flags[0])
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            left = vars(optimizer).pop("_scaled_step", None)
        if left is not None:
            raise RuntimeError(
                f"apex.amp.GradScaler: {type(optimizer).__name__}.step() did not call the step() "
                "of apex.optimizers, so the gradients were not unscaled. Call super().step() in "
                "it."
            )
        return result

    def _factor(self, state: Mapping[str, Any]) -> torch.Tensor | None:
        """What the gradients in memory are to be multiplied by; ``None`` for 1."""
        factor: torch.Tensor | None = state.get("clip")
        if state.get("stage") is OptState.READY:
            scale, _ = self._check_scale_growth_tracker("step")
            inverse = scale.double().reciprocal().float()
            factor = inverse if factor is None else inverse * factor.to(inverse.device)
        return factor

    # -- what happened, state ------------------------------------------------------------------

    def stepped(self, optimizer: Any) -> torch.Tensor:
        """Return whether the last step of ``optimizer`` was taken, as a 0-dim bool tensor."""
        return self.outcome(optimizer).stepped

    def outcome(self, optimizer: Any) -> Outcome:
        """Count the taken and skipped steps of ``optimizer``; see :func:`apex.amp.outcome`."""
        scale = self._get_scale_async() if self._enabled else None
        return self._counts_of(optimizer).outcome(
            self.get_scale() if scale is None else scale.clone()
        )

    def _counts_of(self, optimizer: Any) -> TakenSteps:
        if optimizer not in self._counts:
            self._counts[optimizer] = counts_of(iter_params(getattr(optimizer, "param_groups", ())))
        counts: TakenSteps = self._counts[optimizer]
        return counts

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that apex's or torch's ``GradScaler`` saved.

        Raises:
            ValueError: ``state_dict`` is not the state of a ``GradScaler``. Nothing changes.
        """
        if self._enabled:
            refuse_other_state("apex.amp.GradScaler.load_state_dict", state_dict)
        for key in _KEYS if self._enabled and state_dict else ():
            name, value = f"{key!r} of a GradScaler's state", state_dict.get(key)
            check(name, value, lambda x: 0 <= x < inf, "a number, at least 0")
            if key == "scale":
                check(name, value, lambda x: x > 0, "above 0")
        super().load_state_dict(dict(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        ranks = PickledGroup(self.process_group)
        return {**super().__getstate__(), "process_group": ranks, "_mesh": None, "_counts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {"process_group": state["process_group"].group}
        super().__setstate__({**state, **own, "_counts": weakref.WeakKeyDictionary()})


_Ranks, _default_ranks = PickledGroup, _default_group  # their names in scalers pickled in 2026


def _forget_dropped(state: dict[str, Any]) -> None:
    """Forget the coefficient of gradients that were set to ``None`` instead of being stepped."""
    param, grad = state.get("clipped", (None, None))
    if param is not None and param.grad is not grad:
        del state["clip"], state["clipped"]


def _flags_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [*state["found_inf_per_device"].values()]


def _dtypes(optimizer: Any) -> set[torch.dtype]:
    params = iter_params(optimizer.param_groups)
    return {param.grad.dtype for param in params if param.grad is not None}


def _unscales_itself(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_custom_amp_unscale_grads", False))


def _takes_scale(optimizer: Any) -> bool:
    """Whether the optimizer multiplies scaled gradients by a number in its step."""
    state = state_of(optimizer)
    refused = state is not None and state.use_masters  # by amp
    if refused or _unscales_itself(optimizer):
        return False
    marked = _is_marked(optimizer)
    return hasattr(optimizer, "step_scaled") or (marked and not _wants_scaler(optimizer))


def _is_marked(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _wants_scaler(optimizer: Any) -> bool:
    """Whether torch hands its scaler to ``step``, and warns that it will not do so for ever."""
    return _is_marked(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def _check_step(state: Mapping[str, Any], args: Sequence[Any], kwargs: Any) -> None:
    """Raise what torch's ``step`` raises."""
    if "closure" in kwargs or any(map(callable, args)):
        raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError("step() has already been called since the last update().")


def _about_float16(optimizer: Any) -> str:
    name = type(optimizer).__name__
    remedy = f"""{name} does not accept a scale. Use an optimizer of apex.optimizers, or float32
        parameters with autocast or the MixedPrecisionPolicy of fully_shard."""
    if _takes_scale(optimizer):
        remedy = f"""Leave unscale_() out: step() hands the scale to {name}. To clip, call
            scaler.clip_grad_norm_(optimizer, max_norm)."""
    text = "Attempting to unscale FP16 gradients. apex.amp.GradScaler: float16 would lose some."
    return " ".join([text, *remedy.split()])


def _placed_grads(optimizer: Any) -> Sequence[torch.Tensor]:
    """The gradients, coalesced and placed as their parameters; ``Partial`` ones are reduced."""
    params = [*iter_params(optimizer.param_groups)]
    grads = grads_of(params)
    return placed("apex.amp.GradScaler", [p for p in params if p.grad is not None], grads)
