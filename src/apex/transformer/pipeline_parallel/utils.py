"""The number of micro-batches of the process, and small functions of Megatron's training loops.

As in Apex the calculator is global. Programs set it up once; schedules and data loaders use it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from apex.ops._check import ArgumentError
from apex.transformer import parallel_state
from apex.transformer._refused import refuse
from apex.transformer.enums import ModelType
from apex.transformer.log_util import get_transformer_logger
from apex.transformer.microbatches import (
    ConstantNumMicroBatches,
    RampupBatchsizeNumMicroBatches,
    build_num_microbatches_calculator,
)
from apex.transformer.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

dist = torch.distributed

T = TypeVar("T")
_LOGGER = get_transformer_logger(__name__)
_GLOBAL_NUM_MICROBATCHES_CALCULATOR: (
    ConstantNumMicroBatches | RampupBatchsizeNumMicroBatches | None
) = None  # programs read it by this name


def listify_model(model: T | list[T]) -> list[T]:
    """Return a list of models unchanged, or a single model in a list."""
    return model if isinstance(model, list) else [model]


def setup_microbatch_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Set up the calculator. Call it once.

    See ``apex.transformer.microbatches.build_num_microbatches_calculator`` for the arguments.

    Raises:
        ArgumentError: The calculator exists already, or the sizes do not match.
    """
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        raise ArgumentError(
            "setup_microbatch_calculator: the calculator exists already. Replace it with "
            "_reconfigure_microbatch_calculator."
        )
    _reconfigure_microbatch_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size,
        decrease_batch_size_if_needed,
    )  # fmt: skip


def _reconfigure_microbatch_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Set the calculator up, or replace it; after an error the old one stays."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR  # noqa: PLW0603  # programs read it by this name
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = build_num_microbatches_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size,
        decrease_batch_size_if_needed,
    )  # fmt: skip


def _calculator() -> ConstantNumMicroBatches | RampupBatchsizeNumMicroBatches:
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise ArgumentError(
            "the number of micro-batches is not known; call setup_microbatch_calculator first."
        )
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def get_micro_batch_size() -> int:
    """Return the number of samples of one rank in one forward."""
    return _calculator().micro_batch_size


def get_num_microbatches() -> int:
    """Return the number of micro-batches of one step."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Return the number of samples of all ranks in one step."""
    return _calculator().get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True) -> None:
    """Set the sizes for the next step, if the global batch grows.

    Args:
        consumed_samples: Number of samples that all steps have used so far.
        consistency_check: Raise an error if the global batch is not a whole number of
            micro-batches.
    """
    _calculator().update(consumed_samples, consistency_check)


def _split_batch_into_microbatch(
    batch: Sequence[torch.Tensor],
    *,
    _micro_batch_size: int | None = None,
    _global_batch_size: int | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Yield lists of the micro-batches of tensors, at most ``_global_batch_size`` samples."""
    size = _micro_batch_size or get_micro_batch_size()
    total = _global_batch_size or get_current_global_batch_size()
    for start in range(0, min(total, len(batch[0])), size):
        yield [x[start : start + size] for x in batch]


def get_kth_microbatch(batch: Any, k: int) -> Any:
    """Return part ``k`` of each tensor of a list or tuple. Return anything else unchanged."""
    if not isinstance(batch, (list, tuple)):
        return batch
    size = get_micro_batch_size()
    if any(len(x) < (k + 1) * size for x in batch):
        raise ArgumentError(
            f"micro-batch {k} of {size} samples is not in a batch of {[len(x) for x in batch]}; "
            f"pass {get_num_microbatches()} micro-batches."
        )
    return [x[k * size : (k + 1) * size] for x in batch]


def get_autoresume() -> None:
    """Return None. In Apex it returned a service of NVIDIA's clusters."""


def get_timers() -> Any:
    """Raise ``NotImplementedError``; use ``torch.profiler.record_function``."""
    refuse("pipeline_parallel.utils.get_timers")


def print_rank_0(message: str) -> None:
    """Print on rank 0 only, or always without ``torch.distributed``."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)  # noqa: T201


def is_last_rank() -> bool:
    """Return whether this is the last of all ranks."""
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print on the last rank only, or always without ``torch.distributed``."""
    if not dist.is_initialized() or is_last_rank():
        print(message, flush=True)  # noqa: T201


def param_is_not_shared(param: torch.Tensor) -> bool:
    """Return whether a parameter's attribute ``shared`` is missing or false.

    The attribute marks copies of another stage's parameter.
    """
    return not getattr(param, "shared", False)


def unwrap_model(
    model: Any, module_instances: type | tuple[type, ...] = (DistributedDataParallel,)
) -> Any:
    """Return a model, or each model of a list, without its wrappers."""
    found: list[Any] = []
    for module in listify_model(model):
        while isinstance(module, module_instances):
            module = getattr(module, "module")  # noqa: B009  # typed as an object
        found.append(module)
    return found if isinstance(model, list) else found[0]


def get_model_type(model: torch.nn.Module) -> ModelType:
    """Return the ``model_type`` that was passed to ``build_model``."""
    kind: ModelType = unwrap_model(model).model_type
    return kind


def calc_params_l2_norm(model: Any, bf16: bool) -> float:
    """Return the norm of all parameters of all ranks of one copy of the model, summed in float32.

    Args:
        model: A model, or a list of models. Shared parameters count only once, and so do those that
            are equal on tensor-parallel ranks.
        bf16: A bool that has no effect: sums of 16-bit numbers are float32.
    """
    if not isinstance(bf16, bool):
        raise ArgumentError(f"calc_params_l2_norm: bf16 is {bf16!r}; pass a bool.")
    total = torch.zeros((), device=parallel_state.current_device(), dtype=torch.float32)
    for part in listify_model(model):
        for param in part.parameters():
            if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param):
                total += torch.linalg.vector_norm(param.detach(), dtype=torch.float32).square()
    dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return float(total.sqrt().item())


def average_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of each loss over the data-parallel ranks, as a 1-dimensional tensor."""
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    dist.all_reduce(averaged, group=parallel_state.get_data_parallel_group())
    return averaged / parallel_state.get_data_parallel_world_size()


def report_memory(name: str) -> None:
    """Print used and reserved memory and their peaks, on rank 0. Print nothing on a CPU."""
    if parallel_state.current_device().type != "cpu":
        numbers = (
            torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated(),
            torch.accelerator.memory_reserved(), torch.accelerator.max_memory_reserved(),
        )  # fmt: skip
        print_rank_0(f"{name}, MiB: " + " ".join(f"{number / 2**20:.1f}" for number in numbers))


def print_params_min_max_norm(optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """Print a line for each parameter: its minimum, maximum and norm.

    The line starts with the iteration, the rank, the parameter's index, and 1 if it is split.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        x, part = param.detach(), int(getattr(param, "tensor_model_parallel", False))
        numbers = f"{x.min():.6E} {x.max():.6E} {torch.linalg.vector_norm(x):.6E}"
        print(f"{iteration} {dist.get_rank()} {index} {part} {numbers}", flush=True)  # noqa: T201


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return masks and positions for left-to-right language models.

    Args:
        data: Token ids, ``(batch, sequence)``.
        eod_token: Id of the last token of each document.
        reset_position_ids: Start positions at 0 in each document.
        reset_attention_mask: Hide the tokens of each document from the others.
        eod_mask_loss: Mask the loss at ``eod_token``.

    Returns:
        Three tensors. The attention mask is ``(batch or 1, 1, sequence, sequence)``, and True where
        a key is hidden from a query. The loss mask is float32 ``(batch, sequence)``. Positions are
        int64 ``(batch, sequence)``.
    """
    batch, length = data.shape
    ends = data == eod_token
    place = torch.arange(length, device=data.device)
    hidden = place > place[:, None]
    document = ends.cumsum(1) - ends.long()  # ends before a token
    if reset_attention_mask:
        hidden = hidden | (document[:, None, :] != document[:, :, None])
    mask = hidden.view(-1, 1, length, length)
    loss_mask = torch.ones(batch, length, device=data.device, dtype=torch.float32)
    if eod_mask_loss:
        loss_mask = loss_mask.masked_fill(ends, 0.0)
    positions = place.expand(batch, length)
    if reset_position_ids:
        begins = torch.nn.functional.pad(ends[:, :-1], (1, 0))
        positions = positions - (positions * begins).cummax(1).values
    return mask, loss_mask, positions.clone()
