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
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.optim import optimizer as torch_optimizer

from apex._program import stacklevel
from apex.amp.graphs import device as devices
from apex.amp.graphs.arguments import Unfollowed, each, key_of, replaced, surroundings
from apex.amp.graphs.followed import Followed
from apex.amp.graphs.probe import Probe, describe
from apex.amp.graphs.reports import Reports
from apex.amp.graphs.snapshot import Snapshot
from apex.amp.optimizer import state_of
from apex.amp.training import is_disabled, managed
from apex.ops import _runtime

_Results = TypeVar("_Results")

WARM_UP = 3
# So many changes in a row, each soon after the last one, are those of a number that always changes.
MOST_CAPTURES, FEW_CALLS = 8, 16
_active: list[Any] = []  # steps whose calls are under way


def capture(
    function: Callable[..., _Results],
    warmup: int = WARM_UP,
    *,
    generators: Iterable[torch.Generator] = (),
) -> CapturedStep[_Results]:
    """Make a training step that a GPU replays as one CUDA graph, dynamic loss scale included.

    Args:
        function: A whole training step: ``zero_grad``, forward, ``scale_loss``, clipping, ``step``.
            Takes tensors, and containers and numbers; returns tensors, containers of them, or
            ``None``. Its schedulers, and what it reads on the host, are called outside of it.
        warmup: Calls that run as they are before one is captured; at least 1.
        generators: Random generators that it draws from, besides the device's default one.

    Returns:
        What is called instead of ``function``. Weights after some calls are those of as many steps
        without the graph. Results are copies, without a graph of autograd. Arguments are copied.

    Raises:
        TypeError: ``function`` cannot be called. A call: it returned a number.
        ValueError: ``warmup`` is not a whole number from 1 on.
        RuntimeError: A call: the step is of several ranks, is watched by apex.debug, has an
            optimizer that a graph cannot step; or something changed that a replay does not see.

    Warns:
        UserWarning: Once, where a step cannot be captured: what it is, its line, what to do. Steps
            then go on without a graph.

    On a CPU the calls run as they are, with the same checks.

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
        raise TypeError(f"amp.capture: function was {function!r}; pass a function, a train_step.")
    if type(warmup) is not int or warmup < 1:
        raise ValueError(f"amp.capture: warmup was {warmup!r}; it must be a whole number above 0.")
    return CapturedStep(function, warmup, list(generators))


class _Graph(NamedTuple):
    """A graph that was captured: its key, the tensors it reads, and those it leaves."""

    key: Any
    inputs: list[torch.Tensor]
    results: Any


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
        self._left = warmup  # calls until one may be captured
        self._kinds: set[Any] = set()  # of arguments, that were seen
        self._device_graph: Any = None
        self._graph: _Graph | None = None
        self._followed: Followed | None = None  # since the warm-up
        self._reports: Reports | None = None
        self._why = ""  # there will be no graph
        self._since = self._quick = 0  # calls since the warm-up; changes soon after one, in a row

    def __call__(self, *args: Any, **kwargs: Any) -> _Results:
        """Take a step."""
        if _active or _runtime.capturing():
            raise RuntimeError(
                "amp.capture: a step was called inside of another one, or of the capture of a "
                "CUDA graph. Capture the outer function only."
            )
        _active.append(self)
        try:
            self.calls += 1
            tensors: list[torch.Tensor] = []
            try:
                key = key_of((args, kwargs), tensors), surroundings()
            except Unfollowed as reason:
                if not self._why:
                    self._give_up(str(reason))
                return self._run(args, kwargs)
            return self._step(key, tensors, args, kwargs)
        finally:
            _active.pop()

    def _step(self, key: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> _Results:
        self._since += 1
        if self._followed is not None:
            self._look(self._followed)
        followed, graph = self._followed, self._graph
        if followed is not None and not followed.is_in_another_mode():
            if graph is not None and graph.key == key:
                return self._replay(graph, tensors)
            if graph is None and key in self._kinds and self._device_graph is not None:
                return self._capture(followed, key, tensors, args, kwargs)
        self._kinds.add(key)
        return self._run(args, kwargs, tensors)

    def _look(self, followed: Followed) -> None:
        """Follow what has changed since the last call, or give up the graph."""
        try:
            change = followed.change()
        except BaseException:
            self._forget()
            raise
        if change:
            self._quick = self._quick + 1 if self._since < FEW_CALLS else 0
            self._forget()
            if self._quick >= MOST_CAPTURES:
                self._give_up(
                    f"{change}, as {self._quick} times before within {FEW_CALLS} calls. Each time "
                    "takes a new capture. Only learning rates are written to the device: leave "
                    "other numbers as they are (OneCycleLR(cycle_momentum=False))"
                )

    def _forget(self) -> None:
        """Drop the graph; one step without it comes before the next capture."""
        if self._device_graph is not None:
            self._device_graph.release()
        if self._followed is not None:
            self._followed.release()
        self._graph = self._followed = self._reports = None
        self._left = 1

    def _give_up(self, reason: str) -> None:
        """Go on without a graph, for good."""
        self._forget()
        self._why = reason
        warnings.warn(
            f"amp.capture: {self._name} cannot be captured, so its steps go on without a CUDA "
            f"graph: {reason} (docs/graphs.md).",
            stacklevel=stacklevel(),
        )

    # -- steps without the graph -------------------------------------------------------------------

    def _run(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor] = ()) -> _Results:
        """A real step: call the function."""
        if self._device_graph is None:
            self._device_graph = _device_graph()
        stream: Any = contextlib.nullcontext()
        if self._device_graph is not None:
            stream = self._device_graph.on_its_stream()
        if self._reports is not None:
            self._reports.forget()
        with stream:
            if self._why or self._followed is not None:
                found = self._function(*args, **kwargs)
            else:
                found = self._warm_up(args, kwargs, tensors)
        results: _Results = each(found, torch.Tensor.detach)
        return results

    def _warm_up(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the function and learn of its optimizers; the last time look at what it calls."""
        self._left -= 1
        device = torch.device("cpu") if self._device_graph is None else self._device_graph.device
        probe = Probe(device) if self._left <= 0 else None
        versions, rates = [tensor._version for tensor in tensors], _rates()
        with Stepped() as stepped, probe or contextlib.nullcontext():
            found = self._function(*args, **kwargs)
        if stepped.all_disabled():
            self._why = "amp is disabled"
            return found
        followed = Followed(stepped.optimizers)
        reason = "" if probe is None else probe.found
        if not reason and [tensor._version for tensor in tensors] != versions:
            reason = (
                "it writes to an argument. A replay would write to a copy: clone the argument in "
                "the function, or return the tensor"
            )
        if not reason and _rates() != rates:
            reason = (
                "it changes a learning rate (a scheduler's step?), and replays run no Python "
                "code. Call scheduler.step() after it"
            )
        if reason:
            self._give_up(reason)
        elif probe is not None and followed.is_settled():
            self._followed, self._reports = followed, Reports(followed.states)
            self._since = 0
            return found
        followed.release()
        return found

    # -- the graph ---------------------------------------------------------------------------------

    def _capture(
        self, followed: Followed, key: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> _Results:
        """Capture the function, and replay the graph: that is this call's step."""
        inputs = [tensor.detach().clone() for tensor in tensors]
        own_args, own_kwargs = replaced((args, kwargs), iter(inputs))
        before = Snapshot(followed.states)
        try:
            with followed.numbers_on_the_device():
                found = self._device_graph.capture(
                    lambda: self._function(*own_args, **own_kwargs), self._generators
                )
        except Exception as error:  # noqa: BLE001  whatever it is, a step without a graph goes on
            before.put_back()
            self._give_up(describe(error))
            return self._run(args, kwargs)
        followed.look_again(before.kept_gradients())
        self._graph = _Graph(key, inputs, each(found, torch.Tensor.detach))
        return self._replay(self._graph, tensors)

    def _replay(self, graph: _Graph, tensors: list[torch.Tensor]) -> _Results:
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(graph.inputs, tensors, non_blocking=True)
        self._device_graph.replay()
        self.replays += 1
        if self._reports is not None:
            self._reports.after_replay()
        results: _Results = each(graph.results, torch.clone)
        return results

    def __repr__(self) -> str:
        calls = f"{self.calls} calls, {self.replays} of them replays"
        if self._why:
            return f"<amp.capture of {self._name}: {calls}; no graph: {self._why}>"
        if self._graph is None:
            return f"<amp.capture of {self._name}: {calls}; not captured yet>"
        size = self._device_graph.pool_size() / 2**20
        return f"<amp.capture of {self._name}: {calls}; a graph, whose pool has {size:.1f} MiB>"


class Stepped:
    """Inside of this context, notes which optimizers are stepped; in the order of these steps."""

    def __init__(self) -> None:
        self.optimizers: list[Any] = []

    def __enter__(self) -> Stepped:
        self._hook = torch_optimizer.register_optimizer_step_post_hook(self._note)
        self._began = {id(one): one._amp_stash.ledger.began for one in list(managed)}
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        self._hook.remove()
        if kind is not None:
            return
        for one in sorted(managed, key=id):  # of skipped steps torch calls no hook
            if one._amp_stash.ledger.began != self._began.get(id(one), 0):
                self._add(one)
        if not self.optimizers:
            raise RuntimeError(
                "amp.capture: the function has stepped no optimizer. Pass a whole training step: "
                "zero_grad, forward, amp.scale_loss, backward, optimizer.step()."
            )

    def _note(self, optimizer: Any, *arguments: object) -> None:
        outer = [one for one in list(managed) if one._amp_stash._is_stepping]
        self._add(outer[0] if outer else optimizer)  # one inside of a wrapper is the wrapper's

    def _add(self, optimizer: Any) -> None:
        if not any(optimizer is one for one in self.optimizers):
            self.optimizers.append(optimizer)

    def all_disabled(self) -> bool:
        """Whether all went through ``initialize`` with ``enabled=False``."""
        return all(is_disabled(one) and state_of(one) is None for one in self.optimizers)


def _device_graph() -> Any:
    """The graph of the first GPU that has parameters which amp manages; ``None`` without one."""
    params = [p for one in list(managed) for p in one._amp_stash.params.stepped]
    device = next((param.device for param in params if devices.has_graphs(param.device)), None)
    return None if device is None else devices.DeviceGraph(device)


def _rates() -> list[Any]:
    """The learning rates of all optimizers; of a tensor its version."""
    groups = [group for one in list(managed) for group in one.param_groups]
    rates = [group.get("lr") for group in sorted(groups, key=id)]
    return [rate._version if isinstance(rate, torch.Tensor) else rate for rate in rates]
