"""A training step that becomes one CUDA graph.

| state | calls |
|---|---|
| warm-up | run as they are, real steps, on the stream of the capture. The last one is looked at \
for what a capture would not take (:mod:`~apex.amp.graphs.probe`) |
| graph | with the arguments' kind of the capture replay; others run as they are |
| no graph, for good | run as they are: on a CPU, without amp, or after a capture has failed |

After the warm-up, a call of a kind that has been seen before is captured, and replayed at once: it
is a step, too. What has changed since is looked at before each replay
(:mod:`~apex.amp.graphs.followed`); after a change one step runs as it is, and the next one is
captured anew. A replay reads scale, counts, masters and state where steps without it leave them,
since amp writes them in place.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch.optim import optimizer as torch_optimizer

from apex._compat import private
from apex._compat.program import stacklevel
from apex.amp import _speech
from apex.amp.gradients import captures, overflow
from apex.amp.gradients.masters import table
from apex.amp.graphs import arguments as kinds
from apex.amp.graphs import device as devices
from apex.amp.graphs.followed import Followed, is_settled, state_to_capture
from apex.amp.graphs.probe import Probe, describe
from apex.amp.optimizer import OptimizerState
from apex.amp.training import is_disabled, managed_states
from apex.ops import _runtime

_Results = TypeVar("_Results")

WARM_UP = 3
# A graph that serves fewer calls than this was captured in vain: twice as many calls run without
# one before the next capture.
FEW_CALLS, MOST_CALLS = 16, 32
MOST_KINDS = 64  # of arguments, all of them different, before a graph
EVERY = 8  # replays: a report, for a copy takes 10 us of the host

_thread = threading.local()  # is_busy: whether a step is under way


def capture(
    function: Callable[..., _Results],
    warmup: int = WARM_UP,
    *,
    generators: Iterable[torch.Generator] = (),
) -> CapturedStep[_Results]:
    """Make a training step that a GPU replays as one CUDA graph, dynamic loss scale included.

    The weights after any number of calls equal those of as many steps without the graph. On a CPU
    each call runs ``function`` itself, with the same checks.

    Args:
        function: A whole training step: ``zero_grad``, forward, ``scale_loss``, clipping, ``step``.
            Its arguments are tensors, numbers and containers of them. It returns tensors,
            containers of them, or ``None``. Call schedulers, and read values on the host, outside
            of it.
        warmup: Number of calls that run without a graph before one is captured; at least 1.
        generators: Random generators that ``function`` uses besides the device's default one.

    Returns:
        The function to call instead of ``function``. It copies its arguments, and returns copies of
        the results, detached from autograd.

    Raises:
        TypeError: ``function`` is not callable. In a call: ``function`` returned a number.
        ValueError: ``warmup`` is not an integer of at least 1.
        RuntimeError: In a call: the step runs on several ranks, is watched by apex.debug, or uses
            an optimizer that a graph cannot step; or something changed that replays cannot notice.

    Warns:
        UserWarning: Once, if a step cannot be captured. The text names the cause and the line, and
            says what to do. Training goes on without a graph.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> def train_step(x):
        ...     optimizer.zero_grad()
        ...     loss = model(x).float().square().mean()
        ...     with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step = amp.capture(train_step)
        >>> for _ in range(10):
        ...     loss = step(torch.ones(4, 2))
    """
    if not callable(function):
        raise TypeError(
            f"amp.capture: function was {function!r}; pass a function that makes one training step."
        )
    if type(warmup) is not int or warmup < 1:
        raise ValueError(f"amp.capture: warmup was {warmup!r}; it must be a whole number above 0.")
    private.need("amp.capture")
    return CapturedStep(function, warmup, list(generators))


class _Graph(NamedTuple):
    """A graph that was captured: tensors that it reads, leaves, and writes to besides."""

    key: Any
    followed: Followed
    inputs: list[torch.Tensor]
    results: Any
    held: list[torch.Tensor]
    reports: Reports


class CapturedStep(Generic[_Results]):
    """What :func:`capture` returns.

    Attributes:
        replays: How many calls were replays.
        calls: How many calls there were.
    """

    def __init__(
        self, function: Callable[..., _Results], warmup: int, generators: list[torch.Generator]
    ) -> None:
        self.calls = self.replays = 0
        self._function, self._generators = function, generators
        self._name = getattr(function, "__qualname__", type(function).__name__)
        # Kinds of arguments that were seen; of those that were looked at, what a graph follows.
        self._kinds: dict[Any, Followed | None] = {}
        self._first, self._last = warmup, 0  # calls that are looked at: from which on, and the last
        self._wait = 0  # calls between the last change and the next capture
        self._device_graph: Any = None
        self._graph: _Graph | None = None
        self._why = ""  # there will be no graph
        self._has_told = False  # of a choice between tensors

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "amp.capture: a captured step cannot be copied or pickled, because it belongs to the "
            "model and optimizers of its function. Copy these, and call amp.capture again."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> _Results:
        """Take a step."""
        if getattr(_thread, "is_busy", False) or _runtime.capturing():
            raise RuntimeError(
                "amp.capture: a captured step was called inside another one, or inside the capture "
                "of a CUDA graph. Capture the outer function only."
            )
        _thread.is_busy = True
        self.calls += 1
        try:
            return self._run(None, args, kwargs) if self._why else self._step(args, kwargs)
        except BaseException:
            self._forget()
            raise
        finally:
            _thread.is_busy = False

    def _step(self, args: Any, kwargs: Any) -> _Results:
        tensors: list[torch.Tensor] = []
        try:
            key = kinds.key_of((args, kwargs), tensors), kinds.surroundings()
        except kinds.Unfollowed as reason:
            self._give_up(str(reason))
            return self._run(None, args, kwargs)
        graph = self._graph
        followed = self._kinds.get(key) if graph is None else graph.followed
        change = "" if followed is None else followed.change()
        if change:
            self._changed(change)
        elif followed is not None and self._device_graph is not None and followed.is_in_its_mode():
            if graph is None:
                return self._capture(followed, key, tensors, args, kwargs)
            if graph.key == key:
                return self._replay(graph, tensors)
        if change or followed is None:
            return self._look(key, tensors, args, kwargs)
        return self._run(followed, args, kwargs)

    def _changed(self, change: str) -> None:
        """Capture anew after some calls: the more, the more graphs were captured in vain."""
        in_vain = self.calls - self._last < FEW_CALLS
        self._wait = min(max(1, 2 * self._wait), MOST_CALLS) if in_vain else 1
        self._first = self.calls + self._wait - 1
        self._forget()
        if self._wait == MOST_CALLS // 2:
            self._warn(
                f"{self._name} is captured again and again, each time after more calls without a "
                f"CUDA graph, because {change} changes within {FEW_CALLS} calls. apex writes only "
                "learning rates to the device; keep other numbers constant "
                "(OneCycleLR(cycle_momentum=False))"
            )

    def _forget(self) -> None:
        """Drop the graph, and what was seen for one."""
        self._graph, self._kinds = None, dict.fromkeys(self._kinds)
        if self._device_graph is not None:
            self._device_graph.release()

    def _give_up(self, reason: str) -> None:
        """Go on without a graph, for good."""
        self._forget()
        self._why = reason
        self._warn(
            f"{self._name} cannot be captured, so its steps continue without a CUDA graph: {reason}"
        )

    def _warn(self, text: str) -> None:
        warnings.warn(f"amp.capture: {text} (docs/graphs.md).", stacklevel=stacklevel())

    # -- steps without the graph -------------------------------------------------------------------

    def _look(self, key: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> _Results:
        """A real step, to learn of the optimizers; after the warm-up, of what a graph follows."""
        if self._device_graph is None:
            self._device_graph = _device_graph()
        is_late = self.calls >= self._first and (key in self._kinds or not self._kinds)
        graph = self._device_graph
        device = torch.device("cpu") if graph is None else graph.device
        probe = Probe(device, tensors) if is_late else None
        with _stepped() as optimizers, probe or contextlib.nullcontext():
            results = self._run(None, args, kwargs)
        self._kinds.setdefault(key)
        if all(map(is_disabled, optimizers)):
            self._why = "amp is disabled"
            return results
        states = list(map(state_to_capture, optimizers))
        if probe is not None and probe.found:
            self._give_up(probe.found)
        elif probe is not None and is_settled(states):
            self._kinds[key], self._last = probe.followed(self._function, optimizers), self.calls
            if probe.chosen and not kinds.has_number((args, kwargs)) and not self._has_told:
                self._has_told = True
                self._warn(
                    f"{self._name} reads one of several tensors in `{probe.chosen[0]}`, and a "
                    "replay reads the same tensor again. If other calls should read other tensors, "
                    "pass the tensor as an argument"
                )
        elif len(self._kinds) > MOST_KINDS:
            self._give_up(
                f"its arguments had {MOST_KINDS} combinations of shapes and numbers. Pass a number "
                "that changes as a tensor on the device, and pad tensors to one shape"
            )
        return results

    def _run(self, followed: Followed | None, args: Any, kwargs: Any) -> _Results:
        """A real step: call the function."""
        graph = self._device_graph
        if followed is not None:
            followed.check()
        with contextlib.nullcontext() if graph is None else graph.on_its_stream():
            found = self._function(*args, **kwargs)
        if followed is not None and (change := followed.change_by_call()):
            self._changed(change)
        results: _Results = kinds.rebuilt(found, kinds.copied, kinds.only_none)
        return results

    # -- the graph ---------------------------------------------------------------------------------

    def _capture(
        self, followed: Followed, key: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> _Results:
        """Capture the function, and replay the graph: that is this call's step."""
        inputs = [tensor.detach().clone() for tensor in tensors]
        own = iter(inputs)
        own_args, own_kwargs = kinds.rebuilt(
            (args, kwargs), lambda _: next(own), lambda value: value
        )
        before = Snapshot(followed.states)

        def step() -> Any:
            found = self._function(*own_args, **own_kwargs)
            followed.note_skipped()
            return found

        try:
            with followed.on_the_device(), _stepped() as optimizers:
                found = self._device_graph.capture(step, self._generators)
            if set(map(id, optimizers)) != set(map(id, followed.optimizers)):
                raise RuntimeError(
                    "amp.capture: calls of the function step different optimizers. A replay "
                    "repeats one call, so capture a function that steps the same optimizers each "
                    "time"
                )
            results = kinds.rebuilt(found, torch.Tensor.detach, kinds.only_none)
        except BaseException as error:
            before.put_back()
            if not isinstance(error, Exception):
                raise
            self._give_up(describe(error))
            return self._run(None, args, kwargs)
        held = followed.end_capture(before.gradients)
        graph = _Graph(key, followed, inputs, results, held, Reports(followed.states))
        self._graph = graph
        return self._replay(graph, tensors)

    def _replay(self, graph: _Graph, tensors: list[torch.Tensor]) -> _Results:
        graph.followed.follow()
        if tensors:
            private.foreach_copy_(graph.inputs, tensors, non_blocking=True)
        self._device_graph.replay()
        self.replays += 1
        if table.with_before:  # as a step does
            table.forget_before()
        graph.reports.after_replay()
        results: _Results = kinds.rebuilt(graph.results, torch.clone, kinds.only_none)
        return results

    def __repr__(self) -> str:
        calls = f"{self.calls} calls, {self.replays} of them replays"
        if self._why:
            return f"<amp.capture of {self._name}: {calls}; no graph: {self._why}>"
        graph = "not captured yet" if self._graph is None else "a graph"
        return f"<amp.capture of {self._name}: {calls}; {graph}>"


@contextlib.contextmanager
def _stepped() -> Iterator[list[Any]]:
    """Inside of this context, list the optimizers that are stepped, or whose step is skipped."""
    found: list[Any] = []
    thread = threading.get_ident()  # the hook and the counts are of all threads

    def note(optimizer: Any, *arguments: object) -> None:
        if threading.get_ident() == thread and not any(
            [state.is_stepping for state in managed_states()]
        ):
            found.append(optimizer)  # which amp does not manage

    before = {state: state.ledger.steps for state in managed_states()}
    hook = torch_optimizer.register_optimizer_step_post_hook(note)
    captures.hooks += 1
    try:
        yield found
    finally:
        captures.hooks -= 1
        hook.remove()
    for state in managed_states():
        ledger = state.ledger
        if ledger.steps != before.get(state, 0) and ledger.stepped_in == thread:
            found.append(state.optimizer())
    if not found:
        raise RuntimeError(
            "amp.capture: the function stepped no optimizer. Pass a whole training step: "
            "zero_grad, forward, amp.scale_loss, backward, optimizer.step()."
        )


def _device_graph() -> Any:
    """The graph of the first GPU that has parameters which amp manages; ``None`` without one."""
    params = [p for state in managed_states() for p in state.params.stepped]
    device = next((param.device for param in params if devices.has_graphs(param.device)), None)
    return None if device is None else devices.DeviceGraph(device)


# -- what a step has changed, and skipped ----------------------------------------------------------


class Snapshot:
    """What Python holds of a step, to be put back after a capture that has failed in the middle.

    Nothing was computed, so memory is as before. But gradients are tensors that nothing has filled,
    and amp's records are those of a step that has not been taken.

    Attributes:
        gradients: Of weights and masters.
    """

    def __init__(self, states: Sequence[OptimizerState]) -> None:
        weights = [weight for state in states for weight in state.params.targets]
        masters = [master for weight in weights if (master := table.get(weight)) is not None]
        tensors = [*weights, *(master.tensor for master in masters)]
        owners: list[tuple[Any, Sequence[str]]] = [
            *((tensor, ["grad"]) for tensor in tensors),
            *((master, ("taken", "waiting")) for master in masters),
            *((state.params, ["exposed"]) for state in states),
            *((state.ledger, [*vars(state.ledger)]) for state in states),
        ]
        self._records = [
            (o, name, _copied(getattr(o, name))) for o, names in owners for name in names
        ]
        self.gradients = [grad for tensor in tensors if (grad := tensor.grad) is not None]

    def put_back(self) -> None:
        """Put all of it back."""
        for owner, name, value in self._records:
            setattr(owner, name, value)


def _copied(value: Any) -> Any:
    """Copy what is written in place."""
    return copy.copy(value) if isinstance(value, (list, set)) else value


class Reports:
    """The skipped steps of replays, for optimizers of which steps can be skipped.

    A replay runs no code of the host, so it sends no report as an eager step does. Every few
    replays a copy of the counts is sent, and what an earlier one has brought is logged.
    """

    def __init__(self, states: Sequence[OptimizerState]) -> None:
        self._states = [state for state in states if state.training.is_dynamic()]
        self._sent: Any = None
        self._replays = 0

    def after_replay(self) -> None:
        """Log what has arrived, and send for the next report.

        Raises:
            RuntimeError: Too many steps in a row were skipped.
        """
        self._replays += 1
        if self._replays % EVERY or not self._states:
            return
        arrived = [] if self._sent is None else self._sent.read()
        if arrived is None:
            return
        states = [(one.overflow, one.training.loss_scalers[0].numbers) for one in self._states]
        sent = [x for one, scale in states for x in (one.counts.numbers.float(), scale[:1])]
        copy = overflow.AsyncCopy(torch.cat(sent))
        self._sent = copy if copy.arrives else None
        for place, state in zip(range(0, len(arrived), 4), self._states, strict=False):
            _tell(state.overflow, *arrived[place : place + 4])


def _tell(
    known: overflow.Overflow, taken: float, steps: float, in_a_row: float, scale: float
) -> None:
    skipped, before = int(steps - taken), known.told
    known.told = skipped
    if in_a_row >= known.limit:
        report = overflow.SkippedStep(int(in_a_row), 0, 0, scale, True)
        raise RuntimeError(report.describe("(Replays of a CUDA graph report late.)"))
    if skipped > before and known.verbosity > 0:
        _speech.say(
            f"Gradient overflow.  {skipped} of {int(steps)} steps were skipped so far; the loss "
            f"scale is {scale}",
            logging.WARNING,
        )
