"""Random numbers that differ or agree between the ranks of a layer, and recomputed activations.

Inside a tensor-parallel region dropout must differ between the ranks of a layer; elsewhere it must
agree. Therefore the device's generator has two states. Its own state is the same on all ranks of
the group. :class:`CudaRNGStatesTracker` switches to the other one, ``"model-parallel-rng"``, for a
block. The device is the accelerator, or the CPU in programs without one.

:func:`checkpoint` computes the forward again in the backward pass, with the same random numbers.
With ``distribute_saved_activations`` each rank keeps only its part of the first input. The whole
input is freed when nothing else refers to it.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops._check import ArgumentError
from apex.transformer import parallel_state, utils
from apex.transformer.tensor_parallel.memory import MemoryBuffer, allocate_mem_buff

_MODEL_PARALLEL = "model-parallel-rng"


def _generator() -> Any:
    """Return what has get_rng_state, set_rng_state and manual_seed for the device."""
    device = parallel_state.current_device()
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def _set_cuda_rng_state(new_state: torch.Tensor, device: int | str | torch.device = -1) -> None:
    """Set the state of a device's generator, by default of the current one's; on a CPU its own."""
    where = [] if device == -1 or parallel_state.current_device().type == "cpu" else [device]
    _generator().set_rng_state(new_state, *where)


class CudaRNGStatesTracker:
    """States of the device's random number generator by name.

    Example:
        >>> tracker = CudaRNGStatesTracker()
        >>> tracker.add("dropout", 7)
        >>> with tracker.fork("dropout"):
        ...     mask = torch.rand(4)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the states by name, for a checkpoint."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Restore the states that ``get_states`` returned."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts from a seed.

        Raises:
            ArgumentError: The name is in use; or the seed is, which would repeat its numbers.
        """
        if name in self.states_ or seed in self.seeds_:
            what = f"state {name!r}" if name in self.states_ else f"seed {seed}"
            raise ArgumentError(
                f"CudaRNGStatesTracker.add: {what} exists already; pass another one."
            )
        generator = _generator()
        before = generator.get_rng_state()
        generator.manual_seed(seed)
        self.states_[name] = generator.get_rng_state()
        self.seeds_.add(seed)
        generator.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Use a state inside a ``with`` block, and restore the generator at its end.

        Raises:
            ArgumentError: There is no such state.
        """
        if name not in self.states_:
            raise ArgumentError(
                f"CudaRNGStatesTracker.fork: there is no state {name!r}. Call "
                "model_parallel_cuda_manual_seed(seed) first, or add it."
            )
        generator = _generator()
        before = generator.get_rng_state()
        generator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_rng_state()
            generator.set_rng_state(before)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator, and seed ``"model-parallel-rng"`` differently on each rank.

    Args:
        seed: The same on the ranks of a tensor-parallel group; between data-parallel copies as the
            program likes. The state gets ``seed + 2718 + tensor-parallel rank``.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    _TRACKER.reset()
    _generator().manual_seed(seed)
    _TRACKER.add(_MODEL_PARALLEL, seed + 2718 + rank)


# -- recomputed activations ------------------------------------------------------------------------

_buffers: list[MemoryBuffer] = []  # at most one


def init_checkpointed_activations_memory_buffer(
    micro_batch_size: int,
    max_position_embeddings: int,
    hidden_size: int,
    num_layers: int,
    tensor_model_parallel_size: int,
    checkpoint_num_layers: int,
    fp16: bool,
) -> None:
    """Allocate memory for the activations that ``checkpoint`` distributes over ranks.

    It has ``num_layers / checkpoint_num_layers`` parts. Each has ``micro_batch_size *
    max_position_embeddings * hidden_size / tensor_model_parallel_size`` elements, in float16 with
    ``fp16``, else in float32. Reset it before each forward, after the previous backward has ended.

    Raises:
        AssertionError: A division has a remainder.
        ArgumentError: The memory is allocated already.
    """
    whole = micro_batch_size * max_position_embeddings * hidden_size
    part = utils.divide(whole, tensor_model_parallel_size)
    numel = part * utils.divide(num_layers, checkpoint_num_layers)
    dtype = torch.float16 if fp16 else torch.float32
    _buffers.append(allocate_mem_buff("checkpointed activations", numel, dtype, False))


def reset_checkpointed_activations_memory_buffer() -> None:
    """Make all of the memory available again, if it is allocated."""
    for buffer in _buffers:
        buffer.reset()


@contextlib.contextmanager
def _again(states: tuple[Any, ...], casts: list[tuple[Any, ...]]) -> Iterator[None]:
    """Enter a block with the random states and autocast of an earlier call."""
    now = _states()
    _set_states(*states)
    try:
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield
    finally:
        _set_states(*now)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), _generator().get_rng_state(), _TRACKER.get_states()


def _set_states(cpu: torch.Tensor, device: torch.Tensor, tracked: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(cpu)
    _generator().set_rng_state(device)
    _TRACKER.set_states(tracked)


class CheckpointFunction(torch.autograd.Function):
    """Autograd function of :func:`checkpoint`."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        """Compute the function without a graph, and keep inputs and states of the generators."""
        kinds = {"cpu", parallel_state.current_device().type}
        casts = [(k, torch.get_autocast_dtype(k), _runtime.autocasts(k)) for k in kinds]
        ctx.run_function, ctx.earlier = run_function, (_states(), casts)
        with torch.no_grad():
            outputs = run_function(*args)
        kept, ctx.shape = list(args), args[0].shape if distribute else None
        if distribute:
            group = parallel_state.get_tensor_model_parallel_group()
            part = utils.split_tensor_into_1d_equal_chunks(args[0].detach(), group=group)
            kept[0] = _buffers[0].add(part) if _buffers else part.clone()
        ctx.tensors = [place for place, arg in enumerate(args) if torch.is_tensor(arg)]
        ctx.save_for_backward(*(kept[place] for place in ctx.tensors))
        ctx.others = [None if torch.is_tensor(arg) else arg for arg in args]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Compute the function again, with a graph, and its gradients."""
        if not private.is_checkpoint_valid():
            raise ArgumentError(
                "tensor_parallel.checkpoint: torch.autograd.grad and backward(inputs=...) do not "
                "reach the weights inside; call loss.backward()."
            )
        inputs = list(ctx.others)
        for place, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            inputs[place] = tensor.detach()
        if ctx.shape is not None:
            group = parallel_state.get_tensor_model_parallel_group()
            inputs[0] = utils.gather_split_1d_tensor(inputs[0], group=group).view(ctx.shape)
        for place in ctx.tensors:
            inputs[place].requires_grad_(ctx.needs_input_grad[place + 2])
        with _again(*ctx.earlier):
            outputs = ctx.run_function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if torch.is_tensor(output) and output.requires_grad and grad is not None
        ]
        if pairs:
            results, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(results, gradients)
        return None, None, *(x.grad if torch.is_tensor(x) else None for x in inputs)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Call ``function(*args)`` and compute its activations again in the backward pass.

    The second computation uses the same random numbers, also those of the tracker, and the same
    ``torch.autocast`` as the first one.

    Args:
        function: Function that returns a tensor or a tuple.
        distribute_saved_activations: Keep only this rank's part of ``args[0]``, a tensor that is
            equal on all ranks of the tensor-parallel group.
        *args: Tensors, at least one of which requires a gradient, and other objects.

    Raises:
        ArgumentError: The ranks cannot share ``args[0]``. In the backward pass: you called
            ``torch.autograd.grad``.
    """
    if distribute_saved_activations:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        if not args or not torch.is_tensor(args[0]) or args[0].numel() % ranks:
            raise ArgumentError(
                "tensor_parallel.checkpoint: distribute_saved_activations needs a tensor as its "
                f"first argument, whose elements are divisible by the {ranks} ranks."
            )
    tensors = [arg for arg in args if torch.is_tensor(arg)]
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
        text = "no argument requires a gradient, so the weights inside get no gradients"
        warnings.warn(f"tensor_parallel.checkpoint: {text}", stacklevel=2)
    return CheckpointFunction.apply(function, distribute_saved_activations, *args)  # type: ignore[no-untyped-call]
