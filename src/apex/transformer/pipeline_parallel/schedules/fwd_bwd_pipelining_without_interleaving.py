"""1F1B: each stage alternates between a forward and a backward, so it keeps few activations.

A stage first runs as many forwards as there are stages after it. Then it runs a backward after each
forward, and at the end the remaining backwards.

Source: Narayanan et al., PipeDream-Flush in "Memory-Efficient Pipeline-Parallel DNN Training"
(2021).
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from apex.ops._check import ArgumentError
from apex.transformer import parallel_state
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import p2p_communication as p2p
from apex.transformer.pipeline_parallel import utils
from apex.transformer.pipeline_parallel.schedules import common
from apex.transformer.utils import divide

dist = torch.distributed


def get_tensor_shapes(
    rank: int,
    model_type: ModelType,
    *,
    tensor_shape: Sequence[int],
    decoder_sequence_length: int | None = None,
    sequence_parallel_enabled: bool = False,
) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a stage sends.

    A decoder stage after an encoder sends the encoder's output too.
    """
    ranks = (
        parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel_enabled else 1
    )
    sequence, *rest = tensor_shape
    shapes = [(divide(sequence, ranks), *rest)]
    if model_type == ModelType.encoder_and_decoder:
        if decoder_sequence_length is None:
            raise ArgumentError("encoder_and_decoder needs decoder_sequence_length, an int.")
        if not parallel_state.is_pipeline_stage_before_split(rank):
            shapes.insert(0, (divide(decoder_sequence_length, ranks), *rest))
    return shapes


def forward_backward_pipelining_without_interleaving(  # noqa: C901, PLR0913  # Apex's arguments
    forward_step_func: Callable[..., Any],
    batch: Any,
    model: Any,
    *,
    forward_only: bool,
    tensor_shape: Sequence[int] | None = None,
    decoder_sequence_length: int | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    custom_grad_sync_func: Callable[[Iterable[torch.nn.Parameter]], Any] | None = None,
    sync_batch_comm: bool = True,
    num_micro_batches_with_partial_activation_checkpoints: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Accumulate the gradients of all micro-batches of a step, on all stages.

    If the model's wrapper has a ``no_sync``, as torch's DistributedDataParallel does, gradients are
    averaged over the data-parallel group at the end instead of in the backward passes.

    Args:
        forward_step_func: As in ``schedules.common.forward_step``.
        batch: A list of tensors with all micro-batches, or another object that the function
            accepts.
        model: A model, or a list of one model.
        forward_only: Run no backward passes.
        tensor_shape: Shape of the tensors that stages send, ``(sequence, micro_batch, features)``.
        decoder_sequence_length: Length of the decoder's sequence, in a model with an encoder.
        dtype: dtype of the tensors that stages send, float32 by default. If it is float16 or
            bfloat16, also the dtype of ``torch.autocast``.
        grad_scaler: ``GradScaler`` that scales the losses. Its ``scale`` is called on all stages.
        disable_autocast: Do not switch ``torch.autocast`` on or off.
        deallocate_pipeline_outputs: Free each output after it is sent.
        async_comm: Let the host continue until it needs the received tensors.
        sequence_parallel_enabled: Whether each tensor-parallel rank has its part of the sequence.
        custom_sync_context_handler: Function that makes a context for all backwards except the
            last.
        custom_grad_sync_func: Function that is called with the model's parameters after the last
            backward.
        sync_batch_comm: Has no effect.
        num_micro_batches_with_partial_activation_checkpoints: Number of micro-batches that may keep
            their activations while they wait for the backward. ``forward_step_func`` receives False
            for these, and True for the others.
        **kwargs: Arguments of the other schedules. They have no effect.

    Returns:
        List of the reports of all micro-batches on the last stage; an empty list on the others.
    """
    name = "forward_backward_pipelining_without_interleaving"
    model = common.one_model(name, model, kwargs)
    if tensor_shape is None:
        raise ArgumentError(
            f"{name}: tensor_shape is None; pass (sequence, micro_batch, features)."
        )
    kind, count = utils.get_model_type(model), utils.get_num_microbatches()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    before, after = (
        get_tensor_shapes(
            rank, kind, tensor_shape=tensor_shape, decoder_sequence_length=decoder_sequence_length,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        for rank in (stage - 1, stage)
    )  # fmt: skip
    warmup = min(parallel_state.get_pipeline_model_parallel_world_size() - stage - 1, count)
    keep = num_micro_batches_with_partial_activation_checkpoints
    reported: list[Any] = []
    waiting: list[tuple[Any, Any]] = []  # inputs and outputs whose backward is to come

    def each(function: Any, shapes: list[Any], *tensors: list[Any]) -> list[Any]:
        rows = zip(*tensors, shapes, strict=True)
        options = {"dtype": dtype, "async_comm": async_comm}
        return [function(*row[:-1], tensor_shape=row[-1], **options) for row in rows]

    def forward(k: int, inputs: list[Any]) -> list[Any]:
        flag = None if keep is None else k % (warmup + 1) >= keep
        micro_batch = utils.get_kth_microbatch(batch, k)
        outputs: list[Any] = common.forward_step(
            forward_step_func, micro_batch, model, inputs, reported, dtype, disable_autocast, flag
        )
        if not forward_only:
            waiting.append((inputs, outputs))
        return outputs

    def backward(k: int, grads: list[Any]) -> Any:
        if k + 1 == count + warmup and custom_sync_context_handler is not None:
            sync.close()  # the last one
        return common.backward_step(
            *waiting.pop(0), grads, kind, grad_scaler=grad_scaler,
            deallocate_pipeline_outputs=deallocate_pipeline_outputs,
        )  # fmt: skip

    if grad_scaler is not None:  # stages without a loss unscale and step with it, too
        grad_scaler.scale(
            torch.zeros((), device=parallel_state.current_device(), dtype=torch.float32)
        )
    with contextlib.ExitStack() as sync:
        default = getattr(model, "no_sync", contextlib.nullcontext)
        sync.enter_context((custom_sync_context_handler or default)())
        inputs: list[Any] = []
        for k in range(count if forward_only else count + warmup):
            if k < count:
                outputs = forward(k, inputs or each(p2p.recv_forward, before))
                if k < warmup or forward_only:
                    each(p2p.send_forward, after, outputs)
                else:
                    grads = each(p2p.send_forward_recv_backward, after, outputs)
                last = parallel_state.is_pipeline_last_stage()
                common.free_output_tensor(outputs[:1], deallocate_pipeline_outputs and not last)
                inputs = []
            else:
                grads = each(p2p.recv_backward, after)
            if k < warmup or forward_only:
                continue
            grads = backward(k, grads)
            if k + 1 < count:
                inputs = each(p2p.send_backward_recv_forward, before, grads)
            else:
                each(p2p.send_backward, before, grads)
    if not forward_only:
        _reduce(model, custom_sync_context_handler, custom_grad_sync_func)
    return reported


def _reduce(model: Any, custom_context: Any, custom_function: Any) -> None:
    """Reduce gradients over the data-parallel ranks, as the program or the wrapper wants."""
    size = parallel_state.get_data_parallel_world_size()
    if custom_function is not None:
        custom_function(model.parameters())
    elif custom_context is None and size > 1 and hasattr(model, "no_sync"):
        group = parallel_state.get_data_parallel_group()
        for param in filter(lambda param: param.requires_grad, model.parameters()):
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad.div_(size), group=group)
