"""``BatchNorm2d_NHWC``: batch norm of ``(N, H, W, C)``, of groups of processes, with sum and ReLU.

What is computed and sent: :mod:`apex.ops.norms.synced_batch_norm`. The original's processes wrote
into each other's memory; here a group is a process group of ``torch.distributed``.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from apex._compat import private
from apex.ops._check import ArgumentError, check_shape, check_tensors, check_unused
from apex.ops._function import Applied
from apex.ops.norms.synced_batch_norm import group_of, synced, update_running

Tensor = torch.Tensor
_NAME = "BatchNorm2d_NHWC"


def _norm(  # noqa: PLR0913
    x: Tensor, s: Tensor, b: Tensor, rm: Tensor, riv: Tensor, mini_m: Tensor, mini_riv: Tensor,
    ret_cta: Any, mom: float, epsilon: float, fuse_relu: bool, is_train: bool, bn_group: int = 1,
    my_data: Any = None, pair_data: Any = None, magic: Any = None, pair_data2: Any = None,
    pair_data3: Any = None, fwd_occup: Any = None, fwd_grid_x: Any = None, bwd_occup: Any = None,
    bwd_grid_x: Any = None, multi_stream: bool = False,
) -> Tensor:  # fmt: skip
    tensors = {"x": x, "weight": s, "bias": b, "running_mean": rm, "running_var": riv}
    check_tensors(_NAME, tensors, floating=tensors, required=tensors)
    if x.dim() != 4 or x.shape[3] != len(s):
        raise ArgumentError(
            f"{_NAME}: x has shape {list(x.shape)}. Pass (N, H, W, {len(s)}), such as "
            "image.permute(0, 2, 3, 1)."
        )
    x = x.permute(0, 3, 1, 2)
    if is_train:
        group = group_of(f"{_NAME}: bn_group", bn_group)
        record = partial(update_running, rm, riv, mom)
        y, *statistics = synced(_NAME, x, s, b, epsilon, group, record)
        for kept, new in zip((mini_m, mini_riv), statistics, strict=True):
            kept.copy_(new)
    else:
        y = F.batch_norm(x, rm, riv, s, b, False, 0.0, epsilon)
    return (y.relu() if fuse_relu else y).permute(0, 2, 3, 1)


def _norm_add_relu(  # noqa: PLR0913
    x: Tensor, z: Tensor, s: Tensor, b: Tensor, rm: Tensor, riv: Tensor, mini_m: Tensor,
    mini_riv: Tensor, grid_dim_y: Any, ret_cta: Any, mom: float, epsilon: float, is_train: bool,
    bn_group: int = 1, my_data: Any = None, pair_data: Any = None, magic: Any = None,
    pair_data2: Any = None, pair_data3: Any = None, fwd_occup: Any = None, fwd_grid_x: Any = None,
    bwd_occup: Any = None, bwd_grid_x: Any = None, multi_stream: bool = False,
) -> Tensor:  # fmt: skip
    check_shape(_NAME, "z", z, tuple(x.shape), f"x has {list(x.shape)}")
    numbers = (mom, epsilon, False, is_train, bn_group)
    return (_norm(x, s, b, rm, riv, mini_m, mini_riv, ret_cta, *numbers) + z).to(x.dtype).relu()


class bn_NHWC_impl(Applied):
    """The norm as an autograd function; what follows ``bn_group`` is accepted with no effect."""

    function = staticmethod(_norm)
    gradient, autocasts, keeps_graph = "grad_y", True, True


class bn_addrelu_NHWC_impl(Applied):
    """``relu(norm(x) + z)`` as an autograd function."""

    function = staticmethod(_norm_add_relu)
    gradient, autocasts, keeps_graph = "grad_y", True, True


class BatchNorm2d_NHWC(private.BatchNorm):
    """Batch norm of ``(N, H, W, C)`` with the statistics of ``bn_group`` neighbouring ranks.

    Parameters, buffers and state dict are those of ``torch.nn.BatchNorm2d``. In training mode all
    processes must call the layer equally often and in the same order. After ``eval()`` it does not
    communicate. Each call stores the batch's mean in ``minibatch_mean`` and its
    ``1 / sqrt(variance + eps)`` in ``minibatch_riv``. A group may have any number of processes; the
    original supported up to 8.

    Args:
        num_features: Number of channels.
        fuse_relu: Apply ReLU to the result.
        bn_group: Number of ranks in a group. It must divide the number of processes.
        max_cta_per_sm: Has no effect.
        cta_launch_margin: Has no effect.
        multi_stream: Has no effect.

    Raises:
        ArgumentError: The processes cannot be divided into groups of ``bn_group`` ranks.
    """

    # What modules that an older Apex pickled whole may lack.
    fuse_relu, bn_group, multi_stream = False, 1, False
    max_cta_per_sm, cta_launch_margin = 2, 12

    def __init__(
        self, num_features: int, fuse_relu: bool = False, bn_group: int = 1,
        max_cta_per_sm: int = 2, cta_launch_margin: int = 12, multi_stream: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_features)
        tuned = {"max_cta_per_sm": max_cta_per_sm, "cta_launch_margin": cta_launch_margin}
        check_unused(_NAME, multi_stream=multi_stream, **tuned)
        group_of(f"{_NAME}: bn_group", bn_group)
        self.fuse_relu, self.bn_group, self.multi_stream = fuse_relu, bn_group, multi_stream
        self.max_cta_per_sm, self.cta_launch_margin = max_cta_per_sm, cta_launch_margin
        self.minibatch_mean = torch.zeros_like(self.weight)
        self.minibatch_riv = torch.ones_like(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize ``x`` to ``y``. With ``z`` return ``relu(y + z)``; this needs ``fuse_relu``.

        Args:
            x: Floating tensor ``(N, H, W, C)``.
            z: Tensor of the shape of ``x``.

        Raises:
            ArgumentError: A shape or dtype is not supported, or you passed ``z`` without
                ``fuse_relu``.
            ValueError: The processes of the group together have only one element for each channel.
        """
        if z is not None and not self.fuse_relu:
            raise ArgumentError(f"{_NAME}: z is added before a ReLU. Pass fuse_relu=True.")
        mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None
        assert batches is not None
        mini = [torch.empty_like(mean) for _ in range(2)]
        tensors = (self.weight, self.bias, mean, var, *mini)
        momentum = 1 / (batches + 1).to(mean) if self.momentum is None else self.momentum
        numbers, last = (momentum, self.eps), (self.training, self.bn_group)
        y: Tensor
        if z is None:
            y = bn_NHWC_impl.apply(x, *tensors, None, *numbers, self.fuse_relu, *last)
        else:
            y = bn_addrelu_NHWC_impl.apply(x, z, *tensors, None, None, *numbers, *last)
        if self.training:
            batches.add_(1)
            self.minibatch_mean, self.minibatch_riv = mini
        return y
