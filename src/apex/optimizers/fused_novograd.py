"""``FusedNovoGrad``: NovoGrad in a few launches, its norms kept on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, ClassVar

import torch

from apex.multi_tensor_apply import list_functions
from apex.ops.lists.stages import Kind
from apex.ops.lists.tensor_lists import OWN_MEMORY, as_vector, grouped, local_parts
from apex.ops.updates.novograd import UNSET, NovoGrad, kind_of, novograd_stages
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._checkpoint import saved_states
from apex.optimizers._eight_bit import is_code
from apex.optimizers._lost import PLAIN_BY_DEFAULT

# The order of the vectors in a group's "exp_avg_sq"; the first two are always there.
KINDS = (torch.float16, torch.float32, torch.bfloat16, torch.float64)


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: Adam with a single second moment, a norm, for each tensor.

    The docstring of :mod:`apex.ops.updates.novograd` has the formula. Moments have the parameter's
    dtype, as in the original, or float32 with a ``storage`` other than ``"plain"``.

    The state of a parameter holds its norm (not the square) as ``"norm"``. As in the original,
    ``group["exp_avg_sq"]`` lists these norms in float32 vectors: one for the float16 parameters
    that were stepped so far, one for the float32 ones, and two more if a group has bfloat16 or
    float64 parameters. A step writes into these vectors. If the norms are not contiguous in memory,
    for example because a parameter was added later, each step makes new copies instead. Checkpoints
    contain the norms in the groups only.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups.
        betas: Decays of the moment and of the norm.
        eps: Added to the corrected norm.
        reg_inside_moment: Add weight decay to the gradient that enters the moment, instead of to
            the update.
        norm_type: 2, or 0 for the largest magnitude.
        init_zero: Start norms at 0, instead of at the first gradient's norm.

    Raises:
        RuntimeError: ``norm_type`` is neither 2 nor 0.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedNovoGrad(model.parameters(), lr=0.01, betas=(0.95, 0.98))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    slots = ("exp_avg", "norm")
    slot_shapes: ClassVar[dict[str, Any]] = {"norm": lambda param: ()}
    narrow_slots = ("exp_avg",)
    reg_inside_moment, moment_mode = False, 1
    # What groups show since the norms were looked at last: the lists, and the tensors in them.
    _shown: Sequence[Any] = ()
    _algorithm, _numbers = staticmethod(novograd_stages), NovoGrad
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
        storage: str = PLAIN_BY_DEFAULT,
        state: str = "plain",
    ) -> None:
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "grad_averaging": grad_averaging,
            "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        self.reg_inside_moment = bool(reg_inside_moment)
        self.moment_mode = 0 if reg_inside_moment else 1
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, amsgrad=amsgrad,
            state=state,
        )  # fmt: skip

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        super()._check_numbers(group)
        if group["norm_type"] not in (0, 2):
            raise RuntimeError(
                "FusedNovoGrad only support l2/inf norm now: norm_type was "
                f"{group['norm_type']!r}; allowed are 2 and 0 (the largest magnitude)."
            )

    def _kinds(self) -> set[Kind]:
        return {kind_of(group["norm_type"]) for group in self.param_groups}

    # -- copies and pickles ------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._show_norms()
        found: dict[str, Any] = super().__getstate__()
        states = found["state"].copy()
        for param, state in states.items():  # views of a vector, which pickle would write for each
            if isinstance(state, dict) and "norm" in state:
                states[param] = {**state, "norm": state["norm"].clone()}
        return {**found, "state": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "defaults" not in state:  # load_state_dict, see _restore
            return
        for group in self.param_groups:
            if not any("norm" in self.state.get(param, {}) for param in group["params"]):
                # NVIDIA's have norms in their groups alone
                _split_norms(group, self.state, {param: param.dtype for param in group["params"]})
        self._join_kept_norms()

    # -- the norms ---------------------------------------------------------------------------------

    def _slot_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        return torch.float32 if slot == "norm" else super()._slot_dtype(slot, param)

    def _new_slot(self, slot: str, param: torch.Tensor) -> torch.Tensor:
        found = super()._new_slot(slot, param)
        return found.fill_(UNSET) if slot == "norm" else found

    def _states_of(
        self, params: Sequence[torch.Tensor], slots: tuple[str, ...]
    ) -> list[dict[str, Any]]:
        self._join_norms([param for param in params if "norm" not in self.state[param]])
        return super()._states_of(params, slots)

    def _join_norms(self, params: Iterable[torch.Tensor]) -> None:
        """Put the norms of parameters of one dtype into one vector, of which they become views.

        A step copies others to a vector and back. Where a CUDA graph may have been captured, only
        new norms can be joined: the graph reads the others where they are.
        """
        plain = [param for param in params if type(param) in OWN_MEMORY]
        for _, (some,), _ in grouped([plain]) if plain else ():
            norms = torch.stack([self._state_of(param, ("norm",))["norm"] for param in some])
            for param, norm in zip(some, norms.unbind(), strict=True):
                self.state[param]["norm"] = norm

    def _join_kept_norms(self) -> None:
        every = [param for group in self.param_groups for param in group["params"]]
        self._join_norms(param for param in every if "norm" in self.state.get(param, {}))

    def _take_step(self, *arguments: Any) -> None:
        if self._partition is not None:  # loading, it puts what has no dimensions on the CPU
            for param, state in self.state.items():
                if "norm" in state:
                    state["norm"] = state["norm"].to(param.device)
        super()._take_step(*arguments)
        seen, before = self._seen(), self._shown
        if len(seen) != len(before) or not all(map(is_, seen, before)):
            self._show_norms()

    def _seen(self) -> list[Any]:
        """What groups have under "exp_avg_sq", and the norms of all states."""
        shown = [group.get("exp_avg_sq", ()) for group in self.param_groups]
        states = self.state.values()
        try:
            norms = [*map(itemgetter("norm"), states)]
        except (KeyError, TypeError, IndexError):  # a parameter has none, or a program's own
            norms = [state.get("norm") for state in states if isinstance(state, dict)]
        return [*shown, *chain(*shown), *norms]

    def _show_norms(self) -> None:
        """Have the groups show the norms, where the original has them."""
        are_shared = True
        for group in self.param_groups:
            norms: dict[torch.dtype, list[torch.Tensor]] = {kind: [] for kind in KINDS}
            states = [self.state.get(param, {}) for param in group["params"]]
            for param, state in zip(group["params"], states, strict=True):
                if "norm" in state:
                    norms[param.dtype].append(state["norm"])
            kinds = KINDS if norms[KINDS[2]] or norms[KINDS[3]] else KINDS[:2]
            if any(norms.values()):
                device = group["params"][0].device
                group["exp_avg_sq"] = [_vector(norms[kind], device) for kind in kinds]
                both = zip(group["exp_avg_sq"], map(norms.__getitem__, kinds), strict=True)
                are_shared = are_shared and all(_shares(*each) for each in both)
            elif not any(map(_is_begun, states)):  # the state was cleared
                group.pop("exp_avg_sq", None)
        self._shown = self._seen() if are_shared else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form that torch saves, with norms in the groups.

        In a ``ZeroRedundancyOptimizer`` the parameters' states contain the norms too.
        """
        self._show_norms()
        saved = super().state_dict()
        if self._partition is not None:
            return saved
        for number, state in saved["state"].items():
            if isinstance(state, dict) and "norm" in state:
                saved["state"][number] = {key: x for key, x in state.items() if key != "norm"}
        return saved

    def _from_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give each parameter its norm: by dtype, or in order if those saved have one dtype."""
        found = super()._from_torch(state_dict)
        dtypes = {number: param.dtype for number, param, _ in saved_states(self, found)}
        for group in found["param_groups"]:
            _split_norms(group, found["state"], dtypes)
            group.pop("exp_avg_sq", None)
        return found

    def _restore(self, loaded: dict[str, Any]) -> None:
        super()._restore(loaded)
        self._join_kept_norms()
        self._show_norms()


def _vector(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A vector of norms that may be anywhere: their own memory, if that is one piece there."""
    if not norms:
        return torch.zeros(0, dtype=torch.float32, device=device)
    norms = local_parts(norms)
    if any(norm.device != device for norm in norms):
        norms = [norm.to(device, non_blocking=True) for norm in norms]
    return as_vector(norms)


def _shares(vector: torch.Tensor, norms: Sequence[torch.Tensor]) -> bool:
    """Whether a vector of :func:`_vector` is the memory of the norms."""
    return not norms or vector.data_ptr() == local_parts(norms)[0].data_ptr()


def _is_begun(state: Mapping[str, Any]) -> bool:
    return "exp_avg" in state or is_code(state, "exp_avg")


def _split_norms(
    group: dict[str, Any], states: Mapping[Any, Any], dtypes: Mapping[Any, torch.dtype]
) -> None:
    """Give the states of parameters the norms that their group has, if it has any."""
    numbers = [n for n in group["params"] if _is_begun(states.get(n, {}))]
    vectors = dict(zip(KINDS, group.get("exp_avg_sq", ()), strict=False))
    filled = {kind: norms for kind, norms in vectors.items() if norms.numel()}
    kept = {kind: [n for n in numbers if dtypes.get(n) == kind] for kind in KINDS}
    if len(filled) == 1:
        kept = dict.fromkeys(filled, numbers)
    none = torch.zeros(0, device="cpu", dtype=torch.float32)
    for kind in kept if filled else ():
        norms, mine = vectors.get(kind, none), kept[kind]
        if norms.numel() != len(mine):
            raise ValueError(
                f'FusedNovoGrad: a saved group\'s "exp_avg_sq" has {norms.numel()} norms of '
                f'{kind} parameters, and {len(mine)} of its parameters have an "exp_avg". Load a '
                "complete state into a model of the same dtypes."
            )
        for number, norm in zip(mine, norms.unbind(), strict=True):
            states[number]["norm"] = norm
