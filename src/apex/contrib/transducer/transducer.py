"""``TransducerJoint`` and ``TransducerLoss``: the joint network's sums, and the loss, of RNN-T.

Formulas, and what happens to lengths and labels out of range: :mod:`apex.ops.losses.transducer`.
Their backward is computed by hand and has no derivative. ``opt``, ``fwd_tile_size`` and
``fuse_softmax_backward`` chose among the original's kernels: they are checked and change nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.ops import _runtime
from apex.ops._check import ArgumentError, check_unused
from apex.ops.losses import transducer as ops

Tensor = torch.Tensor


class TransducerJointFunc(torch.autograd.Function):
    """:class:`TransducerJoint` as an autograd function, to be called by ``apply``."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, pack_output: bool,
        relu: bool, dropout: bool, batch_offset: Tensor | None, packed_batch: int, opt: int,
        fwd_tile_size: int, dropout_prob: float, mask_probe: list[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """Compute h; append its mask to ``mask_probe``, if that is a list and there is a mask."""
        packed = (batch_offset, int(packed_batch)) if pack_output else None
        cells = ops.joint_cells("TransducerJoint", f, g, f_len, g_len, packed)
        h, mask = ops.joint(f, g, cells, pack_output, relu, dropout_prob if dropout else None)
        ctx.cells, ctx.scale = cells, ops.dropout_scale(dropout_prob) if dropout else 1.0
        ctx.save_for_backward(mask)
        shape = h.shape if pack_output else (*cells.row.shape, f.shape[2])
        if mask is not None and mask_probe is not None:
            mask_probe.append(mask.view(shape))
        return h.view(shape)

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> Any:
        """Compute the gradients of f and g; that of a cell which is not used is not read."""
        rows = loss_grad.reshape(-1, loss_grad.shape[-1])
        _refuse_create_graph("TransducerJoint")
        (mask,) = ctx.saved_tensors
        return *ops.joint_gradients(rows, mask, ctx.cells, ctx.scale), *[None] * 11


class TransducerJoint(torch.nn.Module):
    """Compute ``h[b, t, u] = f[b, t] + g[b, u]``, optionally with ReLU and dropout, and packed.

    Args:
        pack_output: Return only the cells with ``t < f_len`` and ``u < g_len``, in sequence.
        relu: Apply ReLU to the sum.
        dropout: Apply dropout after that, in training mode.
        opt: Has no effect.
        fwd_tile_size: Has no effect.
        dropout_prob: Share of the elements that is set to 0.
        probe_mask: Append the mask of each call to the list ``mask_probe``. The mask is bool, has
            the shape of h, and is True where ReLU and dropout kept the element.

    Raises:
        ArgumentError: An option has an unsupported value.

    Example:
        >>> joint, lengths = TransducerJoint(relu=True), torch.tensor([3, 2])
        >>> joint(torch.zeros(2, 3, 8), torch.ones(2, 4, 8), lengths, lengths).shape
        torch.Size([2, 3, 4, 8])
    """

    # What modules that an older Apex pickled whole may lack.
    pack_output = relu = dropout = False
    opt, fwd_tile_size = 1, 4
    dropout_prob: float = 0
    mask_probe: list[Tensor] | None = None

    def __init__(
        self, pack_output: bool = False, relu: bool = False, dropout: bool = False, opt: int = 1,
        fwd_tile_size: int = 4, dropout_prob: float = 0, probe_mask: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_unused("TransducerJoint", opt=opt, fwd_tile_size=fwd_tile_size)
        if not 0 <= dropout_prob <= 1:
            raise ArgumentError(
                f"TransducerJoint: dropout_prob is {dropout_prob}; pass a number from 0 to 1."
            )
        self.pack_output, self.relu, self.dropout = pack_output, relu, dropout
        self.opt, self.fwd_tile_size, self.dropout_prob = opt, fwd_tile_size, dropout_prob
        self.mask_probe = [] if probe_mask and (relu or dropout) else None

    def forward(
        self, f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor,
        batch_offset: Tensor | None = None, packed_batch: int = 0,
    ) -> Tensor:  # fmt: skip
        """Compute h, rounded once to the dtype of f and g.

        Args:
            f: Output of the encoder, ``(B, T, H)`` in any floating dtype.
            g: Output of the predictor, ``(B, U, H)`` in the same dtype.
            f_len: Integers ``(B,)``: the number of time steps of each sample.
            g_len: Integers ``(B,)``: the number of positions of each sample.
            batch_offset: Integers ``(B,)``, needed to pack: ``(f_len * g_len).cumsum(0)``.
            packed_batch: The last number of ``batch_offset``, needed to pack. If it is a tensor,
                the host waits for it.

        Returns:
            ``(B, T, U, H)``, with -1 outside of a sample's cells; or ``(packed_batch, H)``.

        Raises:
            ArgumentError: An argument has an unsupported type, dtype, shape or device.
            IndexError: A length or offset is out of range, on a CPU. On other devices the sample
                is NaN.
        """
        return _called(
            TransducerJointFunc, f, g, f_len, g_len, self.pack_output, self.relu,
            self.dropout and self.training, batch_offset, packed_batch, self.opt,
            self.fwd_tile_size, self.dropout_prob, self.mask_probe,
        )  # fmt: skip


class TransducerLossFunc(torch.autograd.Function):
    """:class:`TransducerLoss` as an autograd function, to be called by ``apply``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor,
        batch_offset: Tensor | None, max_f_len: int | None, blank_idx: int,
        fuse_softmax_backward: bool, debug_list: list[Tensor] | None, opt: int, packed_input: bool,
    ) -> Tensor:  # fmt: skip
        """Compute the losses; an empty ``debug_list`` gets alpha and beta."""
        packed = (batch_offset, max_f_len) if packed_input else None
        rows, cells, labels = ops.loss_rows(
            "TransducerLoss", x, label, f_len, y_len, blank_idx, packed
        )
        lse = ops.logsumexp(rows, labels)
        alpha, beta, losses = ops.alignments(rows, labels, lse, cells, blank_idx)
        if debug_list == []:
            debug_list += [alpha.to(lse.dtype), beta.to(lse.dtype)]
        ctx.cells, ctx.blank = cells, blank_idx
        ctx.save_for_backward(x, labels, lse, alpha, beta, losses)
        return losses.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> Any:
        """Compute the gradient of the logits."""
        _refuse_create_graph("TransducerLoss")
        x, labels, lse, *found = ctx.saved_tensors
        known = (x.reshape(-1, x.shape[-1]), labels, lse, found, ctx.cells, ctx.blank)
        dx = ops.gradient(loss_grad, *known)
        return dx.view(x.shape), *[None] * 10


class TransducerLoss(torch.nn.Module):
    """Compute the negative log-probability of the labels, summed over all alignments.

    Args:
        fuse_softmax_backward: Has no effect: the gradient is always computed in one pass.
        opt: Has no effect.
        packed_input: Whether the logits are packed, as :class:`TransducerJoint` packs them.

    Raises:
        ArgumentError: An option has an unsupported value.

    Example:
        >>> x, label = torch.zeros(1, 3, 2, 5), torch.tensor([[1]])
        >>> TransducerLoss()(x, label, torch.tensor([3]), torch.tensor([1]), 4)
        tensor([5.3391])
    """

    # What modules that an older Apex pickled whole may lack.
    fuse_softmax_backward, opt, packed_input = True, 1, False

    def __init__(
        self, fuse_softmax_backward: bool = True, opt: int = 1, packed_input: bool = False
    ) -> None:
        super().__init__()
        check_unused("TransducerLoss", opt=opt, fuse_softmax_backward=fuse_softmax_backward)
        self.fuse_softmax_backward, self.opt = fuse_softmax_backward, opt
        self.packed_input = packed_input

    def forward(
        self, x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank_idx: int,
        batch_offset: Tensor | None = None, max_f_len: int | None = None,
        debug_list: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the loss of each sample, in float64, and round it to the dtype of x.

        Args:
            x: Logits ``(B, T, U, classes)``, or packed ``(rows, classes)``, in any floating dtype.
                U is the largest number of labels plus 1. Unused cells are not read.
            label: Integers ``(B, U - 1)``.
            f_len: Integers ``(B,)``: the number of time steps of each sample.
            y_len: Integers ``(B,)``: the number of labels of each sample, which may be 0.
            blank_idx: The class of the blank.
            batch_offset: Integers ``(B,)`` for packed logits: ``(f_len * (y_len + 1)).cumsum(0)``.
            max_f_len: T, for packed logits.
            debug_list: If you pass an empty list, alpha and beta are appended to it. Both are
                ``(B, T, U)`` in float32, or float64 for float64 logits.

        Returns:
            ``(B,)``.

        Raises:
            ArgumentError: An argument has an unsupported type, dtype, shape or device.
            IndexError: A length, label or offset is out of range, on a CPU. On other devices the
                loss of the sample is NaN.
        """
        return _called(
            TransducerLossFunc, x, label, f_len, y_len, batch_offset, max_f_len, blank_idx,
            self.fuse_softmax_backward, debug_list, self.opt, self.packed_input,
        )  # fmt: skip


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    y: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return y


_uncompiled = _runtime.not_compiled(_apply)


def _called(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call between two graphs, if torch.compile is at work: it would unroll all diagonals."""
    return (_uncompiled if torch.compiler.is_compiling() else _apply)(function, *args)


def _refuse_create_graph(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name}: its gradients have no derivative; pass create_graph=False.")
