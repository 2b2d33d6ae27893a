"""Small models and forward steps for tests of schedules and layers."""

import os
import random
from collections.abc import Callable
from typing import Any

import torch

from apex.transformer import tensor_parallel
from apex.transformer.pipeline_parallel.utils import average_losses_across_data_parallel_group
from apex.transformer.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

dist = torch.distributed

TEST_SUCCESS_MESSAGE = ">> passed the test :-)"


class IdentityLayer(torch.nn.Module):
    """A layer that returns its parameter: normal random numbers times ``scale``."""

    def __init__(self, size: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(scale * torch.randn(size, device=None, dtype=None))

    def forward(self) -> torch.Tensor:
        """Return the parameter."""
        return self.weight


class MyLayer(torch.nn.Module):
    """A linear layer with as many inputs as outputs."""

    def __init__(self, hidden_size: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.layer = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear layer."""
        return self.layer(x)  # type: ignore[no-any-return]


class _Stage(torch.nn.Module):
    input_tensor: torch.Tensor | None = None

    def __init__(
        self,
        hidden_size: int,
        pre_process: bool = False,
        post_process: bool = False,
        *,
        sequence_parallel_enabled: bool = False,
        add_encoder: bool = False,
        add_decoder: bool = False,
    ) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self._make(hidden_size, sequence_parallel_enabled)

    def _make(self, hidden_size: int, sequence_parallel_enabled: bool) -> None:
        raise NotImplementedError

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the output of the stage before, a tensor or a list of one."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        """Compute from ``x`` on the first stage, else from what was set."""
        found = x if self.input_tensor is None else self.input_tensor
        assert found is not None  # the first stage gets x, others get the tensor
        return self._compute(found)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class MyModel(_Stage):
    """A stage of one :class:`MyLayer`."""

    def _make(self, hidden_size: int, sequence_parallel_enabled: bool) -> None:
        self.layer = MyLayer(hidden_size, self.pre_process, self.post_process)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class ToyParallelMLP(_Stage):
    """A stage of two tensor-parallel linear layers, with a GELU between them."""

    def _make(self, hidden_size: int, sequence_parallel_enabled: bool) -> None:
        options: Any = {"sequence_parallel_enabled": sequence_parallel_enabled}
        options["use_cpu_initialization"] = True
        size = 4 * hidden_size
        self.dense_h_to_4h = ColumnParallelLinear(hidden_size, size, gather_output=False, **options)
        self.dense_4h_to_h = RowParallelLinear(size, hidden_size, input_is_parallel=True, **options)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.dense_h_to_4h(x)[0])
        return self.dense_4h_to_h(hidden)[0]  # type: ignore[no-any-return]


model_provider_func, mlp_provider_func = MyModel, ToyParallelMLP


def set_random_seed(seed: int) -> None:
    """Seed Python, torch, and the generators of the tensor-parallel ranks."""
    random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def process_batch(batch: Any) -> Any:
    """Return the only tensor of a list; return anything else unchanged."""
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def fwd_step_func(batch: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Call a model. The loss is the sum of its output, and the report is ``{"avg": ...}``."""
    output = model(process_batch(batch))

    def loss_func(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = torch.sum(x)
        return loss, {"avg": average_losses_across_data_parallel_group([loss])}

    return output, loss_func


class ToyParallelMLPFwdBwdStepFunc:
    """:func:`fwd_step_func` for models that may be sequence parallel."""

    def __init__(self, sequence_parallel_enabled: bool) -> None:
        self.sequence_parallel_enabled = sequence_parallel_enabled

    def __call__(
        self, batch: Any, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Take the tensor-parallel rank's part of the sequence, and apply the model."""
        x = process_batch(batch)
        if self.sequence_parallel_enabled and x is not None:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        return fwd_step_func(x, model)


def initialize_distributed(backend: str = "nccl") -> None:
    """Initialise ``torch.distributed`` from the variables that ``torchrun`` sets."""
    if backend not in ("nccl", "ucc", "gloo"):
        raise ValueError(f"backend is {backend!r}; pass 'nccl', 'ucc' or 'gloo'.")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)


def print_separator(message: str) -> None:
    """Print a message between lines, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"\n{'-' * 31}\n{message:^31}\n{'-' * 31}", flush=True)  # noqa: T201
