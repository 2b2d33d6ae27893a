"""The engine of the sharded optimizers: ZeRO stage 2 over ``torch.distributed``.

Each rank keeps every parameter, and a *shard* of the reduced gradients and of the optimizer's
state. ``step`` waits for the gradients (:mod:`apex.contrib.optimizers._sharded_gradients`), steps
the fragments of parameters in this rank's shard by the same code as one process (:class:`Shard`),
and all-gathers the parameters (:mod:`apex.contrib.optimizers._sharded_parameters`).

**Parameters without a gradient on all ranks** are not stepped, as in one process. One byte for each
parameter is reduced in each step; only a rank that misses a gradient reads it, which waits.

**Scaling is deferred.** Loss scale and clipping go to the update as one number.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from apex._compat import private
from apex.contrib.optimizers._scaled_moments import narrow, portions, widened
from apex.contrib.optimizers._sharded_gradients import listed
from apex.contrib.optimizers._sharded_parameters import ShardedParameters
from apex.ops import _runtime
from apex.ops.lists.collectives import wait
from apex.ops.lists.stages import Stages
from apex.ops.lists.storage import LOW_BITS, StepOptions
from apex.ops.lists.tensor_lists import Scalar
from apex.ops.lists.tensor_norms import square_sums
from apex.optimizers import _step
from apex.optimizers._base import FusedOptimizer


class Shard(FusedOptimizer):
    """The optimizer of this rank's fragments.

    Args:
        owner: Has the groups, the algorithm and the numbers.
        low_bits: Whether the fragments are bfloat16, with their low bits beside them.
        scaled: Whether moments are float16 with a scale each.
    """

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(self, owner: ShardedOptimizer, *, low_bits: bool, scaled: bool) -> None:
        self._owner, self._is_scaled = weakref.proxy(owner), scaled
        self.dtypes: dict[torch.Tensor, torch.dtype] = {}  # of the state of fragments
        storage = LOW_BITS.name if low_bits else "plain"
        super().__init__([{"params": []}], dict(owner.defaults), storage=storage)

    def _slot_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        return self.dtypes[param]

    def _update(
        self, group: dict[str, Any], launch: _step.Launch, options: StepOptions
    ) -> Stages | None:
        if not self._is_scaled:
            stages: Stages | None = self._owner._update(group, launch, options)
            return stages
        for part in portions(launch):
            states = [self.state[param] for param in part.params]
            wide = widened(part, states, self.slots)
            self._owner._update(group, wide, options)
            for slot, column in zip(self.slots, wide.columns[-len(self.slots) :], strict=True):
                for state, value in zip(states, column, strict=True):
                    narrow(state, slot, value)
        return None

    def _finish(self, updates: Any, sharded: Sequence[torch.Tensor]) -> None:
        self._owner._finish(updates, sharded)


class ShardedOptimizer(ShardedParameters):
    """Base of the sharded optimizers: norms, scaling, the step."""

    slots = ("exp_avg", "exp_avg_sq")
    _step_supports_amp_scaling = True
    #: GradScaler calls :meth:`unscale_grads`: there are no gradients to be seen.
    _custom_amp_unscale_grads = True

    @functools.cached_property
    def _shard(self) -> Shard:
        options = self._options
        return Shard(
            self, low_bits=options.store_param_remainders, scaled=options.with_scaled_states
        )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop all gradients, including those that are reduced or being reduced."""
        if self._round or self._next or any(any(bucket.arrivals) for bucket in self._buckets):
            self.grad_sync()  # so that ranks stay in the same round
        self._forget()
        with private.DisableTorchFunctionSubclass():  # of parameters that are on their way
            super().zero_grad(set_to_none)

    # -- norms and scaling -------------------------------------------------------------------------

    def _reduced(self, of: Iterable[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The gradients of all fragments, or of those of some parameters."""
        numbers = self._fragments if of is None else [id(p) for p in of]
        found = [self._fragments[number] for number in numbers if number in self._fragments]
        return [bucket.grad_of(piece) for bucket, piece in found]

    def _measure(self, of: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """The sum of squares of reduced gradients, and above 0 if one is not finite."""
        if of is None and self._measured is not None:
            return self._measured
        found = torch.zeros(2, device=self._params()[0].device, dtype=torch.float32)
        if grads := self._reduced(of):
            found[0] = square_sums(grads, flag=found[1:]).sum()
        torch.distributed.all_reduce(found, group=self._own and self._own.shards)
        self._measured = found if of is None else self._measured
        return found

    @torch.no_grad()
    def grad_norm(
        self, parameters: Any = None, norm_type: float = 2.0, force: bool = False
    ) -> torch.Tensor:
        """Return the norm of the gradients that will be stepped. All ranks must call it.

        Args:
            parameters: Parameters of this optimizer; by default all.
            norm_type: Must be 2.
            force: Compute the norm again even if no gradient has arrived since the last call.

        Returns:
            0-dim float32 tensor.

        Raises:
            ValueError: ``norm_type`` is not 2, or a parameter belongs to another optimizer.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"{self._name}: norm_type was {norm_type}; only 2.0 is supported.")
        self.grad_sync()
        if force:
            self._measured = None
        return self._measure(self._some(parameters))[0].sqrt() * self._factor

    def _some(self, parameters: Any) -> list[torch.Tensor] | None:
        """Some of the parameters, or ``None`` for all."""
        if parameters is None:
            return None
        some = listed(parameters)
        if not {*map(id, some)} <= {*map(id, self._params())}:
            raise ValueError(f"{self._name}: a parameter is in none of the optimizer's groups.")
        return None if {*map(id, some)} >= self._places.keys() else some

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, parameters: Any = None, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip gradients by their norm over all ranks. All ranks must call it.

        Args:
            max_norm: Largest norm allowed.
            parameters: Parameters whose gradients are measured and clipped; by default all.
            norm_type: Must be 2.

        Returns:
            The norm before clipping, 0-dim.
        """
        some = [*parameters] if isinstance(parameters, Iterator) else parameters
        norm = self.grad_norm(some, norm_type)
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        some = self._some(some)
        if some is None:
            self._factor = self._factor * known(clip)
        else:
            for grad in self._reduced(some):
                grad.mul_(clip)
            self._measured = None
        self._is_final = True
        return norm

    @torch.no_grad()
    def unscale_grads(
        self, *args: Any, inv_scale: Any = None, grad_scaler: Any = None
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the reduced gradients and check them for inf and NaN. All ranks must call it.

        Pass either ``inv_scale`` or ``grad_scaler``.

        Args:
            *args: ``inv_scale, found_inf, allow_fp16``, as a ``GradScaler`` passes them.
            inv_scale: Factor for the gradients, a number or a one-element tensor.
            grad_scaler: The scaler, which also receives the result of the check.

        Returns:
            Dict from the device to a flag, which is 1.0 if a gradient of any rank is not finite.

        Raises:
            TypeError: You passed neither or both of the arguments.
            RuntimeError: Gradients were unscaled or clipped already.
        """
        inv_scale = self._inverse_scale(args[0]) if args else inv_scale
        if (inv_scale is None) == (grad_scaler is None):
            raise TypeError(f"{self._name}.unscale_grads: pass either inv_scale or grad_scaler.")
        if self._is_final:
            raise RuntimeError(
                f"{self._name}: gradients were unscaled or clipped already. Unscale once, before "
                "clipping."
            )
        if grad_scaler is not None:
            private.need("GradScaler")
            inverse = grad_scaler._get_scale_async().double().reciprocal().float()
            inv_scale = self._inverse_scale(inverse)
        self.grad_sync()
        flag = (self._measure()[1] != 0).float()
        if isinstance(inv_scale, torch.Tensor):
            inv_scale = known(inv_scale.detach().to(flag.device).reshape(()))
        self._factor = self._factor * inv_scale
        self._is_final = self._is_unscaled = True
        found = {flag.device: flag}
        if grad_scaler is not None:
            state = grad_scaler._per_optimizer_states[id(self)]
            state.update(found_inf_per_device=found, stage=OptState.UNSCALED)
        return found

    def _inverse_scale(self, inverse: Any) -> Any:
        """What gradients are multiplied by, given the inverse of a scaler's scale."""
        return inverse

    def _found_inf(self, scaler: Any) -> torch.Tensor | None:
        state = scaler._per_optimizer_states[id(self)]
        if state["stage"] is OptState.READY:
            self.unscale_grads(grad_scaler=scaler)
        elif not self._is_unscaled:
            raise RuntimeError(
                f"{self._name}: {type(scaler).__name__}.unscale_ has not seen any gradients. Use "
                "apex.amp.GradScaler, or call optimizer.unscale_grads(grad_scaler=scaler) instead."
            )
        found: torch.Tensor = torch.stack([*state["found_inf_per_device"].values()]).amax()
        return found

    # -- the step ----------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None
    ) -> Any:
        """Take one step, and drop the gradients. All ranks must call it.

        Args:
            closure: Function that evaluates the loss again.
            grad_scaler: The ``GradScaler``, if you use one. The step unscales the gradients if you
                have not done so. All ranks skip the step if a gradient of any rank is not finite.

        Returns:
            What ``closure`` returned, or ``None`` without a closure.
        """
        return self._stepped(closure, {"grad_scaler": grad_scaler})

    @_runtime.not_compiled
    @torch.no_grad()
    def step_scaled(
        self,
        factor: Scalar = 1.0,
        noop: torch.Tensor | None = None,
        *,
        write_grads: bool = False,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
        grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Take one step; as that of ``FusedOptimizer``, without ``copies`` and ``grads``."""
        if copies or grads:
            raise RuntimeError(
                f"{self._name} has its own masters and gradients, so do not use it with "
                "amp.initialize."
            )
        self.param_sync()
        for bucket in self._buckets:
            if (param := bucket.moved()) is not None:
                raise RuntimeError(
                    f"{self._name}: a parameter of shape {tuple(param.shape)} on {param.device} "
                    "got other memory (on another device, of another shape, or outside the "
                    "contiguous buffer). Move a model before making its optimizer, and write new "
                    "values with copy_()."
                )
        self.grad_sync()
        is_known = noop is not None and not _runtime.waits(noop.device)
        if not (is_known and noop is not None and noop.item()):
            factor = self._clipped(known(factor) * self._factor)
            self._step_shard(factor, None if is_known else noop)
        self._forget()

    def _clipped(self, factor: Scalar) -> Scalar:
        """``factor``, times what clips all gradients to the largest norm."""
        return factor

    def _find_present(self) -> set[int]:
        """Find ids of parameters with gradients on any rank; waits where a fragment misses one."""
        params = [param for bucket in self._buckets for param in bucket.params]
        if not params:
            return set()
        flags = torch.ones(len(params), dtype=torch.uint8, device=params[0].device)
        for number, param in enumerate(params):
            if id(param) not in self._present:
                flags[number].zero_()
        most, group = torch.distributed.ReduceOp.MAX, self._own and self._own.all
        work = torch.distributed.all_reduce(flags, most, group=group, async_op=True)
        wait(work, self._name, flags)
        if self._fragments.keys() <= self._present:
            return self._present
        return {id(p) for p, flag in zip(params, flags.tolist(), strict=True) if flag}

    def _step_shard(self, factor: Scalar, noop: torch.Tensor | None) -> None:
        """Step the fragments of this rank and send them to the others."""
        self._warn_of_empty_buckets()
        present, shard = self._find_present(), self._shard
        for bucket in self._buckets:
            bucket.open(shard.state)
        stepped = {n: self._fragments[n] for n in self._fragments.keys() & present}
        grads = {piece.tensor: bucket.grad_of(piece) for bucket, piece in stepped.values()}
        shard.dtypes |= {piece.tensor: bucket.kinds.state for bucket, piece in stepped.values()}
        pairs = []
        for group in self.param_groups:
            found = [self._fragments.get(id(param)) for param in group["params"]]
            tensors = [one[1].tensor for one in found if one is not None]
            pairs.append((group, {**group, "params": tensors}))
        # The shard counts the steps of groups of which this rank has something.
        _step.count_steps([group for group, mine in pairs if not mine["params"]], noop)
        shard.param_groups = [mine for _, mine in pairs if mine["params"]]
        if self._buckets:
            shard.step_scaled(factor, noop, grads=grads)
        for group, mine in pairs:
            group |= {"step": mine["step"]} if mine["params"] else {}
        self._send_params()


def known(number: Scalar) -> Scalar:
    """A number of the host where reading it waits for nothing."""
    if isinstance(number, torch.Tensor) and not _runtime.waits(number.device):
        return number.item()
    return number
