"""What every fused optimizer is: groups, state, the step and how it is skipped.

An optimizer is a pure update (:mod:`apex.ops`) plus a class that says which numbers it has and
passes columns (lists of tensors). ``step`` collects the parameters that have gradients. It splits
them by device and set of dtypes, and calls :meth:`FusedOptimizer._update` once for each part: one
kernel launch where Triton runs.

**Skipping without waiting.** A tensor (``found_inf``, set by torch's ``GradScaler`` or by amp) says
whether a gradient is not finite. On a CPU the step reads it, which costs nothing. On a device the
kernels read it, and the step count is a tensor that is only incremented if the step was taken.

**State.** Slots such as ``exp_avg`` are per parameter, float32 unless an optimizer's contract says
otherwise, and stay so through ``load_state_dict``. The step count is per group, as in the original.

**Many small tensors.** Python's time is that of passes over the lists, 3 to 17 us for 148 tensors
each. So a step goes over its lists by functions written in C, opens no frame for a tensor, and asks
for nothing twice (:mod:`apex.optimizers._step`).

What is refused, and the words for it, are in :mod:`apex.optimizers._checks`; checkpoints in
:mod:`apex.optimizers._checkpoint`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch.amp.grad_scaler import OptState

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.clip import clipped
from apex.ops.lists.overlaps import own_copies, write_back
from apex.ops.lists.placements import is_sharded
from apex.ops.lists.stages import Kind, Stages, finish, finish_on_shards
from apex.ops.lists.storage import AUTO, PLAIN, STORAGES, ScaledStep, StepOptions, storage_of
from apex.ops.lists.tensor_lists import Scalar, TensorColumn
from apex.optimizers import _checkpoint, _checks
from apex.optimizers import _eight_bit as eight_bit
from apex.optimizers._lost import PLAIN_BY_DEFAULT, LostWatch, Sample
from apex.optimizers._packed import packed
from apex.optimizers._step import (
    Given,
    GroupGrads,
    Launch,
    collected,
    count_steps,
    counted,
    dither,
    gradients_of,
    launches_of,
    quantized,
    read,
    scalar,
    with_own,
)
from apex.optimizers._stepped import Written
from apex.optimizers._written import extra_key, follow_written, versions
from apex.optimizers._zero import Partition, partition

_IS_UNIFORM = attrgetter("is_uniform")


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of the fused optimizers. Each of them accepts the arguments in its signature.

    Args:
        params: Parameters, named parameters or groups. You can mix 16-bit, float32 and float64.
        lr: Learning rate. A tensor is read on its device.
        betas: Decays of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay. A tensor is read on its device.
        bias_correction: Whether to correct the moments for their start at 0.
        grad_averaging: Whether the first moment adds a gradient times ``1 - beta1``, or times 1.
        max_grad_norm: Largest norm of all gradients together. It covers all ranks with DTensors and
            in torch's ``ZeroRedundancyOptimizer``. 0 turns clipping off.
        amsgrad: Not supported. It exists because callers pass ``False``.
        set_grad_none: Has no effect; kept from the original.
        storage: How weights are stored. With ``"plain"``, the default, small updates of bfloat16
            weights round away. If you do not pass ``storage``, a warning after ten steps tells you
            if a fifth of the updates is lost. For bfloat16 parameters you can pass ``"low_bits"``
            (bit-equal to float32 masters, 4 bytes per weight instead of 6), ``"kahan"`` or
            ``"stochastic"``. ``"auto"`` means ``"low_bits"`` for bfloat16 parameters and
            ``"plain"`` for others, and loads the states of both.
        state: How moments are stored. ``"8bit"`` stores the moments of tensors with at least 2
            dimensions and 4,096 elements in 8 bits, about 1.02 bytes each. ``"bfloat16"`` stores
            all moments in bfloat16, with stochastic rounding. The moments of float64 parameters
            stay float64.
        defaults: For this base class only: values of the group's numbers.

    Raises:
        ValueError: There are no parameters, a group has an unknown key, or a number is out of
            range.
        RuntimeError: ``amsgrad`` is set; or a parameter is not a dense float16, bfloat16, float32
            or float64 tensor, has the negative bit, or is a ``Partial`` DTensor.
    """

    # -- what a subclass says of itself ------------------------------------------------------------

    # How one launch is stepped, and the type of the numbers of that.
    _algorithm: Callable[[Any, Any, StepOptions], Stages | None]
    _numbers: Any

    #: Names of the state slots, in the order of the update.
    slots: tuple[str, ...] = ()
    #: Slots that are kept in the parameter's dtype, as the original does.
    narrow_slots: tuple[str, ...] = ()
    #: Shapes of slots that are not shaped like the weight, as functions of the parameter.
    slot_shapes: ClassVar[Mapping[str, Callable[[torch.Tensor], Sequence[int]]]] = {}
    #: Keys of the per-parameter state that are not slots.
    _more_state: tuple[str, ...] = ("master_param", "low_bits", "error")
    #: Numbers of a group that the optimizer of this name in torch.optim does not have.
    _not_in_torch: tuple[str, ...] = ()
    #: Keys of groups that other optimizers know, and that change what is computed.
    _refused_keys: tuple[str, ...] = ("amsgrad", "maximize")
    #: Whether loaded slots keep the dtype they were saved in, instead of getting a new slot's.
    _keeps_saved_dtypes = False
    #: Whether groups have a "step".
    _counts_steps = True
    #: Whether groups have ``lr`` and ``step`` as tensors on the device, for CUDA graphs.
    _on_device = False
    #: dtypes of the parameters that get float32 masters.
    _mastered: frozenset[torch.dtype] = frozenset()
    #: Whether a step writes into gradients something that differs from weight to weight.
    _writes_grads = False
    #: Where arguments of ``step`` that are no longer taken still are, for the message.
    _takes_arguments = ""
    #: Whether groups of equal numbers share launches: not where a group has tensors of its own.
    _joins_groups = True

    # What optimizers that an older Apex pickled whole may lack.
    storage = "plain"
    set_grad_none = True
    #: While it is looked at whether bfloat16 weights lose their updates.
    _lost: LostWatch | None = None
    #: The argument ``state``: the name is that of torch's dictionary.
    _state_form = "plain"

    # If True, torch's GradScaler leaves unscaling and the skip to the step. Programs react to it:
    # Lightning refuses to clip, and accelerate takes a skipped step for one that was taken.
    _step_supports_amp_scaling = False
    # Set where a ZeroRedundancyOptimizer has given other ranks the other parameters.
    _partition: Partition | None = None
    # Addresses and sizes of gradients that share no memory with each other, of the last step.
    _apart: tuple[Any, Any] = (None, None)

    # -- construction ------------------------------------------------------------------------------

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        set_grad_none: bool = True,
        storage: str = PLAIN_BY_DEFAULT,
        amsgrad: bool = False,
        state: str = "plain",
    ) -> None:
        if amsgrad:
            raise RuntimeError(
                f"{self._name} does not support the AMSGrad variant; leave amsgrad=False."
            )
        private.need("FusedOptimizer")
        self.set_grad_none = set_grad_none
        self._partition = partition()
        _checks.choice(self._name, "storage", storage, (*STORAGES, AUTO))
        _checks.choice(self._name, "state", state, eight_bit.STATES)
        self.storage, self._state_form = str(storage), state
        if state == "bfloat16":
            self._counts_steps = True  # its random bits are those of the step
        is_chosen = storage is not PLAIN_BY_DEFAULT or torch.bfloat16 in self._mastered
        self._lost = None if is_chosen else LostWatch()
        super().__init__(params, defaults)

    @property
    def _name(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @functools.cached_property
    def _dummy_overflow_buf(self) -> torch.Tensor:
        """The flag that subclasses with a step of their own hand to ``multi_tensor_applier``."""
        devices = [param.device for group in self.param_groups for param in group["params"][:1]]
        return torch.zeros(1, dtype=torch.int32, device=devices[0] if devices else "cpu")

    @functools.cached_property
    def _written(self) -> Written:
        """Of parameters their versions at the last step, and what is stored beside them."""
        return []

    def __getstate__(self) -> dict[str, Any]:
        self._follow_written()
        state: dict[str, Any] = super().__getstate__()
        return {**_checkpoint.copied(self), **state}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check a parameter group and add it.

        If the group contains a parameter several times, it is stepped once, and torch warns. The
        group may have additional keys of your own.

        Raises:
            ValueError: A key is misspelt or belongs to another optimizer or to the constructor, or
                a number is out of range.
            RuntimeError: The optimizer cannot step a parameter.
            TypeError: A parameter is a nested tensor.
        """
        if isinstance(param_group, dict):
            self._check_keys(param_group)
            if "params" in param_group:
                if not isinstance(param_group["params"], torch.Tensor | set):
                    param_group = {**param_group, "params": list(param_group["params"])}
                self._check_params(param_group["params"])
            self._check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        first = {id(p): place for place, p in reversed([*enumerate(group["params"])])}
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][place] for place in sorted(first.values())]
        self._prepare(group)

    def _prepare(self, group: dict[str, Any]) -> None:
        """Make ``lr`` and ``step`` tensors where the group's parameters are, if they are to be."""
        if self._on_device and group["params"]:
            device = group["params"][0].device
            lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            step = torch.as_tensor(group.get("step", 0), dtype=torch.int32, device=device)
            group["lr"] = lr.detach().clone().reshape(())
            group["step"] = step.detach().clone().reshape(1)

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments that hold for all groups; each is an attribute."""
        return _checks.arguments(self)

    def _check_keys(self, group: Mapping[str, Any]) -> None:
        _checks.keys(self, group)

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        _checks.numbers(self._name, group)

    def _check_params(self, params: Any) -> None:
        _checks.params(self, params)

    # -- the step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **historic: Any) -> Any:
        """Take one step.

        Args:
            closure: Function that evaluates the loss again.
            **historic: ``grad_scaler``, the ``torch.amp.GradScaler`` that calls the step. The
                original's other old arguments raise ``RuntimeError``.

        Returns:
            What ``closure`` returned, or ``None`` without a closure.

        Raises:
            KeyError: A number was deleted from a group.
            RuntimeError: A gradient is sparse, complex, or a DTensor on another mesh than its
                parameter; ``storage`` does not support a parameter's dtype; or you passed an
                argument that is no longer supported.
        """
        return self._stepped(closure, historic)

    def _stepped(self, closure: Callable[[], Any] | None, historic: dict[str, Any]) -> Any:
        """Do what ``step`` does: torch replaces that with one that runs the user's hooks."""
        scaler = None
        if historic:
            scaler = historic.pop("grad_scaler", None)
            if not all(map(is_, historic.values(), repeat(None))):
                _checks.step_arguments(self._name, historic, self._takes_arguments)
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
        if noop is not None and not isinstance(noop, torch.Tensor):
            noop = None  # GradScaler's sum over the devices of no gradients: the integer 0
        if scaler is not None and scaler.is_enabled():
            private.need("GradScaler")
            noop = self._found_inf(scaler)
            unscaled = scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED
            grad_scale = None if unscaled else scaler._get_scale_async()
        if grad_scale is None:
            self.step_scaled(1.0, noop)
        else:
            self.step_scaled(grad_scale.reciprocal().float(), noop, write_grads=True)
        return loss

    def _found_inf(self, scaler: Any) -> torch.Tensor | None:
        found = list(scaler._check_inf_per_device(self).values())
        if not found:
            return None
        first: torch.Tensor = found[0]
        return sum((x.to(first.device, non_blocking=True) for x in found[1:]), start=first)

    @_runtime.not_compiled
    def step_scaled(
        self,
        factor: Scalar = 1.0,
        noop: torch.Tensor | None = None,
        *,
        write_grads: bool = False,
        copies: Given = None,
        grads: Given = None,
    ) -> None:
        """Take one step on gradients that are still scaled.

        Args:
            factor: Factor for the gradients: 1 / loss scale, times a clipping coefficient. A
                one-element tensor is read on the device.
            noop: One-element tensor. The step is skipped if it is not 0.
            write_grads: Whether to multiply the gradients themselves by ``factor``, except for
                inference tensors.
            copies: 16-bit weights that also receive the new values, by parameter.
            grads: Gradients to use instead of ``param.grad``, by parameter.
        """
        vars(self).pop("_scaled_step", None)  # where Dynamo traces _stepped, its pop is lost
        self._take_step(factor, noop, write_grads, copies, grads)

    def _take_step(
        self, factor: Scalar, noop: torch.Tensor | None, write: bool, copies: Given, grads: Given
    ) -> None:
        """Take one step: what subclasses override, within what the compiler does not see."""
        if not all(map(self.defaults.keys().__le__, map(dict.keys, self.param_groups))):
            _checks.complete(self)
        if noop is not None or type(factor) is not float:
            factor, noop, is_skipped = read(factor, noop)
            if is_skipped:
                return
        with torch.no_grad():
            found = gradients_of(self, grads)
            if self.storage != "plain":  # all checks before anything changes
                _checks.stored(self, [param for one in found.active for param in one.params])
            gradients = found.gradients
            # Checks each part before it makes what is missing of its state.
            together, parts = collected(self, found, noop, copies)
            copied = self._own_copies(gradients) if write or self._writes_grads else {}
            if copied:
                found = with_own(found, copied)
                together, parts = collected(self, found, noop, copies)
            if self._written:
                follow_written(self)
            self._prepare_step(found.active, factor, noop)
            plain = isinstance(gradients, TensorColumn)
            sharded = [] if plain else [*filter(is_sharded, found.every)]
            samples = None if self._lost is None else self._lost.before(found.active)
            if largest := self._largest_norm():
                over, partition = sharded and found.every, self._partition
                factor = clipped(gradients, factor, largest, over=over, partition=partition)
            storage = STORAGES.get(self.storage, PLAIN)  # "auto" chooses for each launch
            options = StepOptions(factor, noop, write, storage, None, all(map(_IS_UNIFORM, parts)))
            launches = chain.from_iterable(map(launches_of, parts))
            self._finish(self._updates(together, launches, options), sharded)
            if copied and not self._writes_grads:
                write_back(gradients, copied)
            self._note(samples, noop)

    def _own_copies(self, gradients: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies of gradients that an update must not write into, by position."""
        if not (isinstance(gradients, TensorColumn) and gradients.is_uniform):
            return own_copies(gradients)
        # The sizes are the same object as long as the metadata are the same.
        addresses, numels = gradients.addresses(), gradients.numels()
        before, sizes = self._apart
        if sizes is numels and (before is addresses or before == addresses):
            return {}
        copied = own_copies(gradients)
        self._apart = (None, None) if copied else (addresses, numels)
        return copied

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
        counters = None
        if self._counts_steps:
            elsewhere = self._partition and self._partition.device
            counters = count_steps(self._counted_groups(), options.noop, elsewhere)
        is_known = options.noop is None and type(options.factor) is float
        for number, launch in launches:
            here = options if is_known else options.on(launch.device)
            if self.storage == AUTO:
                here = here._replace(storage=storage_of(AUTO, launch.columns[1][0].dtype))
            if launch.extra is not None:
                here = here._replace(extra=launch.extra)
            group = together[number][0].group
            if self._state_form == "8bit":
                here = here._replace(quantized=quantized(self, launch, self._slots_of(group)))
            elif self._state_form == "bfloat16":
                here = here._replace(dither=dither(launch, self._slots_of(group), group["step"]))
            if counters is not None and isinstance(group.get("step"), torch.Tensor):
                group = counted(together[number], launch, counters)
            yield launch.params, self._update(group, launch, here)

    # -- the state of a parameter ------------------------------------------------------------------

    def _stepped_slots(self) -> tuple[str, ...]:
        """The slots that a step needs now."""
        return self.slots

    def _slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The slots that a step needs of a group's parameters."""
        return self._stepped_slots()

    def _slot_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        narrow = slot in self.narrow_slots and storage_of(self.storage, param.dtype) is PLAIN
        narrow = narrow and self._state_form == "plain"
        return param.dtype if narrow else torch.promote_types(param.dtype, torch.float32)

    def _kept_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        """The dtype of a slot that is not quantised to 8 bits."""
        if self._state_form == "bfloat16" and slot in eight_bit.CODES:
            return param.dtype if param.dtype == torch.float64 else torch.bfloat16
        return self._slot_dtype(slot, param)

    def _new_slot(self, slot: str, param: torch.Tensor) -> torch.Tensor:
        dtype = self._kept_dtype(slot, param)
        if slot in self.slot_shapes:
            return param.new_zeros(self.slot_shapes[slot](param), dtype=dtype)
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _is_quantized(self, slot: str, param: torch.Tensor) -> bool:
        """Whether a slot of a parameter is quantised to 8 bits."""
        return self._state_form == "8bit" and slot in eight_bit.CODES and eight_bit.is_held(param)

    def _entries(
        self, slot: str, value: torch.Tensor, param: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What the state has for a slot of this value."""
        return (
            eight_bit.quantized(value, slot) if self._is_quantized(slot, param) else {slot: value}
        )

    def _states_of(
        self, params: Sequence[torch.Tensor], slots: tuple[str, ...]
    ) -> list[dict[str, Any]]:
        """The states of parameters; what is missing is made."""
        return [*map(self._state_of, params, repeat(slots))]

    def _state_of(
        self, param: torch.Tensor, slots: tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        for slot in self._stepped_slots() if slots is None else slots:
            if slot not in state and not eight_bit.is_code(state, slot):
                _checks.made_in_capture(self._name, slot)
                state.update(self._entries(slot, self._new_slot(slot, param), param))
        storage = storage_of(self.storage, param.dtype)
        if storage.column is not None and storage.column not in state:
            _checks.made_in_capture(self._name, storage.column)
            state[storage.column] = torch.zeros_like(param, dtype=storage.extra)
        return state

    def _master_or(self, param: torch.Tensor) -> torch.Tensor:
        """The parameter's master, made now if it is to have one; else the parameter."""
        state = self.state.get(param, {})
        if "master_param" not in state and param.dtype in self._mastered:
            _checks.made_in_capture(self._name, "master_param")
            state = self.state[param]
            master = state["master_param"] = param.detach().clone().float()
            self._written.append((param, param._version, master))
            return master
        found: torch.Tensor = state.get("master_param", param)
        return found

    def _follow_written(self) -> None:
        """Let what belongs to a weight follow if somebody else has written it since our last step.

        The storage's column becomes 0. A master becomes the weight where it would not be rounded to
        it. Right after loading nothing is done: model and optimizer are loaded in any order.
        """
        if self._written:
            follow_written(self)

    def _note(self, samples: list[Sample] | None, noop: torch.Tensor | None) -> None:
        """Note what a later step looks at.

        That is the weights' versions, which tell whether somebody else writes them, or, in the
        first steps, how many updates bfloat16 weights have lost.
        """
        if self._mastered or extra_key(self):
            self._written = versions(self)
        elif self._lost is not None and not self._lost.counts(samples, noop, self._name):
            self._lost = None

    # -- what an algorithm does --------------------------------------------------------------------

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
        device = launch.columns[1][0].device
        return self._algorithm(launch.columns, self._numbers_of(group, device), options)

    def _numbers_of(self, group: Mapping[str, Any], device: torch.device, kind: Any = None) -> Any:
        """The numbers of a step: of the group, else attributes of the optimizer."""
        kind, shared = kind or self._numbers, self.defaults
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        found = {"step": group.get("step"), "beta1": beta1, "beta2": beta2}
        for key in ("lr", "weight_decay"):
            value = group[key]
            found[key] = float(value) if type(value) in (float, int) else scalar(value, device)
        for name in kind.__match_args__:
            if name not in found:
                found[name] = group[name] if name in shared else getattr(self, name)
        return kind(*map(found.get, kind.__match_args__))

    def _counted_groups(self) -> Sequence[dict[str, Any]]:
        """The groups that have a "step"."""
        return self.param_groups

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form that torch saves."""
        self._follow_written()
        saved = _checkpoint.with_steps(self, super().state_dict())
        return packed(self, saved) if self.storage == AUTO else saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the corresponding optimizer of ``torch.optim``.

        Moments keep the dtype in which they were saved; torch would round them to the parameter's
        dtype. Moments saved in 8 bits become float32 if this optimizer does not use
        ``state="8bit"``, and vice versa.

        Raises:
            ValueError: The groups do not match, or this optimizer lacks a feature of the state.
        """
        _checkpoint.load(self, state_dict, super().load_state_dict)

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a state that the corresponding optimizer of ``torch.optim`` can load.

        Returns:
            A state dict with a step count for each parameter. Moments stay float32, but torch
            rounds them to a 16-bit parameter's dtype when it loads them.
        """
        return _checkpoint.to_torch(self)

    def _from_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return _checkpoint.from_torch(self, state_dict)

    def _check_loaded(self, loaded: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        _checkpoint.check_loaded(self, loaded, groups)

    def _restore(self, loaded: dict[str, Any]) -> None:
        _checkpoint.restore(self, loaded)

    def _torch_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state for ``torch.optim``."""
        return state

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group for ``torch.optim``."""
        raise NotImplementedError(f"torch.optim has no {self._name}.")
