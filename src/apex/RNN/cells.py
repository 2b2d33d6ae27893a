"""The multiplicative LSTM of Krause et al., arXiv:1609.07959: the function and the cell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex.RNN._cell import RNNCell, lstm_update

__all__ = ["mLSTMCell", "mLSTMRNNCell"]


class mLSTMRNNCell(RNNCell):
    """One step of a multiplicative LSTM; see :func:`mLSTMCell` for the formula.

    Beside the parameters of :class:`~apex.RNN.RNNBackend.RNNCell`, with four gates and two states,
    it has ``w_mih`` of shape ``[output_size, input_size]`` and ``w_mhh`` ``[output_size,
    output_size]``.

    Args:
        input_size: Features of the input.
        hidden_size: Features of c.
        bias: Whether there are biases.
        output_size: Features of h; ``None`` means ``hidden_size``.

    Example:
        >>> h, c = mLSTMRNNCell(10, 20)(torch.randn(3, 10))
        >>> h.shape
        torch.Size([3, 20])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = False, output_size: int | None = None
    ) -> None:
        super().__init__(4, input_size, hidden_size, mLSTMCell, 2, bias, output_size)
        self.w_mih = nn.Parameter(torch.empty(self.output_size, input_size))
        self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> mLSTMRNNCell:
        """Return a cell of the same settings, dtype and device, with new parameters and no state.

        Args:
            new_input_size: Features of its input; ``None`` means as many as here.
        """
        size = self.input_size if new_input_size is None else new_input_size
        cell = type(self)(size, self.hidden_size, self.bias, self.output_size)
        return cell.to(self.w_ih)

    def _weights(self) -> tuple[Tensor, ...]:
        return self.w_ih, self.w_hh, self.w_mih, self.w_mhh


def mLSTMCell(
    input: Tensor,
    hidden: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    w_mih: Tensor,
    w_mhh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one step of a multiplicative LSTM.

    With ``m = (x @ w_mih.T) * (h @ w_mhh.T)``, the gates i, f, g, o are the quarters of
    ``x @ w_ih.T + b_ih + m @ w_hh.T + b_hh``; then ``c' = sigmoid(f) * c + sigmoid(i) * tanh(g)``
    and ``h' = sigmoid(o) * tanh(c')``.

    Args:
        input: x, ``[batch, input_size]``.
        hidden: h, ``[batch, output_size]``, and c, ``[batch, hidden_size]``.
        w_ih: ``[4 * hidden_size, input_size]``.
        w_hh: ``[4 * hidden_size, output_size]``.
        w_mih: ``[output_size, input_size]``.
        w_mhh: ``[output_size, output_size]``.
        b_ih: ``[4 * hidden_size]`` or ``None``.
        b_hh: The same.

    Returns:
        h' and c', both ``[batch, hidden_size]``.

    Example:
        >>> x, h, c = torch.randn(3, 2), torch.zeros(3, 5), torch.zeros(3, 5)
        >>> weights = [torch.randn(20, 2), torch.randn(20, 5), torch.randn(5, 2), torch.randn(5, 5)]
        >>> mLSTMCell(x, (h, c), *weights)[0].shape
        torch.Size([3, 5])
    """
    h, c = hidden
    m = F.linear(input, w_mih) * F.linear(h, w_mhh)
    return lstm_update(F.linear(input, w_ih, b_ih) + F.linear(m, w_hh, b_hh), c)
