"""A recurrent cell, and how its layer is run over a whole sequence.

Where the cell computes one step with a function of torch (``torch.lstm_cell``), its layer calls
torch's function for whole sequences (``torch.lstm``) with the cell's parameters. Any other layer
calls the cell once for each time step. Both ways compute the same up to rounding.

Torch is given single layers, never a whole stack, so that layers may be of different kinds,
dropout draws the same random numbers either way, and a backward pass after a forward in
``eval()`` works on every device (cuDNN must be told in the forward).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex._compat import private
from apex.ops._check import ArgumentError
from apex.ops._runtime import autocasts, not_compiled

_Cell = TypeVar("_Cell", bound="RNNCell")


class _TorchLayer(NamedTuple):
    """What there is for a layer whose cell computes its steps with a function of torch."""

    sequence: Callable[..., Any]  # torch's, for all steps
    module: Callable[..., nn.RNNBase]
    update: Callable[..., Any] | None  # of gates, where torch's step does not take projected states


def lstm_update(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new h and c; ``gates`` are i, f, g and o side by side, before their functions."""
    i, f, g, o = gates.chunk(4, 1)
    c = c.to(gates.dtype)  # under autocast the gates are 16-bit
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


_RELU = partial(nn.RNN, nonlinearity="relu")
_TORCH_LAYERS: tuple[tuple[Any, _TorchLayer], ...] = (  # with what computes one step
    (torch.lstm_cell, _TorchLayer(torch.lstm, nn.LSTM, lstm_update)),
    (torch.gru_cell, _TorchLayer(torch.gru, nn.GRU, None)),
    (torch.rnn_relu_cell, _TorchLayer(torch.rnn_relu, _RELU, torch.relu)),
    (torch.rnn_tanh_cell, _TorchLayer(torch.rnn_tanh, nn.RNN, torch.tanh)),
)


class RNNCell(nn.Module):
    """One step of a recurrent layer, with its parameters and its state.

    Each forward continues from the previous one, and a backward pass reaches into earlier ones:
    call :meth:`detach_hidden` or :meth:`reset_hidden` between an optimizer step and a forward.

    ``cell`` is a function ``(input, hidden, w_ih, w_hh, b_ih=, b_hh=)`` that returns new states,
    such as ``torch.lstm_cell`` with ``gate_multiplier=4`` and ``n_hidden_states=2``; ``hidden`` is
    a tensor if there is one state, else a list. ``output_size`` is that of state 0, the output;
    ``None`` means ``hidden_size``. Another one projects state 0 by ``w_ho``, and the projected
    state is what the next step gets. A size less than 1, and a projected GRU, are an ArgumentError,
    which is a RuntimeError, TypeError and ValueError.

    Parameters, uniform in ``±1 / sqrt(hidden_size)``: ``w_ih`` of shape ``[gates * hidden_size,
    input_size]``, ``w_hh`` ``[gates * hidden_size, output_size]``, ``w_ho`` ``[output_size,
    hidden_size]`` if these two differ, ``b_ih`` and ``b_hh`` ``[gates * hidden_size]`` if ``bias``.

    Attributes:
        hidden: The states, each ``None`` or ``[batch, features]``. They are not in the state dict.
    """

    w_ih: nn.Parameter
    w_hh: nn.Parameter
    w_ho: nn.Parameter | None
    b_ih: nn.Parameter | None
    b_hh: nn.Parameter | None
    # What modules that an older Apex pickled whole may lack.
    n_hidden_states, bias = 2, False
    _left: Any  # the states that the last run_layer left, and the backward pass that it ran in

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Callable[..., Any],
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        private.need("apex.RNN")
        super().__init__()
        self.gate_multiplier, self.input_size = gate_multiplier, input_size
        self.hidden_size, self.cell = hidden_size, cell
        self.n_hidden_states, self.bias = n_hidden_states, bias
        self.output_size = hidden_size if output_size is None else output_size
        sizes = ("gate_multiplier", "input_size", "hidden_size", "output_size", "n_hidden_states")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; pass 1 or more.")
        gates = gate_multiplier * hidden_size
        projected = self.output_size != hidden_size
        found = _torch_layer(cell)
        if projected and found is not None and found.update is None:
            raise ArgumentError(
                f"a GRU's output_size is {output_size} and its hidden_size {hidden_size}; they "
                "must be equal, because its new state is an average of the old state and a "
                "candidate state. Leave output_size out, and put a torch.nn.Linear after the "
                "network."
            )
        for name, is_there, shape in (
            ("w_ih", True, (gates, input_size)),
            ("w_hh", True, (gates, self.output_size)),
            ("w_ho", projected, (self.output_size, hidden_size)),
            ("b_ih", bias, (gates,)),
            ("b_hh", bias, (gates,)),
        ):
            empty = torch.empty(shape, device=None, dtype=None) if is_there else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.hidden = [None] * n_hidden_states
        self.reset_parameters()
        self.flatten_parameters()

    @functools.cached_property
    def hidden(self) -> list[Tensor | None]:
        """The states."""
        return [None] * self.n_hidden_states

    def reset_parameters(self, gain: float = 1) -> None:
        """Draw new parameters, uniform in ``±1 / sqrt(hidden_size)``; ``gain`` is not used."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def new_like(self: _Cell, new_input_size: int | None = None) -> _Cell:
        """Return a cell of the same settings, dtype and device, with new parameters and no state.

        A subclass whose constructor takes other arguments overrides this.
        """
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(*self._settings(size)).to(self.w_ih)

    def _settings(self, input_size: int) -> tuple[Any, ...]:  # the constructor's arguments
        sizes = self.gate_multiplier, input_size, self.hidden_size
        return *sizes, self.cell, self.n_hidden_states, self.bias, self.output_size

    def init_hidden(self, bsz: int) -> None:
        """Make the states ready for a batch of ``bsz``.

        A state that is missing, or has another batch size, becomes zeros. Any other keeps its
        values and is brought to the dtype and device of the parameters.
        """
        hidden: list[Tensor | None] = []
        for index, state in enumerate(self.hidden):
            if state is None or state.size(0) != bsz:
                features = self.hidden_size if index else self.output_size
                state = self.w_ih.new_zeros(bsz, features)
            elif not torch.compiler.is_compiling() and state.is_inference():
                state = state.clone()  # autograd cannot save one made under inference_mode
            hidden.append(state.to(self.w_ih))
        self.hidden = hidden  # a new list: replicas of DataParallel share the old one

    def reset_hidden(self, bsz: int) -> None:
        """Set the states to zeros for a batch of ``bsz``."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    init_inference = reset_hidden  # before an evaluation

    def detach_hidden(self) -> None:
        """End the history of the states: backward stops here. ``RuntimeError`` if there is none."""
        if any(state is None for state in self.hidden):
            raise RuntimeError(
                "detach_hidden: this cell has no state yet; call it after a forward or after "
                "init_hidden(batch size)."
            )
        self.hidden = _detached(self.hidden)

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Compute one step from the stored states; store the new ones and return them.

        ``input`` is ``[batch, input_size]``, in the dtype of the parameters unless autocast is on.
        The states are ``[batch, output_size]`` and then ``[batch, hidden_size]``. Anything else is
        an ArgumentError, as is another number of states than ``n_hidden_states``.
        """
        check_input("RNNCell", input, self, "[batch, {}]")
        self.init_hidden(input.size(0))
        found = None if self.w_ho is None else _torch_layer(self.cell)
        h, *others = hidden = cast("list[Tensor]", self.hidden)
        if found is None or found.update is None:
            given = hidden if others else h
            new = self.cell(input, given, *self._weights(), b_ih=self.b_ih, b_hh=self.b_hh)
        else:
            gates = F.linear(input, self.w_ih, self.b_ih) + F.linear(h, self.w_hh, self.b_hh)
            new = found.update(gates, *others)
        states = [new] if isinstance(new, Tensor) else list(new)
        if len(states) != self.n_hidden_states:
            raise ArgumentError(
                f"the function cell returned {len(states)} states and n_hidden_states is "
                f"{self.n_hidden_states}. Pass n_hidden_states={len(states)}."
            )
        if self.w_ho is not None:
            states[0] = F.linear(states[0], self.w_ho)
        self.hidden = states
        return tuple(states)

    def _weights(self) -> tuple[Tensor, ...]:  # that ``cell`` takes by position
        return self.w_ih, self.w_hh

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RNNCell:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.flatten_parameters()
        return self

    def flatten_parameters(self) -> None:
        """Put the parameters into one block of memory, by torch's method of this name.

        Called when the cell is moved or cast. Without it cuDNN copies them in each forward and
        warns.
        """
        found = _whole_sequence(self)
        weights = _sequence_weights(self)
        if found is None or not all(isinstance(weight, nn.Parameter) for weight in weights):
            return
        sizes = {} if self.w_ho is None else {"proj_size": self.output_size}
        layer = found.module(
            self.input_size, self.hidden_size, bias=self.b_ih is not None, device="meta", **sizes
        )
        for (name, _), weight in zip(list(layer.named_parameters()), weights, strict=True):
            setattr(layer, name, weight)
        layer.flatten_parameters()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles get the values of the states without their history."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "hidden": _detached(self.hidden), "_left": (None, -1)}

    def extra_repr(self) -> str:
        """Show the sizes in ``print(model)``."""
        name = getattr(self.cell, "__name__", type(self.cell).__name__)
        sizes = f"{self.input_size}, {self.hidden_size}, output_size={self.output_size}"
        return f"{name}, {sizes}, bias={self.bias}"


def _detached(states: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if state is None else state.detach() for state in states]


def check_input(name: str, input: Any, cell: RNNCell, form: str) -> None:
    """Check an input that has the form ``form``, where ``{}`` is the number of its features."""
    form = form.format(cell.input_size)
    if not isinstance(input, Tensor):
        raise ArgumentError(f"{name}: the input is a {type(input).__name__}; pass a tensor {form}.")
    if input.dim() != form.count(",") + 1 or input.size(-1) != cell.input_size:
        raise ArgumentError(f"{name}: the input has shape {list(input.shape)}; pass {form}.")
    dtype = cell.w_ih.dtype
    if input.dtype != dtype and not autocasts(input.device.type):
        raise ArgumentError(
            f"{name}: the input is {input.dtype} and the parameters are {dtype}. Cast one: "
            f"input.to({dtype}) or model.to({input.dtype})."
        )


def _torch_layer(step: Any) -> _TorchLayer | None:
    return next((layer for function, layer in _TORCH_LAYERS if function is step), None)


def _whole_sequence(cell: RNNCell) -> _TorchLayer | None:
    """Return what torch has for this cell's layer, if it computes what calling the cell does."""
    found = _torch_layer(cell.cell)
    if found is None or type(cell).forward is not RNNCell.forward or "forward" in cell.__dict__:
        return None  # the program's own forward, of a subclass or set on the cell
    if cell.w_ho is not None and (
        found.module is not nn.LSTM or cell.output_size > cell.hidden_size
    ):
        return None  # torch projects an LSTM's output only, and to fewer features
    # Hooks are called at each step; those of weight norm or sharding set the weights.
    hooks = (cell._forward_pre_hooks, cell._forward_hooks)
    return None if any((*hooks, cell._backward_hooks, cell._backward_pre_hooks)) else found


def _sequence_weights(cell: RNNCell) -> list[Tensor]:  # in the order of torch's functions
    weights = (cell.w_ih, cell.w_hh, cell.b_ih, cell.b_hh, cell.w_ho)
    return [weight for weight in weights if weight is not None]


def run_layer(cell: RNNCell, input: Tensor, collect: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer; return its output, and its states after the last step or after each."""
    backward = -1 if torch.compiler.is_compiling() else private.current_graph_task_id()
    left, left_in = cell.__dict__.get("_left", (None, -1))
    if backward not in (-1, left_in) and cell.hidden is left:
        raise RuntimeError(
            "apex.RNN: this forward runs inside a backward pass, as under torch.utils.checkpoint. "
            "It would start from the states that the last forward left, not from the states of the "
            "original forward. Call reset_hidden(batch size) first, or set cell.hidden."
        )
    found = None if collect else _whole_sequence(cell)
    if found is not None:
        output, states = _run_in_torch(found.sequence, cell, input)
    else:
        steps = [cell(step) for step in input.unbind(0)]
        of_all = tuple(torch.stack(state) for state in zip(*steps, strict=True)) if collect else ()
        output = of_all[0] if collect else torch.stack([states[0] for states in steps])
        states = of_all or steps[-1]
    cell._left = (cell.hidden, backward)
    return output, states


@not_compiled  # torch 2.13: AOT autograd fails on the gradient of oneDNN's LSTM
def _run_in_torch(
    function: Callable[..., Any], cell: RNNCell, input: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    cell.init_hidden(input.size(1))
    hidden = [state.contiguous().unsqueeze(0) for state in cell.hidden if state is not None]
    given = hidden if len(hidden) > 1 else hidden[0]
    train = torch.is_grad_enabled()  # keep what a backward pass needs, in eval() too
    layers, dropout, bidirectional, batch_first = 1, 0.0, False, False
    options = cell.b_ih is not None, layers, dropout, train, bidirectional, batch_first
    output, *final = function(input, given, _sequence_weights(cell), *options)
    states = tuple(state[0] for state in final)
    cell.hidden = list(states)
    return output, states
