"""The forward and the backward of one micro-batch, and the model of a stage."""

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
    """Make this stage's part of a model, and return it in a list.

    Args:
        model_provider_func: Function that makes the model. It receives ``args`` and ``kwargs``, and
            the flags ``pre_process`` (this stage has the embedding) and ``post_process`` (it has
            the loss). For an encoder and a decoder on several stages it also receives
            ``add_encoder`` and ``add_decoder``.
        wrap_with_ddp: Wrap the model in torch's DistributedDataParallel, over the data-parallel
            group.
        virtual_pipeline_model_parallel_size: Must be ``None``.
        model_type: Value of the model's ``model_type``.
        *args: Arguments of the function.
        **kwargs: Arguments of the function.
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
    """Return the only model of a list, and check keywords of other schedules."""
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
        forward_step_func: Function that is called with ``(batch, model)``, and with
            ``checkpoint_activations_micro_batch`` if that is not None. It returns the output, and a
            function that computes the last stage's loss and a report from it.
        batch: One micro-batch.
        model: The model. Its ``set_input_tensor`` is called with a list of ``input_tensor``.
        input_tensor: Tensor from the previous stage, or a list of tensors.
        losses_reduced: List to which the last stage appends its report.
        dtype: dtype of ``torch.autocast``, if it is float16 or bfloat16.
        disable_autocast: Do not switch ``torch.autocast`` on or off.
        checkpoint_activations_micro_batch: Whether the model should recompute activations.

    Returns:
        The output, or on the last stage the loss divided by the number of micro-batches. It is a
        list if ``input_tensor`` is one.
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
    """Run the backward pass of this stage for one micro-batch.

    Args:
        input_tensor: The input of ``forward_step``, or a list of inputs.
        output_tensor: The output of ``forward_step``, or a list of outputs.
        output_tensor_grad: Gradient from the next stage, or a list of them; None on the last stage.
        model_type: The model's ``model_type``.
        grad_scaler: ``GradScaler`` that scales the last stage's loss.
        deallocate_pipeline_outputs: Whether ``free_output_tensor`` freed the output.

    Returns:
        The gradient of ``input_tensor`` for the previous stage; a list if ``input_tensor`` is one.
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
    """Free the memory of outputs that were sent. Afterwards only their graphs are needed."""
    for tensor in _listed(output_tensors) if deallocate_pipeline_outputs else ():
        if tensor is not None:
            tensor.data = torch.empty(1, device=tensor.device, dtype=tensor.dtype)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Run the backward pass from an output that ``free_output_tensor`` freed, or from a loss."""
    edge = torch.autograd.graph.get_gradient_edge(output)
    torch.autograd.backward(edge, torch.ones_like(output) if grad_output is None else grad_output)
