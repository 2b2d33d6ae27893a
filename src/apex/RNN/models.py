"""The five kinds of recurrent networks by name, with the arguments of ``torch.nn.LSTM``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

# Names, not torch.lstm_cell at each call: registrations of amp replace that attribute later.
from torch import gru_cell, lstm_cell, rnn_relu_cell, rnn_tanh_cell

from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

_Network: TypeAlias = "stackedRNN | bidirectionalRNN"


def toRNNBackend(
    inputRNN: RNNCell | Sequence[RNNCell],
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    *,
    batch_first: bool = False,
) -> _Network:
    """Build a :class:`stackedRNN` or, if ``bidirectional``, a :class:`bidirectionalRNN` of a cell.

    Other arguments and errors are those of :class:`stackedRNN`.
    """
    kind = bidirectionalRNN if bidirectional else stackedRNN
    return kind(inputRNN, num_layers, dropout, batch_first=batch_first)


def _network(cell: Callable[[int, int, bool, int | None], RNNCell]) -> Callable[..., _Network]:
    """Make a function that builds networks out of one that makes their first cell."""

    def build(
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> _Network:
        first = cell(input_size, hidden_size, bias, output_size)
        return toRNNBackend(first, num_layers, bidirectional, dropout, batch_first=batch_first)

    build.__name__ = build.__qualname__ = cell.__name__
    build.__doc__ = cell.__doc__
    return build


@_network
def LSTM(input_size: int, hidden_size: int, bias: bool, output_size: int | None) -> RNNCell:
    """Build an LSTM with the arguments of ``torch.nn.LSTM``. One layer computes the same numbers.

    Each forward starts from the states in which the previous one ended. Call ``detach_hidden()``
    between an optimizer step and the next forward. Call ``reset_hidden(batch)`` at the beginning of
    a new sequence. :class:`~apex.RNN.RNNBackend.stackedRNN` describes the arguments and results of
    a forward.

    ``output_size`` is torch's ``proj_size``, the number of features of the output h; ``None`` means
    ``hidden_size``. ``bidirectional`` makes two independent stacks, a
    :class:`~apex.RNN.RNNBackend.bidirectionalRNN`.

    Raises:
        ArgumentError: A number is out of range. It is a RuntimeError, TypeError and ValueError.

    Example:
        >>> network = LSTM(10, 20, num_layers=2)
        >>> output, (h, c) = network(torch.randn(5, 3, 10))
        >>> output.shape, h.shape, c.shape
        (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]), torch.Size([2, 3, 20]))
    """
    return RNNCell(4, input_size, hidden_size, lstm_cell, 2, bias, output_size)


@_network
def GRU(input_size: int, hidden_size: int, bias: bool, output_size: int | None) -> RNNCell:
    """Build a GRU. One layer computes the same numbers as ``torch.nn.GRU``.

    Arguments and errors are those of :func:`LSTM`. A GRU has no projection, so an ``output_size``
    other than ``hidden_size`` raises ArgumentError.
    """
    return RNNCell(3, input_size, hidden_size, gru_cell, 1, bias, output_size)


@_network
def ReLU(input_size: int, hidden_size: int, bias: bool, output_size: int | None) -> RNNCell:
    """Build a network of ``h' = relu(w_ih x + b_ih + w_hh h + b_hh)``.

    See :func:`LSTM` for the arguments.
    """
    return RNNCell(1, input_size, hidden_size, rnn_relu_cell, 1, bias, output_size)


@_network
def Tanh(input_size: int, hidden_size: int, bias: bool, output_size: int | None) -> RNNCell:
    """Build a network of ``h' = tanh(w_ih x + b_ih + w_hh h + b_hh)``.

    See :func:`LSTM` for the arguments.
    """
    return RNNCell(1, input_size, hidden_size, rnn_tanh_cell, 1, bias, output_size)


@_network
def mLSTM(input_size: int, hidden_size: int, bias: bool, output_size: int | None) -> RNNCell:
    """Build a multiplicative LSTM, a network of :func:`~apex.RNN.cells.mLSTMCell`.

    See :func:`LSTM` for the arguments.
    """
    return mLSTMRNNCell(input_size, hidden_size, bias, output_size)
