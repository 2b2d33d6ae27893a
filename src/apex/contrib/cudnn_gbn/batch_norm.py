"""``GroupBatchNorm2d``: batch norm of ``(N, C, H, W)`` over groups of neighbouring ranks.

What is computed and sent: :mod:`apex.ops.norms.synced_batch_norm`.
"""

from functools import partial
from typing import NoReturn

import torch

from apex._compat import private
from apex.ops._check import ArgumentError
from apex.ops._runtime import autocasts
from apex.ops.norms.synced_batch_norm import group_of, synced, track

#: Names of the original that are here and raise when they are used, with the reason.
REFUSED = {
    "GroupBatchNorm2d.get_peer_buffers": "In apex processes do not write into each other's memory. "
    "Pass a process group of torch.distributed instead.",
}


class GroupBatchNorm2d(private.BatchNorm):
    """Batch norm with the statistics of ``group_size`` neighbouring ranks.

    Parameters, buffers and state dict are those of ``torch.nn.BatchNorm2d``. In training mode all
    processes must call the layer equally often and in the same order. After ``eval()`` it does not
    communicate. Under autocast the input is cast. The layer supports any memory format, number of
    channels and floating dtype. The original needed float16 in channels-last format, with a
    multiple of 8 channels.

    Args:
        num_features: Number of channels.
        group_size: Number of ranks in a group. It must divide the number of processes.
        eps: Added to the variance.
        momentum: Weight of the new statistics in the running ones; None for the mean of all.
        affine: Whether to have a weight and a bias.
        track_running_stats: Whether to have running statistics.

    Raises:
        ArgumentError: The processes cannot be divided into groups of ``group_size`` ranks.
    """

    group_id = group_rank = 0  # where an older Apex has pickled the whole module

    def __init__(
        self, num_features: int, group_size: int, eps: float = 1e-5, momentum: float | None = 0.1,
        affine: bool = True, track_running_stats: bool = True,
    ) -> None:  # fmt: skip
        private.need("SyncBatchNorm")
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        group_of("GroupBatchNorm2d: group_size", group_size)
        rank = torch.distributed.get_rank() if group_size > 1 else 0
        self.group_size, self.group_id, self.group_rank = group_size, *divmod(rank, group_size)

    def get_peer_buffers(self, num_features: int) -> NoReturn:
        """Raise ``NotImplementedError``: there are no peer buffers."""
        raise NotImplementedError(REFUSED["GroupBatchNorm2d.get_peer_buffers"])

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() != 4 or input.shape[1] != self.num_features:
            raise ArgumentError(
                f"GroupBatchNorm2d: expected 4D input (got {input.dim()}D input), of shape "
                f"{list(input.shape)}. Pass (N, {self.num_features}, H, W)."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``(N, C, H, W)``.

        Raises:
            ArgumentError: The input has another shape. It is a ``ValueError``.
            ValueError: The processes of the group together have only one element for each channel.
        """
        self._check_input_dim(input)
        if autocasts(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        if not self.training:
            return super().forward(input)
        group = group_of("GroupBatchNorm2d: group_size", self.group_size)
        own = (self.weight, self.bias, self.eps)
        y, self.minibatch_mean, self.minibatch_inv_var = synced(
            "GroupBatchNorm2d", input, *own, group, partial(track, self)
        )
        return y
