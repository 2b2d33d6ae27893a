"""Linear layers and an embedding whose weights are split over the tensor-parallel group.

``ColumnParallelLinear`` splits the outputs, ``RowParallelLinear`` the inputs. One after the other,
they need one all-reduce in the forward pass and one in the backward pass. With
``sequence_parallel_enabled`` the activations outside of the pair are split along the sequence. An
all-gather before the pair and a reduce-scatter after it then replace the all-reduce.

With ``use_cpu_initialization=True`` each rank makes the weight of one process and keeps its part.
Otherwise each rank makes only its part, with random numbers of ``"model-parallel-rng"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init

from apex._compat import private
from apex.ops._check import ArgumentError
from apex.transformer import parallel_state
from apex.transformer._marks import Marked
from apex.transformer.tensor_parallel import _linear, mappings
from apex.transformer.tensor_parallel.random import get_cuda_rng_tracker
from apex.transformer.utils import divide

linear_with_grad_accumulation_and_async_allreduce = (
    _linear.linear_with_grad_accumulation_and_async_allreduce
)
LinearWithGradAccumulationAndAsyncCommunication = (
    _linear.LinearWithGradAccumulationAndAsyncCommunication
)
_Init = Callable[[torch.Tensor], Any]
_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Return whether to count a parameter on this rank.

    It is true for a parameter that is split over ranks, and for all parameters on the group's first
    rank.
    """
    is_part: bool = getattr(param, "tensor_model_parallel", False)
    return is_part or parallel_state.get_tensor_model_parallel_rank() == 0


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Set ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``, once."""
    has = [name for name in _DEFAULTS if hasattr(tensor, name)]
    if has:
        raise ArgumentError(f"the tensor has the attributes {has} already.")
    for name, value in zip(_DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Set missing tensor-parallel attributes to the values of a tensor that is not split."""
    for name, value in _DEFAULTS.items():
        setattr(tensor, name, getattr(tensor, name, value))


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """Copy those of the three tensor-parallel attributes that the source has."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def _initialize_affine_weight_gpu(
    weight: torch.Tensor, init_method: _Init, partition_dim: int, stride: int = 1
) -> None:
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with torch.no_grad(), get_cuda_rng_tracker().fork():
        init_method(weight)


def _initialize_affine_weight_cpu(
    weight: torch.Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: _Init,
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
) -> torch.Tensor | None:
    """Make all of the weight on the CPU, ``(output_size, input_size)``, and keep this rank's part.

    With a stride the weight is that of several layers side by side, such as queries, keys and
    values, of which each is divided by itself.
    """
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    whole = torch.empty(output_size, input_size, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        init_method(whole)
        whole = whole.to(params_dtype)
        parts = torch.split(whole, divide(per_partition_size, stride), partition_dim)
        rank = parallel_state.get_tensor_model_parallel_rank()
        mine = parts[rank :: parallel_state.get_tensor_model_parallel_world_size()]
        weight.copy_(torch.cat(mine, partition_dim))
    return whole if return_master_weight else None


class _Parallel(Marked):
    """Parameters of one rank, and which of them are parts."""

    # What modules that an older Apex pickled whole may lack.
    partition_dim, stride = 0, 1
    bias: torch.nn.Parameter | None
    master_weight: torch.Tensor | None = None
    skip_bias_add = gradient_accumulation_fusion = sequence_parallel_enabled = False

    def _make(
        self,
        shape: Sequence[int],
        dim: int,
        init_method: _Init,
        stride: int,
        params_dtype: torch.dtype,
        on_cpu: bool,
        keep: bool = False,
        bias: int = 0,
    ) -> None:
        """Make this rank's part of a weight that is divided along ``dim``, and a bias of zeros."""
        self.partition_dim, self.stride, mine = dim, stride, list(shape)
        mine[dim] = divide(shape[dim], parallel_state.get_tensor_model_parallel_world_size())
        device = torch.device("cpu") if on_cpu else parallel_state.current_device()
        options: Any = {"dtype": params_dtype, "device": device}
        weight = self.weight = torch.nn.Parameter(torch.empty(mine, **options))
        if on_cpu:
            self.master_weight = _initialize_affine_weight_cpu(
                weight, shape[0], shape[1], mine[dim], dim, init_method, stride, keep,
                params_dtype=params_dtype,
            )  # fmt: skip
        else:
            _initialize_affine_weight_gpu(weight, init_method, dim, stride)
        zeros = torch.nn.Parameter(torch.zeros(bias, **options)) if bias else None
        self.register_parameter("bias", zeros)
        self._mark()

    def _parts(self) -> list[torch.nn.Parameter | None]:
        return [self.weight]

    def _mark(self) -> None:
        """Set the attributes of the parts."""
        values = True, self.partition_dim, self.stride
        for parameter in self._parts():
            for name, value in zip(_DEFAULTS, values, strict=True):
                if parameter is not None:
                    setattr(parameter, name, value)


def _check_no_effect(accumulation_in_fp16: bool | None) -> None:
    if accumulation_in_fp16 not in (None, True, False):
        raise ArgumentError(
            f"accumulation_in_fp16 is {accumulation_in_fp16!r}; pass a bool or None."
        )


class VocabParallelEmbedding(_Parallel):
    """An embedding, where each rank has the rows of a part of the token ids.

    Args:
        num_embeddings: Number of token ids. It must be divisible by the number of ranks, or the
            constructor raises ``AssertionError``.
        embedding_dim: Number of features.
        init_method: Function that writes initial values into a tensor.
        params_dtype: dtype of the weight.
        use_cpu_initialization: As in :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: _Init = init.xavier_normal_,
        *,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        shape = num_embeddings, embedding_dim
        self._make(shape, 0, init_method, 1, params_dtype, use_cpu_initialization)
        self.num_embeddings_per_partition = size = self.weight.shape[0]
        self.vocab_start_index = parallel_state.get_tensor_model_parallel_rank() * size
        self.vocab_end_index = self.vocab_start_index + size

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look up token ids of any shape, equal on all ranks. An id out of range is an error."""
        if self.num_embeddings_per_partition == self.num_embeddings:
            return F.embedding(input_, self.weight)
        valid = ((input_ >= 0) & (input_ < self.num_embeddings)).all()
        private.assert_async(valid, f"token ids must be from 0 to {self.num_embeddings - 1}")
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        rows = F.embedding((input_ - self.vocab_start_index).masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return mappings.reduce_from_tensor_model_parallel_region(rows)


class ColumnParallelLinear(_Parallel):
    """``y = x @ weight.T + bias``, where each rank computes a part of the outputs.

    Args:
        input_size: Number of features of ``x``.
        output_size: Number of features of ``y`` on all ranks together. It must be divisible by the
            number of ranks, or the constructor raises ``AssertionError``.
        bias: Whether to have a bias. It starts at zero and is split like the outputs.
        gather_output: Return all outputs on each rank. Not with ``sequence_parallel_enabled``.
        init_method: Function that writes initial values into a tensor.
        stride: Number of layers that lie side by side in the weight, such as queries, keys and
            values. Each of them is split separately. Only with ``use_cpu_initialization``.
        keep_master_weight_for_test: Keep the weight of all ranks as ``master_weight``. Only with
            ``use_cpu_initialization``.
        skip_bias_add: Return the bias instead of adding it, for a fused function.
        no_async_tensor_model_parallel_allreduce: Reduce the input's gradient before the weight's
            gradient is computed. The numbers are the same.
        params_dtype: dtype of weight and bias.
        use_cpu_initialization: Make the whole weight on the CPU, the same on each rank, and keep
            this rank's part. Otherwise call ``model_parallel_cuda_manual_seed`` before.
        gradient_accumulation_fusion: Add the weight's gradient to ``weight.main_grad``.
        sequence_parallel_enabled: Whether ``x`` is this rank's part of the sequence.
        accumulation_in_fp16: Has no effect: the dtype of ``main_grad`` decides.
        config: Has no effect. It is Megatron's configuration.
    """

    gather_output = async_tensor_model_parallel_allreduce = True

    def __init__(  # noqa: PLR0913  # Apex's
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: _Init = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        no_async_tensor_model_parallel_allreduce: bool = False,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        sequence_parallel_enabled: bool = False,
        accumulation_in_fp16: bool | None = None,
        config: Any = None,
    ) -> None:
        super().__init__()
        _check_no_effect(accumulation_in_fp16)
        if gather_output and sequence_parallel_enabled:
            raise ArgumentError(
                "ColumnParallelLinear: gather_output and sequence_parallel_enabled are both True; "
                "pass gather_output=False, and a RowParallelLinear after this layer."
            )
        self.input_size, self.output_size = input_size, output_size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.async_tensor_model_parallel_allreduce = not (
            no_async_tensor_model_parallel_allreduce or sequence_parallel_enabled
        )
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.output_size_per_partition = divide(output_size, ranks)
        self._make(
            (output_size, input_size), 0, init_method, stride, params_dtype, use_cpu_initialization,
            keep_master_weight_for_test, self.output_size_per_partition if bias else 0,
        )  # fmt: skip

    def _parts(self) -> list[torch.nn.Parameter | None]:
        return [self.weight, self.bias]

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter | None]:
        """Return ``y`` for ``(sequence, ..., input_size)``, and the bias if it was skipped."""
        reduces = self.async_tensor_model_parallel_allreduce
        if not reduces and not self.sequence_parallel_enabled:
            input_ = mappings.copy_to_tensor_model_parallel_region(input_)
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_, self.weight, None if self.skip_bias_add else self.bias,
            self.gradient_accumulation_fusion, reduces, self.sequence_parallel_enabled,
        )  # fmt: skip
        if self.gather_output:
            output = mappings.gather_from_tensor_model_parallel_region(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_Parallel):
    """``y = x @ weight.T + bias``, where each rank has a part of the inputs.

    See :class:`ColumnParallelLinear` for the other arguments.

    Args:
        input_size: Number of features of ``x`` on all ranks together. It must be divisible by the
            number of ranks, or the constructor raises ``AssertionError``.
        bias: Whether to have a bias. Each rank has the whole bias.
        input_is_parallel: Whether ``x`` is already this rank's part of the features. Required with
            ``sequence_parallel_enabled``.
        sequence_parallel_enabled: Return this rank's part of the sequence. The bias then has the
            attribute of this name, because you must add up its gradients over ranks.
    """

    partition_dim, input_is_parallel = 1, False

    def __init__(  # noqa: PLR0913  # Apex's
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: _Init = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        sequence_parallel_enabled: bool = False,
        accumulation_in_fp16: bool | None = None,
        config: Any = None,
    ) -> None:
        super().__init__()
        _check_no_effect(accumulation_in_fp16)
        if sequence_parallel_enabled and not input_is_parallel:
            raise ArgumentError(
                "RowParallelLinear: sequence_parallel_enabled needs input_is_parallel=True, with a "
                "ColumnParallelLinear(gather_output=False) before this layer."
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self._make(
            (output_size, input_size), 1, init_method, stride, params_dtype, use_cpu_initialization,
            keep_master_weight_for_test, output_size if bias else 0,
        )  # fmt: skip
        self.input_size_per_partition = self.weight.shape[1]

    def _mark(self) -> None:
        """Set the attributes of the weight, and the bias's own."""
        super()._mark()
        if self.bias is not None:
            self.bias.sequence_parallel_enabled = self.sequence_parallel_enabled  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter | None]:
        """Return ``y`` for ``(sequence, ..., input_size)``, and the bias if it was skipped."""
        if not self.input_is_parallel:
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_)
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_, self.weight, None, self.gradient_accumulation_fusion, False, False
        )
        if self.sequence_parallel_enabled:
            output = mappings.reduce_scatter_to_sequence_parallel_region(output)
        else:
            output = mappings.reduce_from_tensor_model_parallel_region(output)
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias.to(output.dtype), None
