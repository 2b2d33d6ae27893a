"""``FusedNovoGrad``: NovoGrad in a few launches, its norms kept on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

from apex.multi_tensor_apply import list_functions
from apex.ops.lists.columns import Scalar, joined, taken
from apex.ops.lists.storage import StepOptions
from apex.ops.updates.novograd import UNSET, NovoGrad, novograd_
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._buckets import Bucket, GroupGrads

_DTYPE, _STEPPED = attrgetter("dtype"), methodcaller("__contains__", "exp_avg")
# The order of the vectors in a group's "exp_avg_sq"; the first two are always there.
KINDS = (torch.float16, torch.float32, torch.bfloat16, torch.float64)


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: Adam with one second moment, a norm, for each tensor.

    See :mod:`apex.ops.updates.novograd` for the formula. Moments are kept in the parameter's dtype,
    as in the original; float32 with a ``storage``. ``group["exp_avg_sq"]`` holds the norms (not
    their squares): a float32 vector for the float16 parameters that were stepped so far, one for
    the float32 ones, then, if there are any, for bfloat16 and float64. The step is counted per
    group.

    Args:
        params: Parameters, named parameters or groups; float16, bfloat16, float32, float64, mixed.
        lr: Learning rate; a tensor is read on its device.
        bias_correction: Whether moment and norm are corrected for their start.
        betas: Decays of moment and norm.
        eps: Added to the corrected norm.
        weight_decay: Weight decay; a tensor is read on its device.
        amsgrad: Not supported; here because callers pass ``False``.
        reg_inside_moment: Add weight decay to the gradient that enters the moment, instead of to
            the update.
        grad_averaging: Gradients enter the moment by ``1 - beta1``, instead of whole.
        norm_type: 2, or 0 for the largest magnitude.
        init_zero: Norms start at 0, instead of at the first gradient's.
        set_grad_none: Kept from the original; gradients are freed in any case.
        storage: ``"plain"``; or for bfloat16 parameters ``"low_bits"`` (bit-equal to float32
            weights), ``"kahan"`` or ``"stochastic"``.

    Raises:
        ValueError: No parameters, a misspelt key in a group, a number out of range.
        RuntimeError: ``amsgrad``, another ``norm_type``, or a parameter that is not a real floating
            tensor, or is sharded over processes.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedNovoGrad(model.parameters(), lr=0.01, betas=(0.95, 0.98))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    _needs_whole = "the norm of a whole gradient"
    slots = ("exp_avg",)
    _numbers = NovoGrad
    narrow_slots = ("exp_avg",)
    _joins_groups = False  # each has the norms of its tensors
    # Subclasses with a step of their own call these, as in the original.
    multi_tensor_novograd = staticmethod(list_functions.multi_tensor_novograd)

    def __init__(  # noqa: PLR0913 - the original's signature
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | torch.Tensor = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        storage: str = "plain",
    ) -> None:
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "grad_averaging": grad_averaging,
            "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        self.reg_inside_moment = bool(reg_inside_moment)
        self.moment_mode = 0 if reg_inside_moment else 1
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, amsgrad=amsgrad
        )

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        super()._check_numbers(group)
        if group["norm_type"] not in (0, 2):
            raise RuntimeError(
                "FusedNovoGrad only support l2/inf norm now: norm_type was "
                f"{group['norm_type']!r}; allowed are 2 and 0 (the largest magnitude)."
            )

    def _members(self, group: dict[str, Any], kind: torch.dtype) -> list[torch.Tensor]:
        """The parameters behind the entries of a vector: those that have been stepped."""
        return [
            param
            for param in group["params"]
            if param.dtype == kind and "exp_avg" in self.state.get(param, {})
        ]

    def _prepare_step(
        self, active: Sequence[GroupGrads], factor: Scalar, noop: torch.Tensor | None
    ) -> None:
        """Append norms of parameters that are stepped for the first time."""
        active = [one for one in active if not self._is_settled(one)]
        for group, _, _ in active:  # all checks before anything changes
            self._follow_conversion(group)
        for group, params, _ in active:
            fresh = {param for param in params if "exp_avg" not in self.state.get(param, {})}
            if not fresh:
                continue
            kinds = len(KINDS) if {param.dtype for param in fresh} & {*KINDS[2:]} else 2
            vectors = list(group.get("exp_avg_sq", ()))
            while len(vectors) < kinds:
                vectors.append(torch.zeros(0, dtype=torch.float32, device=params[0].device))
            group["exp_avg_sq"] = vectors
            group["exp_avg_sq"] = [
                self._with_room(group, kind, fresh) for kind in KINDS[: len(vectors)]
            ]
            for param in params:  # at once, so that entries and parameters stay of one number
                self._state_of(param)

    def _is_settled(self, one: GroupGrads) -> bool:
        """Whether there is a norm for each parameter, all of one dtype, and all are stepped."""
        group, params, _ = one
        sizes = [norms.numel() for norms in group.get("exp_avg_sq", ())]
        if len(params) != len(group["params"]) or sum(sizes) != len(params):
            return False
        dtypes = {*map(_DTYPE, params)}
        kinds = {kind for kind, size in zip(KINDS, sizes, strict=False) if size}
        return len(dtypes) == 1 and dtypes == kinds and all(map(_STEPPED, self._states(params)))

    def _follow_conversion(self, group: dict[str, Any]) -> None:
        """Sort the norms by dtype again, if the model was converted, by ``double()`` say.

        Norms of several dtypes are not told apart: the vectors do not say whose they are.
        """
        dtypes = {param.dtype for param in group["params"]}
        vectors = group.get("exp_avg_sq", ())
        filled = {kind: x for kind, x in zip(KINDS, vectors, strict=False) if x.numel()}
        if filled.keys() <= dtypes and len(dtypes) == 1:
            (kind,) = dtypes
            self._norms(group, kind, len(self._members(group, kind)))
            return
        members = {kind: self._members(group, kind) for kind in KINDS}
        if {kind: len(some) for kind, some in members.items() if some} == {
            kind: norms.numel() for kind, norms in filled.items()
        }:
            return
        stepped = [p for p in group["params"] if "exp_avg" in self.state.get(p, {})]
        if [norms.numel() for norms in filled.values()] == [len(stepped)]:
            (norms,) = filled.values()
            kinds = len(KINDS) if dtypes & {*KINDS[2:]} else 2
            indices = [[i for i, p in enumerate(stepped) if p.dtype == k] for k in KINDS[:kinds]]
            group["exp_avg_sq"] = [taken(norms, chosen).clone() for chosen in indices]
        for kind in KINDS:
            self._norms(group, kind, len(members[kind]))

    def _norms(self, group: dict[str, Any], kind: torch.dtype, members: int) -> torch.Tensor:
        vectors = group.get("exp_avg_sq", ())
        found = dict(zip(KINDS, vectors, strict=False))
        norms: torch.Tensor = found.get(kind, torch.zeros(0))
        if not members:  # the state was cleared
            return norms[:0]
        if norms.numel() != members:
            raise ValueError(
                f'FusedNovoGrad: a group\'s "exp_avg_sq" holds {norms.numel()} norms of {kind} '
                f'parameters, and {members} of its parameters have an "exp_avg". Load a state that '
                "was saved as a whole, or clear that of all parameters of the group."
            )
        return norms

    def _with_room(
        self, group: dict[str, Any], kind: torch.dtype, fresh: set[torch.Tensor]
    ) -> torch.Tensor:
        old = self._members(group, kind)
        norms = self._norms(group, kind, len(old))
        seen = {*old}
        every = [p for p in group["params"] if p.dtype == kind and (p in seen or p in fresh)]
        if len(every) == len(old):
            return norms
        start = 0.0 if group["init_zero"] else UNSET
        device = every[0].device
        new = torch.full((len(every) - len(old),), start, dtype=torch.float32, device=device)
        old_positions, new_positions = _split(every, seen)
        return joined([(old_positions, norms.to(device)), (new_positions, new)])

    def _update(self, group: dict[str, Any], bucket: Bucket, options: StepOptions) -> None:
        device = bucket.weights[0].device
        numbers = self._numbers_of(group, device)
        kind = bucket.params[0].dtype
        norms = group["exp_avg_sq"][KINDS.index(kind)]
        columns = self.columns(bucket)
        if norms.numel() == len(bucket.params):  # of all that were stepped, in the same order
            novograd_(columns, norms, numbers, options)
            return
        here, others = _split(self._members(group, kind), {*bucket.params})
        mine = taken(norms, here).to(device, non_blocking=device.type != "cpu", copy=True)
        novograd_(columns, mine, numbers, options)
        mine = mine.to(norms.device, non_blocking=not norms.is_cpu)
        norms.copy_(joined([(here, mine), (others, taken(norms, others))]))

    def _restore(self, loaded: dict[str, Any]) -> None:
        super()._restore(loaded)
        for group in self.param_groups:
            for number, norms in enumerate(group.get("exp_avg_sq", ())):
                members = self._members(group, KINDS[number])
                device = (members or group["params"])[0].device
                group["exp_avg_sq"][number] = norms.to(device, torch.float32)


def _split(
    params: Sequence[torch.Tensor], chosen: set[torch.Tensor]
) -> tuple[list[int], list[int]]:
    """The positions of the chosen parameters, and those of the others."""
    return (
        [number for number, param in enumerate(params) if param in chosen],
        [number for number, param in enumerate(params) if param not in chosen],
    )
