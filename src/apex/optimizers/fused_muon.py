"""``FusedMuon``: Muon for matrices, and AdamW for everything else, on one device and on shards.

A group is stepped by one algorithm, its ``"algorithm"``. Of a group that names none, a rule picks
the matrices, and a group that has both kinds becomes two. The state is thus what each algorithm
keeps: one tensor for a matrix, two for others.

Matrices are stepped when the launches of the base are through, in batches that go through the three
parts of :mod:`apex.ops.updates.muon`: so the directions of all need not be in memory at once, and
matrices of different launches are stacked and travel together
(:mod:`apex.optimizers._muon_shards`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from apex.ops.lists.placements import is_sharded
from apex.ops.lists.stages import Stages
from apex.ops.lists.storage import StepOptions
from apex.ops.lists.tensor_lists import Scalar, local
from apex.ops.updates.adam import Adam, adam_
from apex.ops.updates.muon import ALGORITHMS, Muon, begin_, finish_
from apex.ops.updates.newton_schulz import JORDAN, NAMED
from apex.optimizers import _muon_groups
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._checks import tensors_of
from apex.optimizers._lost import PLAIN_BY_DEFAULT
from apex.optimizers._muon_shards import Batch, Matrix, legs, orthogonalize, planned
from apex.optimizers._step import GroupGrads, Launch

SLOTS = {"muon": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}
ADJUSTMENTS = (None, "original", "match_rms_adamw")

Rule = Callable[[str | None, torch.Tensor], bool]


class _Waiting(NamedTuple):
    """Matrices that are stepped when the others are through."""

    launch: Launch
    hyper: Muon
    options: StepOptions

    def at(self, positions: Sequence[int]) -> _Waiting:
        """Some of them."""
        params, *columns = (
            [column[n] for n in positions] for column in (self.launch.params, *self.launch.columns)
        )
        extra, quantized = self.options.extra, self.options.quantized
        options = self.options._replace(
            extra=extra and [extra[n] for n in positions],
            quantized=tuple(
                one._replace(absmax=[one.absmax[n] for n in positions]) for one in quantized
            ),
        )
        return _Waiting(Launch(params, columns), self.hyper, options)


class FusedMuon(FusedOptimizer):
    """Muon: each matrix moves by its orthogonalised momentum. AdamW steps everything else.

    Drop-in for :class:`torch.optim.Muon`, with the same numbers. In addition it steps all other
    parameters of a model, stacks of matrices (3-D), convolutions and sharded parameters. The
    docstring of :mod:`apex.ops.updates.muon` has the formula. Momentum of 16-bit parameters is
    float32.

    **Matrices.** Muon steps parameters with 2 or 3 dimensions. One with 3 dimensions, such as the
    experts of a layer, is a stack of matrices; each is orthogonalised separately. The weight of a
    ``Conv1d`` has 3 dimensions but is not a stack; see ``flatten``.

    **Embeddings and output layers.** They have 2 dimensions too, but Adam is better for them.
    :meth:`groups_for` makes the right groups from the modules of a model. Otherwise pass
    ``is_matrix``, or groups with ``"algorithm": "adam"``. The constructor warns if the name of a
    named parameter looks like one of these layers; it cannot warn about plain tensors. If a group
    contains parameters for both algorithms, it becomes two groups.

    **Sharded parameters** (``fully_shard``, ``parallelize_module``). Each one is collected on one
    rank, which orthogonalises it. For replicated parameters each rank does so itself. All ranks of
    a mesh must call ``step``, and must skip the same steps, as they do with :mod:`apex.amp`.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters, named parameters or groups. A group may have its own ``"algorithm"``
            (``"muon"`` or ``"adam"``), ``lr``, ``eps``, ``weight_decay``, ``split`` and
            ``flatten``.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Decay of the momentum, at least 0 and below 1.
        nesterov: Whether to use Nesterov's momentum.
        ns_coefficients: Coefficients of the Newton-Schulz iteration: three numbers, ``"quintic"``
            for the default ones, or ``"polar_express"``, which differ from iteration to iteration
            (arXiv:2505.16932).
        eps: Smallest norm that a direction is divided by.
        ns_steps: Number of iterations, at most 99.
        adjust_lr_fn: Factor of ``lr`` for a matrix of A rows and B columns. ``"original"`` or
            ``None`` is ``sqrt(max(1, A / B))``. ``"match_rms_adamw"`` is
            ``0.2 * sqrt(max(A, B))``; use it with the ``lr`` and ``weight_decay`` of AdamW.
        flatten: Step parameters of 3 or more dimensions, such as those of convolutions, as matrices
            of ``shape[0]`` rows. By default Adam steps those of 4 or more dimensions.
        split: Number of blocks of rows of each matrix that are orthogonalised separately. Use 3 for
            fused weights of query, key and value, or three times the number of heads to separate
            heads too. ``adjust_lr_fn`` then uses the shape of a block.
        is_matrix: Function ``(name or None, parameter) -> bool`` that replaces the rule above. It
            is called once for each parameter. Only named parameters have a name.
        adam_lr: ``lr`` for groups that Adam steps and that have no ``lr``; ``None`` means ``lr``.
        adam_weight_decay: The same for ``weight_decay``.
        adam_eps: ``eps`` for groups that Adam steps and that have no ``eps``.
        betas: Decays of Adam's moments.
        iteration_dtype: ``torch.bfloat16``, or ``torch.float32`` for products in float32 (float64
            for float64 parameters).
        ns_algorithm: ``"standard_newton_schulz"``, or ``"gram_newton_schulz"`` to iterate on Gram
            matrices where that needs fewer multiplications. With the default number of iterations
            it does so if the long side is more than 1.5 times the short one. It rounds differently,
            and has not been timed on a GPU.

    Raises:
        ValueError: A number is out of range, or Muon cannot step or split a parameter; or as in the
            base class.
        RuntimeError: A parameter is sharded in a way that cannot be collected; or as in the base
            class.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9)
        ... )
        >>> groups = FusedMuon.groups_for(model, outputs=["2"])
        >>> optimizer = FusedMuon(groups, lr=0.02, adam_lr=1e-3, weight_decay=0.01)
        >>> [(group["algorithm"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 1), ('adam', 4)]
        >>> model(torch.arange(3)).sum().backward()
        >>> optimizer.step()
    """

    slots = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    adam_w_mode, bias_correction, eps_inside_sqrt = True, True, False
    is_matrix: Rule | None = None
    iteration_dtype = torch.bfloat16
    ns_algorithm = "standard_newton_schulz"
    adam_lr: float | torch.Tensor | None = None
    adam_weight_decay: float | torch.Tensor | None = None
    adam_eps = 1e-8
    split = 1
    _waiting: list[_Waiting]
    _not_in_torch = ("algorithm", "betas", "flatten", "split")

    def __init__(  # noqa: PLR0913 - torch's, and Adam's
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float | torch.Tensor = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | tuple[float, float, float] = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        flatten: bool = False,
        split: int = 1,
        is_matrix: Rule | None = None,
        adam_lr: float | torch.Tensor | None = None,
        adam_weight_decay: float | torch.Tensor | None = None,
        adam_eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.95),
        iteration_dtype: torch.dtype = torch.bfloat16,
        ns_algorithm: str = "standard_newton_schulz",
        set_grad_none: bool = True,
        storage: str = PLAIN_BY_DEFAULT,
        state: str = "plain",
    ) -> None:
        if iteration_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"FusedMuon: iteration_dtype was {iteration_dtype}; allowed are torch.bfloat16 and "
                "torch.float32."
            )
        if ns_algorithm not in ALGORITHMS:
            allowed = " and ".join(map(repr, ALGORITHMS))
            raise ValueError(
                f"FusedMuon: ns_algorithm was {ns_algorithm!r}; allowed are {allowed}."
            )
        if is_matrix is not None and not callable(is_matrix):
            raise TypeError(
                f"FusedMuon: is_matrix was {is_matrix!r}; pass a function whose arguments are a "
                "name (or None) and a parameter."
            )
        self.is_matrix, self.iteration_dtype = is_matrix, iteration_dtype
        self.ns_algorithm = ns_algorithm
        self.adam_lr, self.adam_weight_decay = adam_lr, adam_weight_decay
        self.adam_eps = adam_eps
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "flatten": flatten, "split": split, "betas": betas,
            "algorithm": "muon",
        }  # fmt: skip
        self._check_numbers(defaults)
        self._check_numbers({**defaults, **self._of_adam()})
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, state=state
        )

    def __getstate__(self) -> dict[str, Any]:
        # The base leaves callables out, which may be methods that others have replaced.
        return {**super().__getstate__(), "is_matrix": self.is_matrix}

    # -- groups ------------------------------------------------------------------------------------

    @staticmethod
    def groups_for(
        model: torch.nn.Module,
        *,
        outputs: Iterable[str] | None = None,
        matrices: Iterable[str] = (),
    ) -> list[dict[str, Any]]:
        """Make the groups of a model: hidden matrices for Muon, everything else for Adam.

        Muon steps the weights of ``Linear`` and its subclasses, of transformers' ``Conv1D``, of
        apex's layers, of ``MultiheadAttention`` (split into query, key and value) and of recurrent
        layers (split into gates). Adam steps all other parameters, and weights that a hidden layer
        shares with an embedding or an output layer.

        Args:
            model: The model. Parameters that need no gradient are left out.
            outputs: Names of the model's output layers. By default these are the layer that
                ``get_output_embeddings()`` returns, layers that share the weight of an embedding,
                ``LinearCrossEntropyLoss`` modules, and layers with a name such as ``lm_head``.
            matrices: Names of further parameters that are matrices or stacks of them. They may be
                ``fnmatch`` patterns, such as ``"*.experts.*"``.

        Returns:
            Groups of named parameters to pass to the constructor.

        Raises:
            ValueError: A name or pattern matches nothing.

        Warns:
            UserWarning: You did not pass ``outputs``, and no output layer was found.
        """
        return _muon_groups.groups_for(model, outputs=outputs, matrices=matrices)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or two if it has matrices and other parameters."""
        before = len(self.param_groups)
        try:
            for part in self._parts(param_group):
                super().add_param_group(part)
        except Exception:
            del self.param_groups[before:]
            raise

    def _parts(self, group: Any) -> list[dict[str, Any]]:
        """A group as groups of one algorithm, in the order of their first parameters."""
        if not isinstance(group, dict) or isinstance(group.get("params", set()), set):
            return [group]  # torch's own error
        if self._partition is not None and not group.get("algorithm"):
            raise ValueError(
                "FusedMuon: ZeroRedundancyOptimizer needs the same groups on each rank, but "
                'FusedMuon may split a group without an "algorithm" in two. Pass groups, each with '
                "algorithm='muon' or algorithm='adam'."
            )
        params = group["params"]
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        tensors_of(self._name, listed)  # raises
        entries: dict[str, list[Any]] = {} if listed else {group.get("algorithm", "muon"): []}
        for entry in listed:
            name, param = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
            if not isinstance(param, torch.Tensor):
                return [{**group, "params": listed}]  # torch's own error
            flatten = bool(group.get("flatten", self.defaults["flatten"]))
            algorithm = group.get("algorithm") or self._chosen(name, param, flatten)
            split = group.get("split", self.defaults.get("split", 1))
            if algorithm == "muon" and not _has_matrices(param, flatten):
                raise ValueError(
                    f"FusedMuon: a parameter{f' ({name})' if name else ''} of shape "
                    f"{tuple(param.shape)} is in a group for Muon, which needs 2 dimensions, or 3 "
                    "for a stack of matrices (with flatten=True, 2 or more). To let Adam update "
                    "it, put it into a group with algorithm='adam', or let is_matrix return "
                    "False."
                )
            if algorithm == "muon":
                legs(param, flatten)  # raises
                rows = param.shape[0] if flatten else param.shape[-2]
                if type(split) is int and split > 0 and rows % split:
                    raise ValueError(
                        f"FusedMuon: a parameter{f' ({name})' if name else ''} of shape "
                        f"{tuple(param.shape)} has {rows} rows, which split={split} does not "
                        "divide. Put it into a group with another split."
                    )
            entries.setdefault(algorithm, []).append(entry)
        own = {
            key: value
            for key, value in self._of_adam().items()
            if key not in group or f"adam_{key}" in group
        }
        return [
            {**group, **(own if kind == "adam" else {}), "params": some, "algorithm": kind}
            for kind, some in entries.items()
        ]

    def _of_adam(self) -> dict[str, Any]:
        """The numbers of groups that Adam steps, where they differ from the others'."""
        own = {"lr": self.adam_lr, "weight_decay": self.adam_weight_decay, "eps": self.adam_eps}
        return {key: value for key, value in own.items() if value is not None}

    def _chosen(self, name: str | None, param: torch.Tensor, flatten: bool) -> str:
        rule = self.is_matrix
        chosen = _has_matrices(param, flatten) if rule is None else rule(name, param)
        if chosen and rule is None and name and _muon_groups.is_outer(name):
            warnings.warn(
                f"FusedMuon: {name} looks like an embedding or an output layer, for which Adam is "
                "better. Pass FusedMuon.groups_for(model), or choose with is_matrix=, which gives "
                "no warning.",
                stacklevel=2,
            )
        return "muon" if chosen else "adam"

    def _check_keys(self, group: Mapping[str, Any]) -> None:
        if "use_muon" in group:
            raise ValueError(
                f"FusedMuon: a group has use_muon={group['use_muon']!r}. Write algorithm='muon' or "
                "algorithm='adam'."
            )
        super()._check_keys(group)

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        super()._check_numbers(group)
        group = {**self.defaults, **group} if hasattr(self, "defaults") else group
        coefficients, steps = group["ns_coefficients"], group["ns_steps"]
        split = group.get("split", 1)  # a state of 1.0 has none
        is_listed = isinstance(coefficients, tuple | list) and len(coefficients) == 3
        is_named = isinstance(coefficients, str) and coefficients in NAMED
        for key, is_right, allowed in (
            ("algorithm", group["algorithm"] in SLOTS, "'muon' and 'adam'"),
            ("momentum", float(group["momentum"]) < 1, "numbers from 0 to below 1"),
            ("ns_coefficients", is_named or (
                is_listed and {*map(type, coefficients)} <= {int, float}
            ), f"three numbers, {', '.join(map(repr, NAMED))}"),
            ("split", type(split) is int and split > 0, "whole numbers from 1"),
            ("ns_steps", isinstance(steps, int) and 0 <= steps < 100, "whole numbers from 0 to 99"),
            ("adjust_lr_fn", group["adjust_lr_fn"] in ADJUSTMENTS,
             "None, 'original' and 'match_rms_adamw'"),
        ):  # fmt: skip
            if not is_right:
                raise ValueError(f"FusedMuon: {key} was {group[key]!r}; allowed are {allowed}.")

    # -- the step ----------------------------------------------------------------------------------

    def _slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return SLOTS[group["algorithm"]]

    def _counted_groups(self) -> Sequence[dict[str, Any]]:
        groups = self.param_groups
        if self._state_form == "bfloat16":  # the random bits of matrices need a step, too
            return groups
        return [group for group in groups if group["algorithm"] == "adam"]

    def _prepare_step(
        self, active: Sequence[GroupGrads], factor: Scalar, noop: torch.Tensor | None
    ) -> None:
        self._waiting = []

    def _update(self, group: dict[str, Any], launch: Launch, options: StepOptions) -> None:
        if group["algorithm"] == "adam":
            numbers = self._numbers_of(group, launch.device, Adam)
            adam_(launch.columns, numbers, options)
        else:
            hyper = self._numbers_of(group, launch.device, Muon)
            self._waiting.append(_Waiting(launch, hyper, options))

    def _finish(
        self,
        updates: Iterable[tuple[list[torch.Tensor], Stages | None]],
        sharded: Sequence[torch.Tensor],
    ) -> None:
        super()._finish(updates, sharded)
        waiting, self._waiting = self._waiting, []
        found = {param: (n, one) for one in waiting for n, param in enumerate(one.launch.params)}
        matrices: list[Matrix] = []
        places: list[tuple[int, _Waiting] | None] = []
        for group in self.param_groups:  # the same order on all ranks
            for param in group["params"] if group["algorithm"] == "muon" else ():
                place = found.get(param)
                if place is None and not (param.requires_grad and is_sharded(param)):
                    continue  # without a gradient; of a sharded one other ranks may have it
                device = local(param).device
                hyper = place[1].hyper if place else self._numbers_of(group, device, Muon)
                dtype = hyper.direction_dtype(param.dtype)
                how = hyper.iteration, hyper.flatten, dtype, device, hyper.split
                matrices.append(Matrix(param, *how))
                places.append(place)
        for batch in planned(matrices):
            _step_batch(batch, matrices, places)

    # -- torch.optim -------------------------------------------------------------------------------

    def _check_loaded(self, loaded: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        every = zip(self.param_groups, groups, loaded["param_groups"], strict=False)
        for number, (mine, saved, taken) in enumerate(every):
            algorithm = saved.get("algorithm", mine["algorithm"])
            taken["algorithm"] = algorithm  # torch.optim's groups have none
            if algorithm != mine["algorithm"]:
                raise ValueError(
                    f"FusedMuon: group {number} was saved with algorithm={algorithm!r}, and in "
                    f"this optimizer it has {mine['algorithm']!r}. Pass the same groups, or the "
                    "same is_matrix, as for the optimizer that saved the state."
                )
        super()._check_loaded(loaded, groups)

    def _torch_state(self, state: dict[str, Any]) -> dict[str, Any]:
        state.pop("step")
        return state

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if group["algorithm"] != "muon":
            raise ValueError(
                "FusedMuon: torch.optim.Muon updates only matrices, and a group has "
                "algorithm='adam'. Put the parameters of that group into an optimizer of their "
                "own, or save state_dict()."
            )
        if isinstance(group["ns_coefficients"], str):
            coefficients = NAMED[group["ns_coefficients"]]
            if len(coefficients) > 1:
                raise ValueError(
                    f"FusedMuon: torch.optim.Muon has no {group['ns_coefficients']!r}: its "
                    "iterations have the same coefficients. Save state_dict()."
                )
            group["ns_coefficients"] = coefficients[0]
        return {key: group[key] for key in group if key not in self._not_in_torch}


def _step_batch(
    batch: Batch, matrices: Sequence[Matrix], places: Sequence[tuple[int, _Waiting] | None]
) -> None:
    """Step the matrices of a batch.

    Args:
        batch: The batch.
        matrices: All.
        places: Where the tensors of each are; ``None`` if it has no gradient here.
    """
    directions: dict[int, torch.Tensor] = {}
    members: dict[int, tuple[_Waiting, list[int]]] = {}
    for number in chain(*batch.stacks):
        place = places[number]
        if place is None:
            one = matrices[number]
            directions[number] = torch.zeros_like(local(one.param), dtype=one.dtype)
        else:
            members.setdefault(id(place[1]), (place[1], []))[1].append(number)
    parts = []
    for waiting, numbers in members.values():
        part = waiting.at([place[0] for n in numbers if (place := places[n])])
        parts.append((part, numbers))
        begun = begin_(part.launch.columns, part.hyper, part.options)
        directions.update(zip(numbers, begun, strict=True))
    updates = orthogonalize(batch, matrices, directions)
    for part, numbers in parts:
        mine, shapes = [updates[n] for n in numbers], [matrices[n].shape for n in numbers]
        finish_(part.launch.columns, mine, shapes, part.hyper, part.options)


def _has_matrices(param: torch.Tensor, flatten: bool) -> bool:
    return param.dim() >= 2 if flatten else param.dim() in (2, 3)
