"""The multiplicative LSTM of Krause et al., arXiv:1609.07959: the function and the cell."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from apex.RNN._cell import RNNCell, lstm_update


class mLSTMRNNCell(RNNCell):
    """One step of a multiplicative LSTM; see :func:`mLSTMCell`.

    An :class:`~apex.RNN.RNNBackend.RNNCell` with four gates and two states that has ``w_mih`` of
    shape ``[output_size, input_size]`` and ``w_mhh`` ``[output_size, output_size]`` as well.

    Example:
        >>> h, c = mLSTMRNNCell(10, 20)(torch.randn(3, 10))
        >>> h.shape
        torch.Size([3, 20])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = False, output_size: int | None = None
    ) -> None:
        super().__init__(4, input_size, hidden_size, mLSTMCell, 2, bias, output_size)
        self.w_mih = nn.Parameter(self.w_hh.new_empty(self.output_size, input_size))
        self.w_mhh = nn.Parameter(self.w_hh.new_empty(self.output_size, self.output_size))
        self.reset_parameters()

    def _settings(self, input_size: int) -> tuple[object, ...]:
        return input_size, self.hidden_size, self.bias, self.output_size

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
    """Compute one step of a multiplicative LSTM: h' and c', both ``[batch, hidden_size]``.

    With ``m = (x @ w_mih.T) * (h @ w_mhh.T)``, the gates i, f, g, o are the quarters of
    ``x @ w_ih.T + b_ih + m @ w_hh.T + b_hh``; then ``c' = sigmoid(f) * c + sigmoid(i) * tanh(g)``
    and ``h' = sigmoid(o) * tanh(c')``.

    Here x is ``input``, ``[batch, input_size]``; h, ``[batch, output_size]``, and c, ``[batch,
    hidden_size]``, are ``hidden``. Parameters have the shapes of :class:`mLSTMRNNCell`'s.
    """
    h, c = hidden
    m = F.linear(input, w_mih) * F.linear(h, w_mhh)
    return lstm_update(F.linear(input, w_ih, b_ih) + F.linear(m, w_hh, b_hh), c)
