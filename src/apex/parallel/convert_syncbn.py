"""Put ``SyncBatchNorm`` into a model, and make the process groups for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from apex._compat import private
from apex.parallel._flat_calls import check_process_group
from apex.parallel.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:  # a torch without torch.distributed imports this file too
    from torch.distributed import ProcessGroup


def convert_syncbn_model(
    module: torch.nn.Module,
    process_group: ProcessGroup | None = None,
    channel_last: bool = False,
) -> torch.nn.Module:
    """Replace every batch norm of a model by :class:`SyncBatchNorm`, in place.

    The new layers keep the parameters, buffers, training mode, hooks and other attributes, so an
    optimizer that you made before still steps them. A layer that is used in two places stays one
    layer. Subclasses of torch's batch norms and ``torch.nn.SyncBatchNorm`` are replaced too.

    Args:
        module: The model, or a layer.
        process_group: As in :class:`SyncBatchNorm`.
        channel_last: As in :class:`SyncBatchNorm`, for all layers.

    Returns:
        ``module``, or a new layer if ``module`` is itself a batch norm.

    Raises:
        ValueError: A lazy batch norm does not know its number of channels yet.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        >>> model = convert_syncbn_model(model)
        >>> type(model[1])
        <class 'apex.parallel.sync_batchnorm.SyncBatchNorm'>
    """
    private.need("convert_syncbn_model")
    private.need("SyncBatchNorm")
    found: dict[torch.nn.Module, torch.nn.Module] = {}
    for layer in (layer for layer in module.modules() if isinstance(layer, private.BatchNorm)):
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"convert_syncbn_model: {layer} does not know its number of channels yet. Run the "
                "model on a batch first."
            )
        found[layer] = _converted(layer, process_group, channel_last)
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if name and layer in found:
            module.set_submodule(name, found[layer])
    return found.get(module, module)


def _converted(
    layer: private.BatchNorm, process_group: ProcessGroup | None, channel_last: bool
) -> SyncBatchNorm:
    new = layer
    if not isinstance(new, SyncBatchNorm):
        new = SyncBatchNorm.__new__(SyncBatchNorm)
        of_old_class = ("forward", "_compiled_call_impl")  # set on an object they would be called
        vars(new).update({k: v for k, v in vars(layer).items() if k not in of_old_class})
        new.fuse_relu = False
    new.process_group = process_group
    new.channel_last = channel_last
    return new


def create_syncbn_process_group(group_size: int) -> ProcessGroup | None:
    """Divide all processes into groups of consecutive ranks, and return this process's group.

    All processes must call it with the same size.

    Args:
        group_size: Number of processes in a group; 0 for all.

    Returns:
        The group to pass to :class:`SyncBatchNorm`, or None for all processes.

    Raises:
        ValueError: The number of processes is not a multiple of ``group_size``.
        RuntimeError: ``torch.distributed`` is not initialized.

    Example:
        >>> group = create_syncbn_process_group(0)
        >>> layer = SyncBatchNorm(4, process_group=group)
    """
    if group_size == 0:
        return None
    check_process_group("create_syncbn_process_group")
    world = torch.distributed.get_world_size()
    if group_size < 0 or world % group_size:
        raise ValueError(
            f"create_syncbn_process_group({group_size}): there are {world} processes. Pass a "
            f"divisor of {world}, or 0 for one group of all processes."
        )
    groups: list[ProcessGroup] = [
        torch.distributed.new_group(list(range(first, first + group_size)))
        for first in range(0, world, group_size)
    ]
    return groups[torch.distributed.get_rank() // group_size]
