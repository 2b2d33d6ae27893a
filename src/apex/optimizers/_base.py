"""What every fused optimizer shares: groups, gradients, state, skipping, masters, checkpoints.

An optimizer is a pure update (:mod:`apex.ops`) plus a class that says which numbers it has and
hands over columns. ``step`` collects the parameters that have gradients, splits them into buckets
of one device and one set of dtypes, and calls :meth:`FusedOptimizer._update` once for each: one
kernel launch where Triton runs.

**Skipping without waiting.** A step can be told by a tensor (``found_inf``, set by torch's
``GradScaler`` or by amp) that a gradient is not finite. On a CPU that flag is read, which costs
nothing. On a device the kernels read it, and the step count becomes a tensor that advances only
when the step did.

**State.** Slots such as ``exp_avg`` are per parameter, float32 unless an optimizer's contract says
otherwise, and stay so through ``load_state_dict``. The step count is per group, as in the original.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, NamedTuple, TypeVar

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import required

from apex.ops import _runtime
from apex.ops.clip import clipped
from apex.ops.columns import Scalar, local, of_one_kind
from apex.ops.storage import PLAIN, STORAGES, How, LostUpdates, Storage

_T = TypeVar("_T")
HALF = (torch.float16, torch.bfloat16)
# Keys that torch.optim's twins keep in their groups and ours do not know. Those that change what is
# computed are refused when set.
_FOREIGN = {"foreach", "fused", "differentiable", "decoupled_weight_decay", "capturable"}
_REFUSED = {"amsgrad", "maximize"}
# What the optimizers of torch and ours keep for a parameter: none of it is a user's own.
_SLOTS_OF_OTHERS = {
    "acc_delta", "ax", "eta", "exp_avg", "exp_avg_diff", "exp_avg_sq", "exp_inf", "grad_avg",
    "max_exp_avg_sq", "momentum_buffer", "mu", "mu_product", "prev", "square_avg", "step_size",
    "sum",
}  # fmt: skip
# Attributes that a copy does not get: what amp hangs on an optimizer, and versions of tensors that
# are others in the copy.
_NOT_COPIED = {"_amp_stash", "_scaled_step", "_written"}


@dataclass
class Bucket:
    """Parameters of one device and one set of dtypes, as columns.

    Attributes:
        params: The parameters, as in the group.
        grads: Their gradients; local parts of distributed ones.
        weights: What is updated: the parameters themselves or their masters.
        slots: A column for each state slot.
        extra: The storage's own column, or the 16-bit parameters behind masters.
    """

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    slots: list[list[torch.Tensor]] = field(default_factory=list)
    extra: list[torch.Tensor] | None = None


class Work(NamedTuple):
    """A group, its parameters that have a gradient, and their gradients."""

    group: dict[str, Any]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers.

    Args:
        params: Parameters or groups.
        defaults: Values of the group's numbers.
        set_grad_none: Whether ``zero_grad()`` without an argument frees gradients.
        storage: How weights are stored, see :mod:`apex.ops.storage`.

    Raises:
        ValueError: No parameters, an unknown key in a group, a number out of range.
        RuntimeError: A parameter is not a dense float16, bfloat16, float32 or float64 tensor.
    """

    # A parameter with this name in step() would make torch's GradScaler warn at each step.
    _step_supports_amp_scaling = True

    #: Names of the state slots, in the order of the update.
    slots: tuple[str, ...] = ()
    #: Slots that are kept in the parameter's dtype, as the original does.
    narrow_slots: tuple[str, ...] = ()
    #: Keys of the per-parameter state that are not slots.
    _more_state: tuple[str, ...] = ("master_param", "low_bits", "error")
    #: Whether groups have a "step".
    _counts_steps = True
    #: What is computed from tensors as a whole, and so refuses sharded ones; "" for nothing.
    _needs_whole = ""
    #: dtypes of the parameters that get float32 masters.
    _mastered: frozenset[torch.dtype] = frozenset()

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        set_grad_none: bool = True,
        storage: str = "plain",
    ) -> None:
        if storage not in STORAGES:
            raise ValueError(
                f"{type(self).__name__}: storage was {storage!r}; allowed are "
                f"{', '.join(map(repr, STORAGES))}."
            )
        self.set_grad_none = set_grad_none
        self.storage = storage
        self.lost_updates: LostUpdates | None = None
        self._written: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch's copies hold groups and state alone: what a subclass was told would be lost. Hooks
        # and methods that amp or a scheduler has replaced stay with the original, as in torch.
        self._drop_stale()
        told = {
            key: value
            for key, value in vars(self).items()
            if not (key in _NOT_COPIED or key.startswith("_optimizer_") or callable(value))
        }
        state: dict[str, Any] = super().__getstate__()
        return {**told, **state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_written", {})

    def count_lost_updates(self, on: bool = True) -> LostUpdates | None:
        """Switch on (or off) a meter of updates that round to nothing.

        Args:
            on: Whether steps count from now on.

        Returns:
            The meter, with ``share`` and ``reset()``; also ``self.lost_updates``.
        """
        self.lost_updates = LostUpdates() if on else None
        return self.lost_updates

    # -- groups ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its numbers and tensors are checked first.

        Raises:
            ValueError: An unknown key, or a number out of range.
            RuntimeError: A parameter that cannot be stepped.
        """
        if isinstance(param_group, dict):
            known = {"params", "param_names", "step", *self.defaults, *self._group_keys()}
            unknown = sorted(set(param_group) - known)
            if unknown:
                raise ValueError(
                    f"{type(self).__name__}: a group has the unknown key(s) {', '.join(unknown)}; "
                    f"known are {', '.join(sorted(known - {'param_names', 'step'}))}."
                )
            if "params" in param_group:
                if not isinstance(param_group["params"], torch.Tensor | set):
                    param_group = {**param_group, "params": list(param_group["params"])}
                self._check_params(param_group["params"])
            self._check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _group_keys(self) -> set[str]:
        """Keys that a group may have besides the defaults: what torch's schedulers write."""
        return {"initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a number out of range."""
        at_least_0 = ("lr", "eps", "weight_decay", "momentum", "max_grad_norm")
        names = {"lr": "learning rate", "eps": "epsilon value"}
        for key in at_least_0:
            value = group.get(key, 0.0)
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"{type(self).__name__}: {key} was a tensor of shape "
                        f"{tuple(value.shape)}; it must have one element."
                    )
            elif value is not required and not (
                isinstance(value, numbers.Real) and float(value) >= 0
            ):
                raise ValueError(
                    f"Invalid {names.get(key, key + ' value')}: {value}. "
                    f"{type(self).__name__} needs a number of at least 0."
                )
        for number, beta in enumerate(group.get("betas", ())):
            if not 0.0 <= beta < 1.0:
                raise ValueError(
                    f"Invalid beta parameter at index {number}: {beta}. {type(self).__name__} "
                    "needs 0 <= beta < 1."
                )

    def _check_params(self, params: Any) -> None:
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        for entry in listed:
            tensor = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
            if not isinstance(tensor, torch.Tensor):
                continue  # torch's own error says what it is
            if tensor.dtype not in (*HALF, torch.float32, torch.float64):
                raise RuntimeError(
                    f"{type(self).__name__} only support fp16 and fp32 (and bf16, fp64); a "
                    f"parameter has {tensor.dtype}."
                )
            if self.storage != "plain" and tensor.dtype != torch.bfloat16:
                raise RuntimeError(
                    f"{type(self).__name__}: storage={self.storage!r} keeps bfloat16 weights; a "
                    f"parameter has {tensor.dtype}. Convert the model with .bfloat16() first."
                )
            sharded = any(place.is_shard() for place in getattr(tensor, "placements", ()))
            if self._needs_whole and sharded:
                raise RuntimeError(
                    f"{type(self).__name__} needs {self._needs_whole}, and a parameter is sharded "
                    "over processes. Use FusedAdam without max_grad_norm for it."
                )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Free them, or fill them with zeros; ``None`` means free: with
                ``set_grad_none=False`` the original calls torch's ``zero_grad()``, which frees too.
        """
        super().zero_grad(set_to_none=True if set_to_none is None else set_to_none)

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
            RuntimeError: A gradient is sparse or complex, or an argument is no longer taken.
        """
        return self._stepped(closure, historic)

    def _stepped(self, closure: Callable[[], Any] | None, historic: dict[str, Any]) -> Any:
        """Do what ``step`` does: torch replaces that with one that runs the user's hooks."""
        scaler = historic.pop("grad_scaler", None)
        self._refuse(historic)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = vars(self).pop("_scaled_step", None)
        if given is not None:  # from amp, which goes through step() for the sake of its wrappers
            self.step_scaled(**given)
            return loss
        grad_scale = getattr(self, "grad_scale", None)
        noop = getattr(self, "found_inf", None)
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
                f"{type(self).__name__} has been updated. Simply initialize it identically to "
                f"torch.optim's, and call step() with no arguments; {', '.join(given)} was passed."
            )

    def _found_inf(self, scaler: Any) -> torch.Tensor | None:
        found = list(scaler._check_inf_per_device(self).values())
        if not found:
            return None
        total: torch.Tensor = found[0]
        for other in found[1:]:
            total = total + other.to(total.device, non_blocking=True)
        return total

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
            write_grads: Whether the gradients are left multiplied by ``factor``.
            copies: 16-bit weights that also get the new values, by parameter.
            grads: Gradients in the place of ``param.grad``, by parameter.
        """
        if noop is not None and not _runtime.waits(noop.device):
            if noop.item():
                return
            noop = None
        if isinstance(factor, torch.Tensor) and not _runtime.waits(factor.device):
            factor = float(factor)
        work = [self._work(group, grads) for group in self.param_groups]
        # All checks before anything changes.
        for _, _, gradients in work:
            self._check_grads(gradients)
        self._drop_stale()
        self._before(work, factor, noop)
        largest = self._largest_norm()
        if largest:
            every = [local(grad) for _, _, gradients in work for grad in gradients]
            factor = clipped(every, factor, largest)
        plan = [
            (group, [*self._buckets(params, gradients, copies)])
            for group, params, gradients in work
            if group["params"]
        ]
        for group, buckets in plan:
            self._advance(group, noop)
            for bucket in buckets:
                device = bucket.weights[0].device
                how = How(
                    factor=_on(factor, device),
                    noop=None if noop is None else noop.to(device, non_blocking=True),
                    write_grads=write_grads,
                    storage=self._storage,
                    extra=bucket.extra,
                    meter=self.lost_updates,
                )
                if self.lost_updates is not None:
                    weights = sum(weight.numel() for weight in bucket.weights)
                    self.lost_updates.add(0.0, weights, how.noop)
                self._update(group, bucket, how)
        self._note_versions()

    def _work(
        self, group: dict[str, Any], grads: Mapping[torch.Tensor, torch.Tensor] | None
    ) -> Work:
        params = group["params"]
        found: list[Any]
        if grads is None:
            found = [*map(_GRAD, params)]
        else:
            found = [grads.get(param, param.grad) for param in params]
        if any(map(is_, found, repeat(None))):
            params = [p for p, grad in zip(params, found, strict=True) if grad is not None]
            found = [grad for grad in found if grad is not None]
        return Work(group, params, found)

    def _check_grads(self, found: Sequence[torch.Tensor]) -> None:
        """Raise ``RuntimeError`` if a gradient is not dense and real."""
        complex_ = any(dtype.is_complex for dtype in {*map(_DTYPE, found)})
        if not complex_ and {*map(_LAYOUT, found)} <= {torch.strided}:
            return
        name = type(self).__name__
        for grad in found:
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{name} does not support sparse gradients, please consider SparseAdam "
                    "instead (torch.optim.SparseAdam or torch.optim.SGD)."
                )
            if grad.is_complex():
                raise RuntimeError(f"{name} does not support complex gradients.")

    def _advance(self, group: dict[str, Any], noop: torch.Tensor | None) -> None:
        """Count the step, on the device where it may be skipped there."""
        if not self._counts_steps:
            return
        step = group.get("step", 0)
        if noop is None and not isinstance(step, torch.Tensor):
            group["step"] = step + 1
            return
        device = group["params"][0].device
        if not isinstance(step, torch.Tensor):
            step = torch.full((1,), step, dtype=torch.int32, device=device)
        elif step.device != device:
            step = step.to(device, non_blocking=True)
        landed = 1 if noop is None else (noop.to(device, non_blocking=True) == 0).to(torch.int32)
        group["step"] = step.add_(landed)

    def _buckets(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        copies: Mapping[torch.Tensor, torch.Tensor] | None,
    ) -> Iterable[Bucket]:
        # Whole columns at a time, by functions written in C: one by one, 1,000 parameters take
        # longer than SGD does. Nothing is kept from step to step, so nothing gets stale when groups
        # or state are edited.
        states = [*map(self.state.__getitem__, params)]
        if self._mastered and not all(map(_MASTERED, states)):
            for param in params:
                self._master_or(param)
        try:
            slots = [[*map(itemgetter(slot), states)] for slot in self.slots]
        except KeyError:  # the first step of some
            states = [*map(self._state_of, params)]
            slots = [[*map(itemgetter(slot), states)] for slot in self.slots]
        weights = _locals(params)
        # as many entries as slots: nothing else is there
        mastered = {*map(len, states)} != {len(self.slots)} and any(map(_MASTERED, states))
        extra = self._extras(params, weights, states, copies, mastered=mastered)
        if mastered:
            both = zip(states, weights, strict=True)
            weights = _locals([state.get("master_param", weight) for state, weight in both])
        columns = [_locals(grads), weights, *map(_locals, slots)]
        self._check_places(params, columns, extra)
        if extra is None and of_one_kind(columns):
            listed, gradients, updated, *kept = map(list, [params, *columns])
            yield Bucket(listed, gradients, updated, kept)
            return
        kinds = zip(
            map(_DEVICE, weights),
            *(map(_DTYPE, column) for column in columns),
            [None] * len(weights) if extra is None else [x is not None and x.dtype for x in extra],
            strict=True,
        )
        members: dict[Any, list[int]] = {}
        for number, kind in enumerate(kinds):
            members.setdefault(kind, []).append(number)
        for chosen in members.values():
            pick = _picker(chosen, len(weights))
            beside = None if extra is None else [x for x in pick(extra) if x is not None]
            listed, gradients, updated, *kept = map(pick, [params, *columns])
            yield Bucket(listed, gradients, updated, kept, beside or None)

    def _check_places(
        self,
        params: Sequence[torch.Tensor],
        columns: Sequence[Sequence[torch.Tensor]],
        extra: Sequence[torch.Tensor | None] | None,
    ) -> None:
        """Raise if what is stepped together is not of one size on one device.

        Kernels take addresses: they would write beyond, or into what is not theirs.
        """
        weights = columns[1]
        names = ["gradient", "parameter", *self.slots, "state beside it"]
        if extra is not None:
            pairs = zip(extra, weights, strict=True)
            columns = [*columns, [weight if x is None else x for x, weight in pairs]]
        asked = (_NUMEL, torch.Tensor.get_device) if _runtime.has_accelerator() else (_NUMEL,)
        expected = [[*map(ask, weights)] for ask in asked]
        for name, column in zip(names, columns, strict=False):
            fits = all([*map(ask, column)] == e for ask, e in zip(asked, expected, strict=True))
            if fits and (not column or column[0].is_cpu == weights[0].is_cpu):
                continue
            for param, weight, other in zip(params, weights, column, strict=True):
                if (other.numel(), other.device) != (weight.numel(), weight.device):
                    raise RuntimeError(
                        f"{type(self).__name__}: the {name} of a parameter has {other.numel()} "
                        f"elements on {other.device}, and the parameter {weight.numel()} on "
                        f"{weight.device} (shape {tuple(param.shape)}). Move a model before making "
                        "its optimizer; after giving a parameter other data, clear its gradient "
                        "and its entry in optimizer.state."
                    )

    def _extras(
        self,
        params: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, Any]],
        copies: Mapping[torch.Tensor, torch.Tensor] | None,
        *,
        mastered: bool,
    ) -> Sequence[torch.Tensor | None] | None:
        """What stands beside each weight; ``None`` if that is nothing for all of them."""
        name = _EXTRA.get(self.storage)
        if name is not None:
            if any(name not in state for state in states):
                states = [*map(self._state_of, params)]
            return [state[name] for state in states]
        if not mastered and not copies:
            return None
        copies = copies or {}
        return [
            weight if "master_param" in state else copies.get(param)
            for param, weight, state in zip(params, weights, states, strict=True)
        ]

    def columns(self, bucket: Bucket) -> list[list[torch.Tensor]]:
        """Gradients, weights and every state slot."""
        return [bucket.grads, bucket.weights, *bucket.slots]

    @property
    def _storage(self) -> Storage:
        return STORAGES[self.storage]

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        for slot in self.slots:
            if slot not in state:
                dtype = self._slot_dtype(slot, param)
                state[slot] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
        storage = self._storage
        if storage.extra is not None and _EXTRA[storage.name] not in state:
            state[_EXTRA[storage.name]] = torch.zeros_like(local(param), dtype=storage.extra)
        return state

    def _master_or(self, param: torch.Tensor) -> torch.Tensor:
        """The parameter's master, made now if it is to have one; else the parameter."""
        state = self.state.get(param, {})
        if "master_param" not in state and param.dtype in self._mastered:
            state = self.state[param]
            state["master_param"] = param.detach().clone().float()
        master: torch.Tensor = state.get("master_param", param)
        return master

    def _drop_stale(self) -> None:
        """Zero what stands beside weights that somebody else has written since our last step.

        It belongs to the weight that was overwritten. Right after loading nothing is dropped: model
        and optimizer are loaded in any order.
        """
        name = _EXTRA.get(self.storage, "")
        for param, (version, column) in self._written.items():
            if param._version == version or self.state.get(param, {}).get(name) is not column:
                continue
            if _runtime.capturing():
                raise RuntimeError(
                    f"{type(self).__name__}: a weight was written since the last step, and a CUDA "
                    f'graph would drop its "{name}" at each replay. Take a step before capturing.'
                )
            column.zero_()
            self._written[param] = param._version, column

    def _note_versions(self) -> None:
        """Note the weights' versions, to see whether somebody else writes them."""
        name = _EXTRA.get(self.storage)
        if name is not None:
            self._written = {
                param: (param._version, state[name])
                for param, state in self.state.items()
                if isinstance(param, torch.Tensor) and name in state
            }

    def _slot_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        narrow = slot in self.narrow_slots and self._storage is PLAIN
        return param.dtype if narrow else _wide(param.dtype)

    def _before(self, work: Sequence[Work], factor: Scalar, noop: torch.Tensor | None) -> None:
        """Called once before the groups are stepped: for what needs all gradients."""

    def _largest_norm(self) -> float:
        """What the norm of all gradients together is clipped to; 0 for no clipping."""
        return 0.0

    def _update(self, group: dict[str, Any], bucket: Bucket, how: How) -> None:
        """Step one bucket."""
        raise NotImplementedError

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch saves it."""
        self._drop_stale()
        found: dict[str, Any] = super().state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; of this class, or of its twin in ``torch.optim``.

        Moments keep the dtype they were saved in: torch would round them to the parameter's.

        Raises:
            ValueError: The groups do not fit, or the state needs what this class does not do.
        """
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: the dict has no {' and no '.join(missing)}"
                f" (it has {', '.join(map(str, state_dict)) or 'nothing'}). Pass what "
                "optimizer.state_dict() returned."
            )
        loaded: dict[str, Any] = {}

        def convert(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(self._from_twin(given))
            self._check_states(loaded)
            return loaded

        def restore(_: torch.optim.Optimizer) -> None:
            self._restore(loaded)

        # After the user's hooks on the way in, before them on the way out.
        before = self.register_load_state_dict_pre_hook(convert)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_states(self, loaded: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if a saved tensor is another optimizer's or of another shape."""
        saved = [number for group in loaded["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        known = (*self.slots, *self._more_state)
        for number, param in zip(saved, params, strict=False):  # other lengths: torch says so
            state = loaded["state"].get(number, {})
            tensors = {key: x for key, x in state.items() if isinstance(x, torch.Tensor)}
            ours = {key: x for key, x in tensors.items() if key in known}
            foreign = tensors.keys() & _SLOTS_OF_OTHERS - {*known}
            if foreign or (tensors.keys() & {*self.slots} and not tensors.keys() >= {*self.slots}):
                raise ValueError(
                    f"{type(self).__name__}: the saved state of parameter {number} has "
                    f"{', '.join(tensors)}, and this optimizer keeps {', '.join(self.slots)}. "
                    "Load the state into the kind of optimizer that saved it."
                )
            for key, value in ours.items():
                if key != "first" and value.shape not in (param.shape, local(param).shape):
                    raise ValueError(
                        f"{type(self).__name__}: the saved {key} of parameter {number} has shape "
                        f"{tuple(value.shape)}, and the parameter {tuple(param.shape)}. Load the "
                        "state into the model that it was saved with."
                    )

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Put back what torch has cast."""
        saved = [number for group in loaded["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            for key, value in loaded["state"].get(number, {}).items():
                if key in (*self.slots, *self._more_state) and isinstance(value, torch.Tensor):
                    dtype = self._slot_dtype(key, param) if key in self.slots else value.dtype
                    self.state[param][key] = value.detach().clone().to(param.device, dtype)
        for param in params:
            for key in {*_EXTRA.values()} - {_EXTRA.get(self.storage)}:
                self.state.get(param, {}).pop(key, None)
        for group in self.param_groups:
            if isinstance(group.get("step"), torch.Tensor) and group["params"]:
                group["step"] = group["step"].to(group["params"][0].device)

    def _from_twin(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with torch.optim's per-parameter step moved to the groups."""
        groups = []
        states = {
            number: dict(state) if isinstance(state, Mapping) else state  # or a user's own
            for number, state in state_dict["state"].items()
        }
        for saved in state_dict["param_groups"]:
            group = dict(saved)
            for key in _REFUSED & group.keys() - self.defaults.keys():
                if group.pop(key):
                    raise ValueError(
                        f"{type(self).__name__}: the state was saved with {key}=True, which this "
                        "optimizer does not do."
                    )
            for key in _FOREIGN & group.keys() - self.defaults.keys():
                group.pop(key)
            steps = {
                float(states[number].pop("step"))
                for number in group["params"]
                if "step" in states.get(number, {})
            }
            steps = steps if self._counts_steps else set()
            if len(steps) > 1:
                raise ValueError(
                    f"{type(self).__name__}: the saved parameters of one group are at different "
                    f"steps ({sorted(steps)}), and this optimizer counts per group. Put them into "
                    "different groups."
                )
            if steps and "step" not in group:
                group["step"] = int(steps.pop())
            for key, value in self._twin_defaults().items():
                group.setdefault(key, value)
            groups.append(group)
        return {**state_dict, "state": states, "param_groups": groups}

    def _twin_defaults(self) -> dict[str, Any]:
        """Group keys that the twin in torch.optim does not have."""
        missing = set(self.defaults) - {"lr"}
        return {key: self.defaults[key] for key in missing}

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as the twin in ``torch.optim`` saves it, for its ``load_state_dict``.

        Returns:
            A state dict with the step count at each parameter. Moments stay float32, but torch
            rounds them to a 16-bit parameter's dtype when it loads them.
        """
        saved = self.state_dict()
        groups = []
        for group in saved["param_groups"]:
            group = dict(group)
            step = group.pop("step", 0)
            for number in group["params"]:
                if number in saved["state"]:
                    state = copy.deepcopy(saved["state"][number])  # the twin would share tensors
                    state = {key: state[key] for key in state if key not in self._more_state}
                    if self._counts_steps:
                        state["step"] = torch.tensor(float(step))
                    saved["state"][number] = self._as_twin(state)
            groups.append(self._twin_group(group))
        return {"state": saved["state"], "param_groups": groups}

    def _as_twin(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def _twin_group(self, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no twin in torch.optim.")


_EXTRA = {"low_bits": "low_bits", "kahan": "error"}
_DTYPE, _DEVICE, _LAYOUT, _GRAD = map(attrgetter, ("dtype", "device", "layout", "grad"))
_NUMEL = torch.Tensor.numel
_MASTERED = methodcaller("__contains__", "master_param")
_OWN_MEMORY = {torch.Tensor, torch.nn.Parameter}


def _locals(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors that hold the memory; see :func:`apex.ops.columns.local`."""
    if _OWN_MEMORY.issuperset(map(type, tensors)):
        return tensors
    return [*map(local, tensors)]


def _picker(numbers: Sequence[int], of: int) -> Callable[[Sequence[_T]], list[_T]]:
    """Make a function that picks these of ``of`` elements."""
    if len(numbers) == of:
        return list
    return lambda column: [column[number] for number in numbers]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _on(value: Scalar, device: torch.device) -> Scalar:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def counted(step: int | torch.Tensor, device: torch.device) -> int | torch.Tensor:
    """A group's step for a kernel: a number, or a tensor on ``device``; the host's is read."""
    if not isinstance(step, torch.Tensor) or not _runtime.waits(step.device):
        return int(step)
    return step.to(device, non_blocking=True)


def scalar(value: Any, device: torch.device) -> Scalar:
    """A group's number for a kernel: a Python number, or a float32 tensor on ``device``.

    What is on the host is read there.
    """
    if not isinstance(value, torch.Tensor) or not _runtime.waits(value.device):
        return float(value)
    return value.to(device, torch.float32, non_blocking=True).reshape(())
