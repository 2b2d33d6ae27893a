"""The five kinds of recurrent networks by name, with the arguments of ``torch.nn.LSTM``."""

from __future__ import annotations

from collections.abc import Sequence

# Names, not torch.lstm_cell at each call: registrations of amp replace that attribute later.
from torch import gru_cell, lstm_cell, rnn_relu_cell, rnn_tanh_cell

from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "toRNNBackend"]


def toRNNBackend(
    inputRNN: RNNCell | Sequence[RNNCell],
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    *,
    batch_first: bool = False,
) -> stackedRNN | bidirectionalRNN:
    """Build a :class:`stackedRNN`, or a :class:`bidirectionalRNN`, of a cell.

    Args:
        inputRNN: A cell, or a list of one cell for each layer.
        num_layers: 1 or more.
        bidirectional: Which of the two.
        dropout: Between layers, in training.
        batch_first: Whether input and output are ``[batch, seq, features]``.

    Raises:
        AssertionError: The list is not ``num_layers`` long.
        ArgumentError: Another argument is wrong; it is a RuntimeError, TypeError and ValueError.

    Example:
        >>> type(toRNNBackend(mLSTMRNNCell(10, 20), num_layers=2)).__name__
        'stackedRNN'
    """
    kind = bidirectionalRNN if bidirectional else stackedRNN
    return kind(inputRNN, num_layers, dropout, batch_first=batch_first)


def LSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Build an LSTM; one layer computes what ``torch.nn.LSTM`` does.

    The network continues, in each forward, from the states that the previous one ended with: call
    ``detach_hidden()`` between an optimizer step and the next forward, ``reset_hidden(batch)`` at
    the beginning of another text. See :class:`~apex.RNN.RNNBackend.stackedRNN` and
    :class:`~apex.RNN.RNNBackend.bidirectionalRNN` for what a forward takes and returns.

    Args:
        input_size: Features of the input.
        hidden_size: Features of each state.
        num_layers: 1 or more.
        bias: Whether there are biases.
        batch_first: Whether input and output are ``[batch, seq, features]``.
        dropout: Probability with which, in training, features between two layers become zero.
        bidirectional: Whether a second, independent stack reads the sequence from its end.
        output_size: Features of the output h, projected; ``None`` means ``hidden_size``. It is
            torch's ``proj_size``.

    Raises:
        ArgumentError: A number is out of range; it is a RuntimeError, TypeError and ValueError.

    Example:
        >>> network = LSTM(10, 20, num_layers=2)
        >>> output, (h, c) = network(torch.randn(5, 3, 10))
        >>> output.shape, h.shape, c.shape
        (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]), torch.Size([2, 3, 20]))
    """
    cell = RNNCell(4, input_size, hidden_size, lstm_cell, 2, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first=batch_first)


def GRU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Build a GRU; one layer computes what ``torch.nn.GRU`` does.

    Arguments and errors are those of :func:`LSTM`, except that a GRU has no projection: an
    ``output_size`` other than ``hidden_size`` is an ArgumentError (in NVIDIA's Apex, one at the
    first forward).

    Example:
        >>> output, (h,) = GRU(10, 20, num_layers=2)(torch.randn(5, 3, 10))
        >>> output.shape
        torch.Size([5, 3, 20])
    """
    cell = RNNCell(3, input_size, hidden_size, gru_cell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first=batch_first)


def ReLU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Build a network of ``h' = relu(w_ih x + b_ih + w_hh h + b_hh)``.

    Arguments and errors are those of :func:`LSTM`.

    Example:
        >>> output, (h,) = ReLU(10, 20, num_layers=2, output_size=6)(torch.randn(5, 3, 10))
        >>> output.shape
        torch.Size([5, 3, 6])
    """
    cell = RNNCell(1, input_size, hidden_size, rnn_relu_cell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first=batch_first)


def Tanh(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Build a network of ``h' = tanh(w_ih x + b_ih + w_hh h + b_hh)``.

    Arguments and errors are those of :func:`LSTM`.

    Example:
        >>> output, (h,) = Tanh(10, 20, num_layers=2, output_size=6)(torch.randn(5, 3, 10))
        >>> output.shape
        torch.Size([5, 3, 6])
    """
    cell = RNNCell(1, input_size, hidden_size, rnn_tanh_cell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first=batch_first)


def mLSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Build a multiplicative LSTM; see :func:`~apex.RNN.cells.mLSTMCell`.

    Arguments and errors are those of :func:`LSTM`.

    Example:
        >>> output, (h, c) = mLSTM(10, 20, num_layers=2, output_size=6)(torch.randn(5, 3, 10))
        >>> output.shape
        torch.Size([5, 3, 6])
    """
    cell = mLSTMRNNCell(input_size, hidden_size, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first=batch_first)
