"""Recurrent networks that keep their state between forwards: LSTM, GRU, ReLU, Tanh and mLSTM.

Each of the five names is a function that builds a :class:`~apex.RNN.RNNBackend.stackedRNN` or a
:class:`~apex.RNN.RNNBackend.bidirectionalRNN`. For a layer without a state of its own, use
``torch.nn.LSTM`` and its like.
"""

from apex.RNN import models
from apex.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "models"]
