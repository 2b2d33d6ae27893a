"""A stack of recurrent layers, and two stacks that read a sequence in both directions.

A stack runs one layer after the other over the whole sequence; :mod:`apex.RNN._cell` says how. The
cells own the parameters and the state. Left out: packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex.ops._check import ArgumentError
from apex.RNN._cell import RNNCell, check_input, run_layer

__all__ = ["RNNCell", "bidirectionalRNN", "stackedRNN"]


def _for_each(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method of a network that calls this method of each of its cells."""

    @functools.wraps(method)
    def call(self: _Layers, *args: Any, **kwargs: Any) -> None:
        for part in self.rnns:
            getattr(part, method.__name__)(*args, **kwargs)

    return call


class _Layers(nn.Module):
    rnns: Any
    _build: Callable[[Any, int], None]
    # What modules that an older Apex pickled whole may lack.
    dropout: float = 0
    batch_first, nLayers = False, 1

    def __init__(
        self,
        inputRNN: RNNCell | Sequence[RNNCell],
        num_layers: int = 1,
        dropout: float = 0,
        *,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.batch_first = batch_first
        self._build(inputRNN, num_layers)

    reset_parameters = _for_each(RNNCell.reset_parameters)
    init_hidden = _for_each(RNNCell.init_hidden)
    reset_hidden = _for_each(RNNCell.reset_hidden)
    init_inference = _for_each(RNNCell.init_inference)
    detach_hidden = _for_each(RNNCell.detach_hidden)


class stackedRNN(_Layers):
    """Layers of cells that continue where the last forward ended.

    Args:
        inputRNN: A cell, from which the further layers are made by ``new_like``, or a list of one
            cell for each layer.
        num_layers: 1 or more.
        dropout: Probability with which, in training, features between two layers become zero.
        batch_first: Whether input and output are ``[batch, seq, features]``.

    Attributes:
        rnns: The cells, so that parameters are called ``rnns.0.w_ih`` and so on.
        nLayers: ``num_layers``.

    Raises:
        AssertionError: The list is not ``num_layers`` long.
        ArgumentError: Another argument is wrong; it is a RuntimeError, TypeError and ValueError.
    """

    def _build(self, given: Any, num_layers: int) -> None:
        if num_layers < 1:
            raise ArgumentError(f"num_layers is {num_layers}; pass 1 or more.")
        if not 0 <= self.dropout <= 1:
            raise ArgumentError(f"dropout is {self.dropout}; pass a probability, from 0 to 1.")
        self.rnns = nn.ModuleList(_cells(given, num_layers))
        self.nLayers = num_layers

    def forward(
        self, input: Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the sequence through the layers.

        Args:
            input: ``[seq, batch, input_size]``; ``[batch, seq, input_size]`` if ``batch_first``.
            collect_hidden: Whether to return the states after every step, not only the last.
            reverse: Whether to read the sequence from its end.

        Returns:
            The output of the last layer, ``[seq, batch, output_size]`` in the order of time (or
            ``batch`` first), and a tuple with one entry for each state: ``[layers, batch,
            features]`` after the last step that was computed, which is the first in time if
            ``reverse``; ``[seq, layers, batch, features]`` if ``collect_hidden``.
        """
        form = "[batch, seq, {}]" if self.batch_first else "[seq, batch, {}]"
        check_input("the recurrent network", input, self.rnns[0], form)
        x = input.transpose(0, 1) if self.batch_first else input
        if x.size(0) == 0:
            raise ArgumentError("the input has no time step; pass a sequence of 1 or more.")
        x = x.flip(0) if reverse else x
        layers = []
        for number, cell in enumerate(self.rnns):
            if number:
                x = F.dropout(x, self.dropout, self.training)
            x, states = run_layer(cell, x, collect_hidden)
            if reverse and collect_hidden:
                states = tuple(state.flip(0) for state in states)
            layers.append(states)
        x = x.flip(0) if reverse else x
        hidden = tuple(torch.stack(states, -3) for states in zip(*layers, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, hidden


class bidirectionalRNN(_Layers):
    """Two independent stacks, of which the second reads the sequence from its end.

    Unlike in torch's layers, no layer gets the other direction's output. Both stacks carry their
    state: the backward stack of the next forward begins with the state that it had at the first
    time step of this one. Arguments are those of :class:`stackedRNN`; the second stack is made by
    ``new_like``.

    Attributes:
        fwd: The stack that reads forward.
        bckwrd: The stack that reads backward.
        rnns: Both, in a list: parameters are called ``fwd.*`` and ``bckwrd.*``.
    """

    def _build(self, given: Any, num_layers: int) -> None:
        dropout, first = self.dropout, self.batch_first
        self.fwd = stackedRNN(given, num_layers, dropout, batch_first=first)
        again = [cell.new_like() for cell in self.fwd.rnns]
        self.bckwrd = stackedRNN(again, num_layers, dropout, batch_first=first)

    @property
    def rnns(self) -> list[stackedRNN]:
        """The two stacks."""
        return [self.fwd, self.bckwrd]

    def forward(
        self, input: Tensor, collect_hidden: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the sequence through both stacks.

        Output and states have the shapes of :meth:`stackedRNN.forward` with twice the features:
        those of the forward stack, then of the backward one.
        """
        forward, forward_hidden = self.fwd(input, collect_hidden)
        backward, backward_hidden = self.bckwrd(input, collect_hidden, reverse=True)
        pairs = zip(forward_hidden, backward_hidden, strict=True)
        return torch.cat((forward, backward), -1), tuple(torch.cat(pair, -1) for pair in pairs)


def _cells(given: Any, num_layers: int) -> list[RNNCell]:
    """Return one cell for each layer, from one cell or from a list of them."""
    if isinstance(given, RNNCell):
        return [given, *(given.new_like(given.output_size) for _ in range(num_layers - 1))]
    if not isinstance(given, (list, tuple, nn.ModuleList)) or not all(
        isinstance(cell, RNNCell) for cell in given
    ):
        raise ArgumentError(
            f"inputRNN is a {type(given).__name__}; pass an RNNCell, or a list of RNNCells, one "
            "for each layer."
        )
    if len(given) != num_layers:
        raise AssertionError(
            f"inputRNN has {len(given)} cells and num_layers is {num_layers}; pass one cell for "
            "each layer."
        )
    widths = [(cell.output_size, cell.hidden_size, cell.n_hidden_states) for cell in given]
    inputs = [cell.input_size for cell in given[1:]]
    if len(set(widths)) > 1 or {*inputs} - {given[0].output_size}:
        raise ArgumentError(
            f"the cells have (output_size, hidden_size, n_hidden_states) {widths}, and from the "
            f"second cell on input_size {inputs}. All cells must have the same sizes, with an "
            "input_size equal to the output_size."
        )
    if len(set(given)) != num_layers:
        raise ArgumentError(
            "a cell is in the list twice; pass cell.new_like(), because each cell has its own "
            "state."
        )
    return list(given)
