"""Tensors between neighbouring stages of a pipeline: activations forward, gradients backward.

Each function is one ``torch.distributed.batch_isend_irecv``. Without a neighbour it sends nothing
and returns None. Functions with ``recv_prev`` or ``recv_next`` treat the stages as a ring, and
receive only if that argument is true. All functions have these keyword options:

* ``dtype``: dtype of the received tensors; float32 by default.
* ``async_comm``: return a :class:`FutureTensor` for a received tensor.
* ``timers``: function that is called with a name such as ``"forward-recv"``, and returns an object
  with ``start`` and ``stop``.
* ``sequence_parallel_enabled``, ``sync_batch_comm``, ``batch_p2p_comm`` and
  ``override_scatter_gather_tensors_in_pipeline`` have no effect. In Apex they change how it sends,
  not what.
* ``overlap_p2p_comm``: must be ``False``.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex.ops._check import ArgumentError
from apex.transformer import parallel_state
from apex.transformer._refused import refuse

dist = torch.distributed

Tensor = torch.Tensor
Shape = Sequence[int]
_OPTIONS: dict[str, Any] = {
    "dtype": None,
    "async_comm": False,
    "sequence_parallel_enabled": False,
    "sync_batch_comm": True,
    "batch_p2p_comm": True,
    "timers": None,
}


class FutureTensor:
    """A tensor that may not have arrived yet."""

    def __init__(self, tensor: Tensor, waitfunc: Callable[[], Any]) -> None:
        self.tensor, self.waitfunc = tensor, waitfunc

    def get(self) -> Tensor:
        """Wait for the tensor, and return it."""
        self.waitfunc()
        return self.tensor


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Write the options into a function's signature, and check them."""
    name = function.__name__
    own = [p for p in inspect.signature(function).parameters.values() if p.name != "options"]
    in_ring = any(p.name in ("recv_prev", "recv_next") for p in own)
    defaults = {**_OPTIONS, "overlap_p2p_comm": False} if in_ring else _OPTIONS
    keyword = inspect.Parameter.KEYWORD_ONLY
    extra = [inspect.Parameter(key, keyword, default=value) for key, value in defaults.items()]
    signature = inspect.Signature([*own, *extra])

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for key, value in given.arguments.items():
            is_flag = isinstance(signature.parameters[key].default, bool)
            if is_flag and not isinstance(value, bool):
                raise ArgumentError(f"{name}: {key} is {value!r}; pass a bool.")
        if in_ring and given.arguments["overlap_p2p_comm"]:
            refuse("pipeline_parallel.p2p_communication(overlap_p2p_comm=True)")
        if given.arguments["tensor_shape"] is None and "recv" in name:
            raise ArgumentError(
                f"{name}: tensor_shape is None; pass the shape of the tensor to receive."
            )
        return function(**given.arguments)

    vars(checked)["__signature__"] = signature
    del checked.__wrapped__  # its source has other arguments than the signature
    return checked


def _communicate(
    name: str, options: dict[str, Any], shape: Shape, to: dict[str, Any], *receive: str
) -> tuple[Any, Any]:
    """Send tensors to ``"prev"`` and ``"next"``, and receive from these, at once."""
    group = parallel_state.get_pipeline_model_parallel_group()
    peers = {
        "prev": parallel_state.get_pipeline_model_parallel_prev_rank(),
        "next": parallel_state.get_pipeline_model_parallel_next_rank(),
    }
    dtype = options["dtype"] or torch.float32
    device = parallel_state.current_device()
    found: dict[str, Any] = {
        peer: torch.empty(tuple(shape), dtype=dtype, device=device)
        for peer in ("next", "prev")  # of two ranks in a ring: what one sends first is for prev
        if peer in receive
    }
    sent = {peer: x.detach().contiguous() for peer, x in to.items() if x is not None}
    ops = [dist.P2POp(dist.isend, sent[peer], peers[peer], group) for peer in peers if peer in sent]
    ops += [dist.P2POp(dist.irecv, x, peers[peer], group) for peer, x in found.items()]
    timer = options["timers"](name) if options["timers"] else None
    if timer is not None:
        timer.start()
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> None:
        while works:
            works.pop().wait()

    later = options["async_comm"] and bool(found)
    if not later:
        wait()
    if timer is not None:
        timer.stop()
    for peer, tensor in found.items():
        tensor.requires_grad_(dtype.is_floating_point)
        found[peer] = FutureTensor(tensor, wait) if later else tensor
    return found.get("prev"), found.get("next")


def _before() -> list[str]:
    return [] if parallel_state.is_pipeline_first_stage() else ["prev"]


def _after() -> list[str]:
    return [] if parallel_state.is_pipeline_last_stage() else ["next"]


@_with_options
def recv_forward(
    tensor_shape: Shape, override_scatter_gather_tensors_in_pipeline: bool = False, **options: Any
) -> Any:
    """Return the output of the previous stage."""
    return _communicate("forward-recv", options, tensor_shape, {}, *_before())[0]


@_with_options
def recv_backward(tensor_shape: Shape | None = None, **options: Any) -> Any:
    """Return the gradient from the next stage."""
    return _communicate("backward-recv", options, tensor_shape or (), {}, *_after())[1]


@_with_options
def send_forward(
    output_tensor: Tensor,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    tensor_shape: Shape | None = None,
    **options: Any,
) -> None:
    """Send an output to the next stage."""
    _communicate("forward-send", options, (), dict.fromkeys(_after(), output_tensor))


@_with_options
def send_backward(input_tensor_grad: Tensor, tensor_shape: Shape, **options: Any) -> None:
    """Send a gradient to the stage before."""
    _communicate("backward-send", options, (), dict.fromkeys(_before(), input_tensor_grad))


@_with_options
def send_forward_recv_backward(output_tensor: Tensor, tensor_shape: Shape, **options: Any) -> Any:
    """Send an output to the next stage, and return the gradient from there."""
    to, name = dict.fromkeys(_after(), output_tensor), "forward-send-backward-recv"
    return _communicate(name, options, tensor_shape, to, *_after())[1]


@_with_options
def send_backward_recv_forward(
    input_tensor_grad: Tensor, tensor_shape: Shape, **options: Any
) -> Any:
    """Send a gradient to the stage before, and return the output from there."""
    to, name = dict.fromkeys(_before(), input_tensor_grad), "backward-send-forward-recv"
    return _communicate(name, options, tensor_shape, to, *_before())[0]


@_with_options
def send_forward_recv_forward(
    output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, **options: Any
) -> Any:
    """Send an output to the next stage, and return that of the stage before if ``recv_prev``."""
    receive, name = ["prev"] * bool(recv_prev), "forward-send-forward-recv"
    return _communicate(name, options, tensor_shape, {"next": output_tensor}, *receive)[0]


@_with_options
def send_backward_recv_backward(
    input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Shape, **options: Any
) -> Any:
    """Send a gradient to the stage before, and return that of the next one if ``recv_next``."""
    receive, name = ["next"] * bool(recv_next), "backward-send-backward-recv"
    return _communicate(name, options, tensor_shape, {"prev": input_tensor_grad}, *receive)[1]


@_with_options
def send_forward_backward_recv_forward_backward(
    output_tensor: Tensor | None,
    input_tensor_grad: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    **options: Any,
) -> tuple[Any, Any]:
    """Do both at once; return the output from before and the gradient from the next stage."""
    to = {"next": output_tensor, "prev": input_tensor_grad}
    receive = [*["prev"] * bool(recv_prev), *["next"] * bool(recv_next)]
    name = "forward-backward-send-forward-backward-recv"
    return _communicate(name, options, tensor_shape, to, *receive)
