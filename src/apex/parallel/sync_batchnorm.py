"""Batch norm whose statistics are those of the batches of all processes together.

Statistics are merged with the number of elements of each process, so that batches may have
different sizes, or be empty. What is computed and sent: :mod:`apex.ops.norms.synced_batch_norm`; it
is the same on every device and back end.

``torch.nn.SyncBatchNorm`` is not the base class: it refuses CPU tensors, torch's
DistributedDataParallel refuses CPU models that contain it, and its backward hangs if the inputs of
only some processes need gradients.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from apex._compat import private
from apex.amp.gradients.forwards import is_initialized
from apex.ops._check import ArgumentError
from apex.ops._dtypes import NARROW
from apex.ops.norms.synced_batch_norm import synced, track

if TYPE_CHECKING:  # a torch without torch.distributed imports this file too
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor


class SyncBatchNorm(private.BatchNorm):
    """Batch norm over the batches of all processes of a group.

    In training mode, with ``torch.distributed`` initialized and a group of at least two processes,
    the statistics include the elements of all processes. All of them must call the layer equally
    often and in the same order, under ``torch.no_grad`` too. Each may pass any number of elements,
    even 0. Otherwise the layer computes torch's batch norm of the process's own batch. After
    ``eval()`` it never communicates.

    Parameters, buffers and state dict are those of ``torch.nn.BatchNorm2d``. As in torch, weights
    and buffers have the input's dtype, or float32 with a 16-bit input. Statistics of 16-bit inputs
    are float32. Each process has the weight gradients of its own elements, which
    DistributedDataParallel averages.

    Args:
        num_features: Number of channels.
        eps: Added to the variance.
        momentum: Weight of the new statistics in the running ones; None for the mean of all.
        affine: Whether to have a weight and a bias.
        track_running_stats: Whether to have running statistics. Without them ``eval()`` uses the
            statistics of the process's own batch.
        process_group: The group of processes; None for all.
        channel_last: Whether the last dimension holds the channels, instead of the second one. You
            do not need it for the memory format ``torch.channels_last``.
        fuse_relu: Apply ReLU to the result.

    Example:
        >>> layer = SyncBatchNorm(4, channel_last=True, fuse_relu=True)
        >>> layer(torch.randn(2, 8, 8, 4)).shape
        torch.Size([2, 8, 8, 4])
    """

    #: Whether the original had warned, once a process, that it ran without its CUDA extension.
    warned: ClassVar[bool] = False
    #: Why the original could not import its CUDA extension; nothing is missing here.
    syncbn_import_error: ClassVar[ImportError | None] = None

    # What modules that an older Apex pickled whole may lack.
    process_group: ProcessGroup | None = None
    channel_last = fuse_relu = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        private.need("SyncBatchNorm")
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        given: Any = process_group
        if isinstance(given, int) and given > 0:  # -100: this rank is in none
            raise TypeError(
                f"SyncBatchNorm: process_group is {process_group}; it must be a process group or "
                "None. create_syncbn_process_group(group_size) makes groups of that many ranks."
            )
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: ProcessGroup | None) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def extra_repr(self) -> str:
        """Show the arguments that differ from the defaults in ``print(model)``."""
        more = {"channel_last": self.channel_last, "fuse_relu": self.fuse_relu}
        flags = [f"{name}=True" for name, value in more.items() if value]
        described: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return ", ".join([described, *flags])

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.process_group)] = self.process_group  # shared: a process group has no copies
        new = memo[id(self)] = self.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize the input, add ``z`` if you pass one, and apply ReLU with ``fuse_relu``.

        Args:
            input: Floating tensor ``(N, C, *)``, or ``(N, *, C)`` with ``channel_last``.
            z: Tensor of the input's shape.

        Returns:
            Tensor of the input's shape and dtype.

        Raises:
            ArgumentError: Shapes or dtypes do not match. It is a ``RuntimeError``, as in torch, and
                a ``ValueError``.
            ValueError: All processes together have only one element for each channel, or the
                process is not in the group.
        """
        self._check_input_dim(input)
        if not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            self._check(input, z)
        x = input.flatten(0, -2) if self.channel_last else input
        group = self._group_to_wait_for()
        y: Tensor = super().forward(x) if group is None else self._synced(x, group)
        if self.channel_last:
            y = y.reshape(input.shape)
        if z is not None:
            y = (y + z).to(input.dtype)
        return y.relu() if self.fuse_relu else y

    def _check_input_dim(self, input: Tensor) -> None:  # torch's forward calls it too
        if input.dim() < 2:
            raise ArgumentError(f"expected at least 2D input (got {input.dim()}D input)")

    def _check(self, input: Tensor, z: Tensor | None) -> None:
        channels = input.shape[-1 if self.channel_last else 1]
        if channels != self.num_features:
            raise ArgumentError(
                f"SyncBatchNorm: the input has shape {list(input.shape)}, {channels} channels with "
                f"channel_last={self.channel_last}. Pass {self.num_features}: num_features."
            )
        if z is not None and z.shape != input.shape:
            raise ArgumentError(
                f"SyncBatchNorm: z has shape {list(z.shape)}. Pass a z of the shape of the input, "
                f"{list(input.shape)}."
            )
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        own = {tensor.dtype for tensor in tensors if tensor is not None}
        allowed = ({input.dtype}, {torch.float32 if input.dtype in NARROW else input.dtype})
        if not input.is_floating_point() or (own and own not in allowed):
            found = " and ".join(sorted(map(str, own))) or "none"
            raise ArgumentError(
                f"SyncBatchNorm: the input is {input.dtype}, and weights and buffers are {found}. "
                "Pass a floating input with weights and buffers of the same dtype, or a 16-bit "
                "input with float32 weights and buffers. Cast one of them."
            )

    def _group_to_wait_for(self) -> ProcessGroup | None:
        """The group whose processes compute their statistics together; None if there is none."""
        if not (self.training and is_initialized()):
            return None
        group = torch.distributed.group.WORLD if self.process_group is None else self.process_group
        size = torch.distributed.get_world_size(group)
        if size < 1:
            raise ValueError(
                f"SyncBatchNorm: rank {torch.distributed.get_rank()} is not in process_group. Pass "
                "a group that contains it; create_syncbn_process_group(group_size) returns one."
            )
        return group if size > 1 else None

    def _synced(self, x: Tensor, group: ProcessGroup) -> Tensor:
        own = (self.weight, self.bias, self.eps)
        return synced("SyncBatchNorm", x, *own, group, partial(track, self))[0]
