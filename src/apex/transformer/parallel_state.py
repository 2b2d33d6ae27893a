"""Which ranks share a model: groups for tensor, pipeline and data parallelism, with Apex's names.

The ranks are a ``DeviceMesh`` of three dimensions, ``("pp", "dp", "tp")``. Adjacent ranks are in
one tensor-parallel group, and each stage is a block of ranks. The groups of 8 ranks with
tensor-parallel and pipeline-parallel sizes of 2:

* tensor-parallel: [0, 1], [2, 3], [4, 5], [6, 7]
* data-parallel: [0, 2], [1, 3], [4, 6], [5, 7]
* pipelines: [0, 4], [1, 5], [2, 6], [3, 7]

All ranks must make and destroy the groups together. They may do so several times.

Setters override the sizes and ranks of the mesh until ``destroy_model_parallel``. Use them without
processes, or for another rank.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from apex.ops._check import ArgumentError
from apex.transformer import _refused
from apex.transformer.log_util import get_transformer_logger as get_transformer_logger
from apex.transformer.utils import device_type

dist = torch.distributed
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ExperimentalWarning(Warning):
    """Issued for UCC, a backend that PyTorch calls experimental."""


class NotInitializedError(AssertionError, RuntimeError):
    """Raised for a group, size or rank that does not exist. Apex raises ``AssertionError``."""


@dataclass
class _State:
    """What one ``initialize_model_parallel`` made, and what setters set."""

    mesh: DeviceMesh | None = None
    groups: dict[str, Any] = field(default_factory=dict)  # name -> the group that this rank is in
    numbers: dict[str, int | None] = field(default_factory=dict)  # by setters


_STATE = _State()
_TP, _PP, _DP = "tensor_model_parallel", "pipeline_model_parallel", "data_parallel"
_RELATIVE = ("encoder_relative_position_", "decoder_relative_position_")


def initialize_model_parallel(
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
    pipeline_model_parallel_split_rank_: int | None = None,
    use_fp8_: bool = False,
    init_mpi_proc_group: bool = False,
    *,
    default_backend: str | None = None,
    p2p_backend: str | None = None,
) -> None:
    """Make all groups. Every rank must call it with the same arguments.

    Args:
        tensor_model_parallel_size_: Number of ranks that share each layer.
        pipeline_model_parallel_size_: Number of stages.
        virtual_pipeline_model_parallel_size_: Number of parts of the model on each stage. Only
            getters use it.
        pipeline_model_parallel_split_rank_: First stage of the decoder, in a model with an encoder.
        use_fp8_: Whether to make the groups for ``get_amax_reduction_group``.
        init_mpi_proc_group: Must be ``False``.
        default_backend: Backend of all groups; by default that of ``torch.distributed``.
        p2p_backend: Backend of the pipelines' groups; by default ``default_backend``.

    Raises:
        NotInitializedError: ``torch.distributed`` is not initialised.
        ArgumentError: The groups exist already, or an argument does not suit the number of ranks.
        NotImplementedError: You passed ``init_mpi_proc_group=True``.
    """
    if init_mpi_proc_group:
        _refused.refuse("parallel_state.initialize_model_parallel(init_mpi_proc_group=True)")
    if not (dist.is_available() and dist.is_initialized()):
        raise NotInitializedError("call torch.distributed.init_process_group first.")
    if model_parallel_is_initialized():
        raise ArgumentError("the groups exist already; call destroy_model_parallel first.")
    tensor, pipeline = tensor_model_parallel_size_, pipeline_model_parallel_size_
    split, virtual = pipeline_model_parallel_split_rank_, virtual_pipeline_model_parallel_size_
    _check(tensor, pipeline, virtual, split)
    _check_backends(default_backend, p2p_backend)
    shape = (pipeline, dist.get_world_size() // (tensor * pipeline), tensor)
    _make_mesh(shape, default_backend, p2p_backend or default_backend)
    table = torch.arange(dist.get_world_size(), device="cpu").view(shape)
    joined = {
        "model_parallel": table.movedim(1, 0).flatten(1).tolist(),
        **_embedding_ranks(table.flatten(1).t().tolist(), split),
    }
    if use_fp8_:
        joined["amax_reduction"] = table.flatten(1).tolist()
    made: dict[tuple[int, ...], Any] = {}  # names whose ranks are the same share a group
    for name, all_ranks in joined.items():
        for ranks in filter(None, all_ranks):
            if tuple(ranks) not in made:
                made[tuple(ranks)] = dist.new_group(ranks, backend=default_backend)
            if dist.get_rank() in ranks:
                _STATE.groups[name] = made[tuple(ranks)]
    _STATE.numbers["split_rank"] = split
    set_virtual_pipeline_model_parallel_rank(None if virtual is None else 0)
    set_virtual_pipeline_model_parallel_world_size(virtual)


def _check(tensor: int, pipeline: int, virtual: int | None, split: int | None) -> None:
    for name, size in (("tensor", tensor), ("pipeline", pipeline)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ArgumentError(f"{name}_model_parallel_size_ is {size!r}; pass a positive int.")
    said = f"pipeline_model_parallel_size_ {pipeline}"
    if dist.get_world_size() % (tensor * pipeline):
        ranks = f"{dist.get_world_size()} ranks are not divisible by"
        raise ArgumentError(f"{ranks} tensor_model_parallel_size_ {tensor} x {said}.")
    if virtual is not None and (virtual < 1 or pipeline <= 2):
        what = f"virtual_pipeline_model_parallel_size_ is {virtual} with {said}"
        raise ArgumentError(f"{what}; pass a positive number, with more than 2 stages.")
    if split is not None and pipeline > 1 and split not in range(pipeline):
        raise ArgumentError(
            f"pipeline_model_parallel_split_rank_ is {split} with {said}; pass a stage from 0 to "
            f"{pipeline - 1}."
        )


def _check_backends(*backends: str | None) -> None:
    for backend in filter(None, backends):
        if not dist.is_backend_available(backend):
            raise ArgumentError(f"backend {backend!r} is not available; pass None for the default.")
        if backend == "ucc":
            warnings.warn("UCC is experimental in PyTorch", ExperimentalWarning, stacklevel=3)


def _embedding_ranks(pipelines: list[list[int]], split: int | None) -> dict[str, list[list[int]]]:
    """Return by name, for each pipeline, the ranks that have a copy of an embedding."""
    names = [f"{kind}embedding" for kind in ("", "position_", *_RELATIVE)]
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    for ranks in pipelines:
        first, last = ranks[0], ranks[-1]
        rows = [[first, last], [first], [first], [first]]
        if split is not None and len(ranks) > 1:
            middle = ranks[split]
            rows = [[first, middle, last], [first, middle], ranks[:split], ranks[split:]]
        for name, row in zip(names, rows, strict=True):
            found[name].append(list(dict.fromkeys(row)))  # without doubles, in order
    return found


def _make_mesh(shape: tuple[int, ...], backend: str | None, p2p_backend: str | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    device = device_type(backend or dist.get_backend_config())
    backends = {"pp": p2p_backend, "dp": backend, "tp": backend}
    given: Any = {name: value for name, value in backends.items() if value} or None
    _STATE.mesh = init_device_mesh(
        device, shape, mesh_dim_names=tuple(backends), backend_override=given
    )
    for dimension, name in zip(backends, (_PP, _DP, _TP), strict=True):
        _STATE.groups[name] = _STATE.mesh.get_group(dimension)


def destroy_model_parallel() -> None:
    """Destroy the groups and undo the setters. All ranks must call it; they may call it twice."""
    global _STATE  # noqa: PLW0603  # the one state, as Apex's
    if dist.is_available() and dist.is_initialized():
        for group in dict.fromkeys(_STATE.groups.values()):
            if group is not dist.group.WORLD:  # which the mesh uses for a line of all ranks
                with contextlib.suppress(ValueError):  # gone with the world it was made in
                    dist.destroy_process_group(group)
    _STATE = _State()


def model_parallel_is_initialized() -> bool:
    """Return whether the groups exist."""
    return _STATE.mesh is not None


def is_unitialized() -> bool:
    """Return whether the groups do not exist. The name is spelled as in Apex."""
    return not model_parallel_is_initialized()


def current_device() -> torch.device:
    """Return the device of this program's tensors: the accelerator, or the CPU for CPU groups."""
    kind = device_type() if _STATE.mesh is None else _STATE.mesh.device_type
    return (
        torch.device("cpu")
        if kind == "cpu"
        else torch.device(kind, torch.accelerator.current_device_index())
    )


# -- groups ----------------------------------------------------------------------------------------


def _named(function: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _group(name: str) -> Any:
    if name not in _STATE.groups:
        why = "no group yet. Call initialize_model_parallel first."
        if model_parallel_is_initialized():
            why = f"no group of this kind with rank {dist.get_rank()}."
        raise NotInitializedError(f"apex.transformer.parallel_state, {name}: there is {why}")
    return _STATE.groups[name]


def _ranks(name: str) -> list[int]:
    return dist.get_process_group_ranks(_group(name))


def _group_of(name: str, what: str) -> Callable[[], Any]:
    return _named(lambda: _group(name), f"get_{name}_group", f"Return the group of {what}.")


def _is_in(name: str) -> Callable[[], bool]:
    doc = f"Whether this rank is in ``get_{name}_group()``."
    return _named(lambda: name in _STATE.groups, f"is_rank_in_{name}_group", doc)


get_model_parallel_group = _group_of("model_parallel", "ranks that share one copy of the model")
get_tensor_model_parallel_group = _group_of(_TP, "ranks that share each layer")
get_pipeline_model_parallel_group = _group_of(_PP, "stages, in their order")
get_data_parallel_group = _group_of(_DP, "ranks with the same part of the model")
get_embedding_group = _group_of("embedding", "the first, the last and the split's stage")
get_position_embedding_group = _group_of("position_embedding", "the first and the split's stage")
get_encoder_relative_position_embedding_group = _group_of(
    f"{_RELATIVE[0]}embedding", "stages before the split, or the first stage"
)
get_decoder_relative_position_embedding_group = _group_of(
    f"{_RELATIVE[1]}embedding", "stages from the split on, or the first stage"
)
get_amax_reduction_group = _group_of("amax_reduction", "all ranks of a stage, if use_fp8_=True")
is_rank_in_position_embedding_group = _is_in("position_embedding")
is_rank_in_encoder_relative_position_embedding_group = _is_in(f"{_RELATIVE[0]}embedding")
is_rank_in_decoder_relative_position_embedding_group = _is_in(f"{_RELATIVE[1]}embedding")


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """Return whether this rank is in the embedding group.

    With virtual stages it returns whether the present part has an embedding, unless
    ``ignore_virtual`` is set.
    """
    if "embedding" not in _STATE.groups or ignore_virtual:
        return "embedding" in _STATE.groups
    ranks = _ranks("embedding")
    if dist.get_rank() == ranks[0]:
        return is_pipeline_first_stage()
    return is_pipeline_last_stage() if dist.get_rank() == ranks[-1] else True


def new_process_group(ranks: Sequence[int], backend: str | None) -> Any:
    """Make a group, as ``torch.distributed.new_group`` does."""
    return dist.new_group(list(ranks), backend=backend)


set_nccl_socket_envs, set_nccl_ib_envs = _refused.set_nccl_socket_envs, _refused.set_nccl_ib_envs
new_nccl_socket_group, new_nccl_ib_group = (
    _refused.new_nccl_socket_group,
    _refused.new_nccl_ib_group,
)
init_nccl_net = _refused.init_nccl_net


# -- sizes and ranks -------------------------------------------------------------------------------


def _world_size(name: str) -> tuple[Callable[[], int], Callable[[int | None], None]]:
    def get() -> int:
        found = _STATE.numbers.get(f"{name}_size")
        return dist.get_world_size(_group(name)) if found is None else found

    def set_to(world_size: int | None) -> None:
        _STATE.numbers[f"{name}_size"] = world_size

    getter = f"get_{name}_world_size"
    _named(get, getter, f"Return what was set, else the size of ``get_{name}_group()``.")
    doc = f"Set what ``{getter}`` returns; None for the group's size."
    return get, _named(set_to, f"set_{name}_world_size", doc)


def _rank(name: str, grouped: bool = True) -> tuple[Callable[[], int], Callable[[Any], None]]:
    def get() -> Any:
        found = _STATE.numbers.get(f"{name}_rank")
        return dist.get_rank(_group(name)) if found is None and grouped else found

    def set_to(rank: int | None) -> None:
        _STATE.numbers[f"{name}_rank"] = rank

    default = f"this rank's index in ``get_{name}_group()``" if grouped else "None"
    _named(get, f"get_{name}_rank", f"Return what was set, else {default}.")
    return get, _named(set_to, f"set_{name}_rank", f"Set what ``get_{name}_rank`` returns.")


get_tensor_model_parallel_world_size, set_tensor_model_parallel_world_size = _world_size(_TP)
get_tensor_model_parallel_rank, set_tensor_model_parallel_rank = _rank(_TP)
get_pipeline_model_parallel_world_size, set_pipeline_model_parallel_world_size = _world_size(_PP)
get_pipeline_model_parallel_rank, set_pipeline_model_parallel_rank = _rank(_PP)
get_virtual_pipeline_model_parallel_rank, set_virtual_pipeline_model_parallel_rank = _rank(
    "virtual_pipeline_model_parallel", grouped=False
)
get_data_parallel_world_size, get_data_parallel_rank = _world_size(_DP)[0], _rank(_DP)[0]


def get_pipeline_model_parallel_split_rank() -> int | None:
    """Return the decoder's first stage, or None."""
    return _STATE.numbers.get("split_rank")


def set_pipeline_model_parallel_split_rank(pipeline_model_parallel_split_rank: int | None) -> None:
    """Set the decoder's first stage."""
    _STATE.numbers["split_rank"] = pipeline_model_parallel_split_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of parts of the model on each stage, or None."""
    return _STATE.numbers.get("virtual_size")


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Set the number of parts on each stage."""
    _STATE.numbers["virtual_size"] = size


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Return whether this stage is the first one, and with virtual stages also this part."""
    if not ignore_virtual and get_virtual_pipeline_model_parallel_rank():
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Return whether this stage is the last one, and with virtual stages also this part."""
    parts = get_virtual_pipeline_model_parallel_world_size()
    if not ignore_virtual and parts and get_virtual_pipeline_model_parallel_rank() != parts - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _from_split(rank: int | None, otherwise: int) -> int:
    """Return how many stages after the split a stage is, by default this one."""
    split = get_pipeline_model_parallel_split_rank()
    if split is None or get_pipeline_model_parallel_world_size() == 1:
        return otherwise
    return (get_pipeline_model_parallel_rank() if rank is None else rank) - split


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Return whether a stage, by default this one, has encoder layers. True without a split."""
    return _from_split(rank, -1) < 0


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Return whether a stage, by default this one, has decoder layers. True without a split."""
    return _from_split(rank, 0) >= 0


def is_pipeline_stage_at_split() -> bool:
    """Return whether this stage has encoder layers, and the next one decoder layers."""
    return _from_split(None, -1) == -1


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of this rank's tensor-parallel group."""
    return _ranks(_TP)[0]


def get_data_parallel_src_rank() -> int:
    """Return the first global rank of this rank's data-parallel group."""
    return _ranks(_DP)[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of the first stage of this pipeline."""
    return _ranks(_PP)[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this pipeline."""
    return _ranks(_PP)[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage, or of the first stage on the last one."""
    return _ranks(_PP)[(get_pipeline_model_parallel_rank() + 1) % len(_ranks(_PP))]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage, or of the last stage on the first one."""
    return _ranks(_PP)[get_pipeline_model_parallel_rank() - 1]


def get_rank_info() -> tuple[int, int, int, int | None]:
    """Return the data, tensor, pipeline and virtual rank, or zeros without groups."""
    if not model_parallel_is_initialized():
        return 0, 0, 0, 0
    ranks = get_tensor_model_parallel_rank(), get_pipeline_model_parallel_rank()
    return get_data_parallel_rank(), *ranks, get_virtual_pipeline_model_parallel_rank()
