"""Old names of NVIDIA's Apex: recurrent networks that keep their state between forwards.

Each of ``LSTM``, ``GRU``, ``ReLU``, ``Tanh`` and ``mLSTM`` is a function that builds a
:class:`~apex.RNN.RNNBackend.stackedRNN` or a :class:`~apex.RNN.RNNBackend.bidirectionalRNN`. For a
layer without a state of its own, use ``torch.nn.LSTM`` and its like.
"""

from apex.RNN import models
from apex.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "models"]
