"""Old names of NVIDIA's Apex: recurrent networks that keep their state between forwards.

``LSTM``, ``GRU``, ``ReLU``, ``Tanh`` and ``mLSTM`` are functions that build a
:class:`~apex.RNN.RNNBackend.stackedRNN` or a :class:`~apex.RNN.RNNBackend.bidirectionalRNN`. For
layers that keep no state use ``torch.nn.LSTM``, ``torch.nn.GRU`` or ``torch.nn.RNN``.
"""

from apex.RNN import models
from apex.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "models"]
