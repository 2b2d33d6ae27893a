"""What every fused optimizer shares: groups, gradients, the step and how it is skipped.

An optimizer is a pure update (:mod:`apex.ops`) plus a class that says which numbers it has and
passes columns (lists of tensors). ``step`` collects the parameters that have gradients. It splits
them by device and set of dtypes, and calls :meth:`FusedOptimizer._update` once for each part: one
kernel launch where Triton runs.

**Skipping without waiting.** A tensor (``found_inf``, set by torch's ``GradScaler`` or by amp) says
whether a gradient is not finite. On a CPU the step reads it, which costs nothing. On a device the
kernels read it, and the step count is a tensor that is only incremented if the step was taken.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, starmap
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from apex.ops import _runtime
from apex.ops.lists.clip import clipped
from apex.ops.lists.overlaps import own_copies, write_back
from apex.ops.lists.placements import is_sharded, placed
from apex.ops.lists.stages import Kind, Stages, finish, finish_on_shards
from apex.ops.lists.storage import ScaledStep, StepOptions
from apex.ops.lists.tensor_lists import OWN_MEMORY, Scalar, are_real_and_strided
from apex.optimizers._launches import (
    GroupGrads,
    Launch,
    SplitArguments,
    count_steps,
    counted,
    joined,
    split,
    with_copies,
    with_grads,
)
from apex.optimizers._state import StatefulOptimizer
from apex.optimizers._zero import partition


class FusedOptimizer(StatefulOptimizer):
    """Base of the fused optimizers, and the arguments that they share.

    Each takes those that are in its signature; its own docstring has the others.

    Args:
        params: Parameters, named parameters or groups; float16, bfloat16, float32, float64, mixed.
        lr: Learning rate; a tensor is read on its device.
        betas: Decays of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay; a tensor is read on its device.
        bias_correction: Whether moments are corrected for their start at 0.
        grad_averaging: Whether a gradient enters the first moment by ``1 - beta1`` or whole.
        max_grad_norm: Largest norm of all gradients together, over all ranks for DTensors and in
            torch's ``ZeroRedundancyOptimizer``; 0 turns clipping off.
        amsgrad: Not supported; here because callers pass ``False``.
        set_grad_none: Kept from the original; gradients are freed in any case.
        storage: ``"plain"``; or for bfloat16 parameters ``"low_bits"`` (bit-equal to float32
            masters, 4 bytes per weight instead of 6), ``"kahan"`` or ``"stochastic"``, see
            :mod:`apex.ops.lists.storage`.
        state: ``"plain"``; or ``"8bit"``: moments of matrices and larger tensors, of 4,096 elements
            or more, are in 8 bits, about 1.02 bytes each, see :mod:`apex.ops.lists.quantized`.
        defaults: Of this base alone: values of the group's numbers.

    Raises:
        ValueError: No parameters, an unknown key in a group, a number out of range.
        RuntimeError: ``amsgrad``; or a parameter is not a dense float16, bfloat16, float32 or
            float64 tensor, has the negative bit, or is a ``Partial`` DTensor.
    """

    # How one launch is stepped, and the type of the numbers of that.
    _algorithm: Callable[[Any, Any, StepOptions], Stages | None]
    _numbers: Any

    set_grad_none = True  # where an older Apex has pickled the whole optimizer
    # If True, torch's GradScaler leaves unscaling and the skip to the step. Programs react to it:
    # Lightning refuses to clip, and accelerate takes a skipped step for one that was taken.
    _step_supports_amp_scaling = False

    #: Whether a step writes into gradients something that differs from weight to weight.
    _writes_grads = False
    #: Where arguments of ``step`` that are no longer taken still are, for the message.
    _takes_arguments = ""
    #: Whether groups of equal numbers share launches: not where a group has tensors of its own.
    _joins_groups = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        set_grad_none: bool = True,
        storage: str = "plain",
        amsgrad: bool = False,
        state: str = "plain",
    ) -> None:
        if amsgrad:
            raise RuntimeError(
                f"{self._name} does not support the AMSGrad variant; leave amsgrad=False."
            )
        self.set_grad_none = set_grad_none
        self._partition = partition()
        super().__init__(params, defaults, storage, state)

    @functools.cached_property
    def _dummy_overflow_buf(self) -> torch.Tensor:
        """The flag that subclasses with a step of their own hand to ``multi_tensor_applier``."""
        devices = [param.device for group in self.param_groups for param in group["params"][:1]]
        return torch.zeros(1, dtype=torch.int32, device=devices[0] if devices else "cpu")

    # -- the step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **historic: Any) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the loss again.
            **historic: ``grad_scaler``, a ``torch.amp.GradScaler`` that drives the step. Others of
                the original's old arguments are refused.

        Returns:
            What ``closure`` returned, else ``None``.

        Raises:
            KeyError: A number was deleted from a group.
            RuntimeError: A gradient is sparse, complex, or a DTensor of another mesh than its
                parameter; a parameter is not of the dtype that ``storage`` keeps; or an argument is
                no longer taken.
        """
        return self._stepped(closure, historic)

    def _stepped(self, closure: Callable[[], Any] | None, historic: dict[str, Any]) -> Any:
        """Do what ``step`` does: torch replaces that with one that runs the user's hooks."""
        try:
            return self._step(closure, historic)
        except KeyError:
            self._check_complete()
            raise

    def _step(self, closure: Callable[[], Any] | None, historic: dict[str, Any]) -> Any:
        scaler = historic.pop("grad_scaler", None)
        self._refuse(historic)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given: ScaledStep | None = vars(self).pop("_scaled_step", None)
        if given is not None:  # by amp, which calls step() so that hooks and subclasses run
            self.step_scaled(given.factor, given.noop, copies=given.copies, grads=given.grads)
            return loss
        grad_scale = getattr(self, "grad_scale", None)
        noop = getattr(self, "found_inf", None)
        if not isinstance(noop, torch.Tensor):
            noop = None  # GradScaler's sum over the devices of no gradients: the integer 0
        if scaler is not None and scaler.is_enabled():
            noop = self._found_inf(scaler)
            unscaled = scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED
            grad_scale = None if unscaled else scaler._get_scale_async()
        factor: Scalar = 1.0 if grad_scale is None else grad_scale.reciprocal().float()
        self.step_scaled(factor, noop, write_grads=grad_scale is not None)
        return loss

    def _refuse(self, historic: Mapping[str, Any]) -> None:
        given = [name for name, value in historic.items() if value is not None]
        if given:
            raise RuntimeError(
                f"{self._name} has been updated. Simply initialize it identically to "
                f"torch.optim's, and call step() with no arguments; {', '.join(given)} was passed."
                f"{self._takes_arguments}"
            )

    def _found_inf(self, scaler: Any) -> torch.Tensor | None:
        found = list(scaler._check_inf_per_device(self).values())
        if not found:
            return None
        first: torch.Tensor = found[0]
        return sum((x.to(first.device, non_blocking=True) for x in found[1:]), start=first)

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
        """Take one step on gradients that are still scaled.

        Args:
            factor: What gradients are multiplied by: 1 / loss scale, times a clipping coefficient.
                A one-element tensor is read where the kernels run.
            noop: One-element tensor; the step is skipped if it is not 0.
            write_grads: Whether the gradients are left multiplied by ``factor``, but for inference
                tensors.
            copies: 16-bit weights that also get the new values, by parameter.
            grads: Gradients instead of ``param.grad``, by parameter.
        """
        vars(self).pop("_scaled_step", None)  # where Dynamo traces _step, its pop is lost
        if noop is not None and not _runtime.waits(noop.device):
            if noop.item():
                return
            noop = None
        if isinstance(factor, torch.Tensor) and not _runtime.waits(factor.device):
            factor = float(factor)
        active = [with_grads(group, grads) for group in self.param_groups]
        every = [param for group in self.param_groups for param in group["params"]]
        tensors = chain(every, chain.from_iterable(one.grads for one in active))
        plain = OWN_MEMORY.issuperset(map(type, tensors))
        sharded = [] if plain else [*filter(is_sharded, every)]
        if not plain:
            active = [a._replace(grads=[*placed(self._name, a.params, a.grads)]) for a in active]
        gradients = [grad for one in active for grad in one.grads]
        self._check_grads(gradients)
        copied = own_copies(gradients) if write_grads or self._writes_grads else {}
        active = with_copies(active, copied) if copied else active
        together = joined(active, self.defaults if self._joins_groups else None, noop)
        stepped = [param for groups in together for _, params, _ in groups for param in params]
        self._check_stored(stepped)  # all checks before anything changes
        self._follow_written()
        self._prepare_step(active, factor, noop)
        largest = self._largest_norm()
        if largest:
            factor = clipped(
                gradients, factor, largest, over=sharded and every, partition=self._partition
            )
        lists = [*self._lists(together, copies, plain=plain)]
        options = StepOptions(
            factor=factor,
            noop=noop,
            write_grads=write_grads,
            storage=self._storage,
            dense=all(is_uniform for *_, is_uniform, _ in lists),
        )
        updates = self._updates(together, chain.from_iterable(starmap(split, lists)), options)
        self._finish(updates, sharded)
        if not self._writes_grads:
            write_back(gradients, copied)
        self._note_versions()

    def _finish(
        self,
        updates: Iterable[tuple[list[torch.Tensor], Stages | None]],
        sharded: Sequence[torch.Tensor],
    ) -> None:
        """Run updates to their ends; ``sharded`` are parameters of which ranks hold parts."""
        if sharded and (kinds := self._kinds()):
            finish_on_shards(updates, sharded, kinds)
        else:
            for _, stages in updates:
                if stages is not None:
                    finish(stages)

    def _updates(
        self,
        together: Sequence[list[GroupGrads]],
        launches: Iterable[tuple[int, Launch]],
        options: StepOptions,
    ) -> Iterator[tuple[list[torch.Tensor], Stages | None]]:
        """Count the step and update each launch; yields its parameters, and the rest to be done."""
        noop = options.noop
        counters = None
        if self._counts_steps:
            elsewhere = self._partition and self._partition.device
            counters = count_steps(self._counted_groups(), noop, elsewhere)
        everywhere: dict[torch.device, StepOptions] = {}
        for number, launch in launches:
            device = launch.device
            if device not in everywhere:
                everywhere[device] = options._replace(
                    factor=_on(options.factor, device),
                    noop=None if noop is None else noop.to(device, non_blocking=True),
                )
            here = everywhere[device]
            if launch.extra is not None:
                here = here._replace(extra=launch.extra)
            group = together[number][0].group
            if self._state_form == "8bit":
                here = here._replace(quantized=self._quantized(launch, self._slots_of(group)))
            if counters is not None:
                group = counted(together[number], launch, counters)
            yield launch.params, self._update(group, launch, here)

    def _lists(
        self,
        together: Sequence[list[GroupGrads]],
        copies: Mapping[torch.Tensor, torch.Tensor] | None,
        *,
        plain: bool,
    ) -> Iterator[SplitArguments]:
        """Arguments of :func:`split`, once for all joined groups that have the same slots."""
        kept = [self._slots_of(groups[0].group) for groups in together]
        for slots in dict.fromkeys(kept):
            # Groups with other slots become empty lists: `split` yields the places in `together`.
            some = [
                groups if its == slots else [] for groups, its in zip(together, kept, strict=True)
            ]
            params = [param for groups in some for _, params, _ in groups for param in params]
            grads = [grad for groups in some for _, _, found in groups for grad in found]
            found = self._columns(params, grads, slots, copies, plain=plain)
            yield params, *found, [sum(len(one.params) for one in each) for each in some]

    def _check_grads(self, found: Sequence[torch.Tensor]) -> None:
        """Raise ``RuntimeError`` if a gradient is not dense and real."""
        if are_real_and_strided([found]):
            return
        for grad in found:
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{self._name} does not support sparse gradients, please consider SparseAdam "
                    "instead (torch.optim.SparseAdam or torch.optim.SGD)."
                )
            if grad.is_complex():
                raise RuntimeError(f"{self._name} does not support complex gradients.")

    def _prepare_step(
        self, active: Sequence[GroupGrads], factor: Scalar, noop: torch.Tensor | None
    ) -> None:
        """Called once before the groups are stepped: for what needs all gradients."""

    def _largest_norm(self) -> float:
        """What the norm of all gradients together is clipped to; 0 for no clipping."""
        return 0.0

    def _kinds(self) -> set[Kind]:
        """What updates yield of each tensor, see :func:`apex.ops.lists.stages.finish_on_shards`."""
        return set()

    def _update(self, group: dict[str, Any], launch: Launch, options: StepOptions) -> Stages | None:
        """Step one launch, or return an update that does.

        Args:
            group: The numbers of a group, or of several whose numbers are equal. Its step is a
                number, or :class:`apex.ops.updates.adam.DeviceSteps` where a device counts.
            launch: What is stepped.
            options: Scaling, skipping and storage.
        """
        return self._algorithm(launch.columns, self._numbers_of(group, launch.device), options)

    def _numbers_of(self, group: Mapping[str, Any], device: torch.device, kind: Any = None) -> Any:
        """The numbers of a step: of the group, else attributes of the optimizer."""
        kind = kind or self._numbers
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        found = {"step": group.get("step"), "beta1": beta1, "beta2": beta2}
        for key in ("lr", "weight_decay"):
            found[key] = scalar(group[key], device)
        numbers = [
            found[name]
            if name in found
            else (group[name] if name in self.defaults else getattr(self, name))
            for name in kind.__match_args__
        ]
        return kind(*numbers)


def _on(value: Scalar, device: torch.device) -> Scalar:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def scalar(value: Any, device: torch.device) -> Scalar:
    """A group's number for a kernel: a Python number, or a float32 tensor on ``device``.

    What is on the host is read there: of float32 the shortest number that it can stand for, 0.001
    and not 0.0010000000475. torch's CPU kernels compute with float64 numbers, and a learning rate
    in a tensor (``capturable``) has to step as the same one without.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    if _runtime.waits(value.device):
        return value.to(device, torch.float32, non_blocking=True).reshape(())
    exact: float = value.item()
    if value.dtype == torch.float32:
        for digits in (6, 7, 8):
            short = float(f"{exact:.{digits}g}")
            if struct.unpack("f", struct.pack("f", short))[0] == exact:
                return short
    return exact
