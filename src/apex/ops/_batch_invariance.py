"""The switch of :class:`batch_invariant`, and what waits for it.

Without torch, as `apex.ops` is imported by programs that want the switch alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar

__all__ = ["batch_invariant", "when_on"]

on = False  #: Whether operations compute each row as if it were alone; others read it.
_holds = 0  # plain calls and blocks, of all threads
_lock = threading.Lock()
_waiting: list[Callable[[], None]] = []

_RUN_LATER = (isasyncgenfunction, iscoroutinefunction, isgeneratorfunction)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class batch_invariant:  # lower case, like torch.set_grad_enabled: used as a function
    """Make what is computed of a row the same, bit for bit, whatever the batch it is in.

    The number of rows, the place of the row among them and the strides of the batch change neither
    the row of the output nor the row of the input's gradient, in layer norm, RMS norm, softmax
    (masked, causal, generic), cross-entropy, rotary embeddings and SwiGLU. Gradients of weights are
    sums over the batch, and products and attention are PyTorch's: docs/which-kernel.md says what
    else is not covered.

    It holds for the whole process from the call on, as threads of autograd run forwards again in
    ``torch.utils.checkpoint``; in a ``with`` block until the end of the last block, of whichever
    thread; as a decorator while the function runs. A backward takes the path of its forward,
    wherever it runs.

    On a GPU the kernels compute everything: where none can run, a call raises a ``RuntimeError``.

    Example:
        >>> with batch_invariant():
        ...     pass
        >>> @batch_invariant()
        ... def logits(model, tokens):
        ...     return model(tokens)
        >>> always = batch_invariant()  # from now on
        >>> always.off()
    """

    def __init__(self) -> None:
        self._holds = True  # until a block takes it over
        _hold(1)

    def off(self) -> None:
        """End what a call outside of a ``with`` block began."""
        if self._holds:
            self._holds = False
            _hold(-1)

    def __enter__(self) -> batch_invariant:
        if not self._holds:
            _hold(1)
        self._holds = False
        return self

    def __exit__(self, *exception: object) -> None:
        _hold(-1)

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function; not one whose body runs after the call (``yield``, ``async``)."""
        self.off()
        if not callable(function):
            raise TypeError(
                f"batch_invariant() got {type(function).__name__}; pass a function to decorate, as "
                "in @batch_invariant(). Without an argument the call turns batch invariance on "
                "until you turn it off"
            )
        if any(runs_later(function) for runs_later in _RUN_LATER):
            name = getattr(function, "__name__", repr(function))
            raise TypeError(
                f"batch_invariant: the body of {name} runs after the call (yield or async), when "
                "batch invariance is off again; write `with batch_invariant():` in the body"
            )

        @functools.wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with batch_invariant():
                return function(*args, **kwargs)

        return decorated  # type: ignore[return-value]


def when_on(make: Callable[[], None]) -> None:
    """Call ``make`` now if the switch is on, else when it is first turned on."""
    if on:
        make()
    else:
        _waiting.append(make)


def _hold(change: int) -> None:
    global on, _holds  # noqa: PLW0603  one setting of the process
    with _lock:
        _holds += change
        while _holds and _waiting:
            _waiting.pop()()
        on = _holds > 0
