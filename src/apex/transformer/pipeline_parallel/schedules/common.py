"""One micro-batch forward, and one backward; and the model of a stage."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from apex.normalization.fused_layer_norm import FusedLayerNorm
from apex.ops._check import ArgumentError
from apex.transformer import parallel_state
from apex.transformer._refused import refuse
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import utils
from apex.transformer.pipeline_parallel.p2p_communication import FutureTensor
from apex.transformer.tensor_parallel.layers import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)

listify_model, unwrap_model = utils.listify_model, utils.unwrap_model  # programs import them here
Batch = torch.Tensor | Sequence[torch.Tensor] | dict[str, torch.Tensor] | None
LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
FwdStepFunc = Callable[[Batch, torch.nn.Module], tuple[torch.Tensor, LossFunc]]


def build_model(
    model_provider_func: Callable[..., torch.nn.Module],
    wrap_with_ddp: bool = True,
    virtual_pipeline_model_parallel_size: int | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    *args: Any,
    **kwargs: Any,
) -> list[torch.nn.Module]:
    """Make this stage's part of a model, in a list of one.

    Args:
        model_provider_func: Called with ``args``, ``kwargs`` and whether this stage has the
            embedding (``pre_process``) and the loss (``post_process``); for an encoder and a
            decoder on several stages also ``add_encoder`` and ``add_decoder``.
        wrap_with_ddp: Whether to wrap it in torch's DistributedDataParallel, over the
            data-parallel group.
        virtual_pipeline_model_parallel_size: ``None`` only.
        model_type: Kept as the model's ``model_type``.
        *args: For the function.
        **kwargs: For the function.
    """
    if virtual_pipeline_model_parallel_size is not None:
        refuse("pipeline_parallel.build_model(virtual_pipeline_model_parallel_size=...)")
    kwargs["pre_process"] = parallel_state.is_pipeline_first_stage()
    kwargs["post_process"] = parallel_state.is_pipeline_last_stage()
    several = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if several and model_type == ModelType.encoder_and_decoder:
        split = parallel_state.get_pipeline_model_parallel_split_rank()
        if split is None:
            raise ArgumentError(
                "build_model: encoder_and_decoder needs initialize_model_parallel("
                "pipeline_model_parallel_split_rank_=...), the first stage of the decoder."
            )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        kwargs["pre_process"] |= stage == split
        kwargs["post_process"] |= stage == split - 1
        kwargs["add_encoder"] = parallel_state.is_pipeline_stage_before_split()
        kwargs["add_decoder"] = parallel_state.is_pipeline_stage_after_split()
    model: Any = model_provider_func(*args, **kwargs)
    model.model_type = model_type
    for param in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    device = parallel_state.current_device()
    model.to(device)
    if wrap_with_ddp:
        ids = None if device.type == "cpu" else [device.index]
        group = parallel_state.get_data_parallel_group()
        model = DistributedDataParallel(model, device_ids=ids, process_group=group)
    return [model]


def _get_params_for_weight_decay_optimization(
    model: Any, *, no_weight_decay_modules: Any = FusedLayerNorm
) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: weights; and biases and norms, without weight decay."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    modules = [module for part in utils.listify_model(model) for module in part.modules()]
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            decays = name != "bias" and not isinstance(module, no_weight_decay_modules)
            groups[0 if decays else 1]["params"].append(param)
    return groups


_OF_OTHER_SCHEDULES = """
tensor_shape decoder_sequence_length deallocate_pipeline_outputs async_comm
sequence_parallel_enabled custom_grad_sync_func custom_param_sync_func sync_batch_comm
overlap_p2p_comm batch_p2p_comm num_micro_batches_with_partial_activation_checkpoints
"""


def one_model(name: str, model: Any, others: dict[str, Any]) -> Any:
    """Return the model of a list of one; check keywords that are for other schedules."""
    unknown = sorted(others.keys() - set(_OF_OTHER_SCHEDULES.split()))
    if unknown:
        raise ArgumentError(f"{name}: there is no argument {', '.join(unknown)}.")
    models = utils.listify_model(model)
    if len(models) != 1:
        raise ArgumentError(f"{name}: got {len(models)} models for one stage; pass one model.")
    return models[0]


def _listed(tensors: Any) -> list[Any]:
    listed = tensors if isinstance(tensors, list) else [tensors]
    return [x.get() if isinstance(x, FutureTensor) else x for x in listed]


def _adds_the_encoders_output(kind: ModelType | None) -> bool:
    """Whether a stage has the encoder's output as well, which it hands on to later ones."""
    several = parallel_state.get_pipeline_model_parallel_world_size() > 1
    after = several and parallel_state.is_pipeline_stage_after_split()
    return after and kind == ModelType.encoder_and_decoder


def forward_step(
    forward_step_func: Callable[..., Any],
    batch: Any,
    model: Any,
    input_tensor: Any,
    losses_reduced: list[Any],
    dtype: torch.dtype | None,
    disable_autocast: bool = False,
    checkpoint_activations_micro_batch: bool | None = None,
) -> Any:
    """Compute the output of this stage for one micro-batch.

    Args:
        forward_step_func: Called with ``(batch, model)``, and with
            ``checkpoint_activations_micro_batch`` if that is not None. Returns the output and a
            function that makes the last stage's ``(loss, what to report)`` of it.
        batch: One micro-batch.
        model: Its ``set_input_tensor`` is called with a list: ``input_tensor``.
        input_tensor: From the stage before, or a list of these.
        losses_reduced: The last stage appends what to report.
        dtype: Of ``torch.autocast``, if float16 or bfloat16.
        disable_autocast: Whether to leave ``torch.autocast`` alone.
        checkpoint_activations_micro_batch: Whether the model is to recompute activations.

    Returns:
        The output, on the last stage the loss divided by the number of micro-batches; in a list if
        ``input_tensor`` is one.
    """
    inputs, inner = _listed(input_tensor), utils.unwrap_model(model)
    inner.set_input_tensor(inputs)
    casts = not disable_autocast and dtype in (torch.float16, torch.bfloat16)
    kind = parallel_state.current_device().type
    flag = checkpoint_activations_micro_batch
    with torch.autocast(kind, dtype=dtype) if casts else contextlib.nullcontext():
        output, loss_func = forward_step_func(batch, model, *([] if flag is None else [flag]))
        if parallel_state.is_pipeline_last_stage():
            loss, reported = loss_func(output)
            output = loss / utils.get_num_microbatches()
            losses_reduced.append(reported)
    if not isinstance(input_tensor, list):
        return output
    if _adds_the_encoders_output(getattr(inner, "model_type", None)):
        return [output, inputs[-1]]
    return [output]


def backward_step(
    input_tensor: Any,
    output_tensor: Any,
    output_tensor_grad: Any,
    model_type: ModelType,
    *,
    grad_scaler: Any = None,
    deallocate_pipeline_outputs: bool = False,
) -> Any:
    """Go back through this stage for one micro-batch.

    Args:
        input_tensor: What ``forward_step`` got, or a list.
        output_tensor: What it returned, or a list.
        output_tensor_grad: From the next stage, or a list; None on the last.
        model_type: The model's.
        grad_scaler: Scales the last stage's loss.
        deallocate_pipeline_outputs: Whether ``free_output_tensor`` freed the output.

    Returns:
        The gradient of ``input_tensor``, for the stage before; in a list if that is one.
    """
    inputs, grads = _listed(input_tensor), _listed(output_tensor_grad)
    output = _listed(output_tensor)[0]
    for x in inputs:
        if x is not None:
            x.retain_grad()
    if grads[0] is None and grad_scaler is not None:
        output = grad_scaler.scale(output)
    (custom_backward if deallocate_pipeline_outputs else torch.autograd.backward)(output, grads[0])
    found = [None if x is None else _gradient(x) for x in inputs]
    if _adds_the_encoders_output(model_type) and grads[-1] is not None and len(grads) > 1:
        found[-1] = found[-1] + grads[-1]
    return found if isinstance(input_tensor, list) else found[0]


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def free_output_tensor(output_tensors: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the memory of outputs that were sent; they are only needed for their graph then."""
    for tensor in _listed(output_tensors) if deallocate_pipeline_outputs else ():
        if tensor is not None:
            tensor.data = torch.empty(1, device=tensor.device, dtype=tensor.dtype)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Go back from an output that ``free_output_tensor`` freed, or from a loss."""
    edge = torch.autograd.graph.get_gradient_edge(output)
    torch.autograd.backward(edge, torch.ones_like(output) if grad_output is None else grad_output)
