"""What an operation computes under :class:`apex.ops.batch_invariant`: each row as if it were alone.

Of an operation that :func:`by_row` names there is a second one, ``apex::<name>_by_row``, made when
the switch is first turned on. It is an operation of its own so that a backward, a compiled graph
and what a graph computes again take its path, whether the switch is still on or not. What depends
on the number of rows elsewhere does not here:

* On a GPU the kernels run from the first element on. A program takes whole rows, as many as the
  length of a row says. Tensors are contiguous and begin at a multiple of 16 bytes: for others
  Triton compiles another kernel. (That of Triton 3.7 for sm_90 has the same bits; who knows the
  next one's.)
* On a CPU torch's functions run, none of them in pieces. Those that take the last elements of a
  tensor another way, or a sum to a single number, are replaced; see each operation.
* torch.compile gets the operator and compiles nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from apex.ops import _batch_invariance, _runtime
from apex.ops._op import op
from apex.ops._thresholds import Threshold

ALIGNED = 16  # bytes: what Triton asks of an address


def by_row(
    of: op, definition: Callable[..., torch.Tensor], *, pieces: Any = None, **options: Any
) -> None:
    """Cover an operation.

    Args:
        of: The operation.
        definition: Of the same arguments, which are contiguous: torch's functions that compute a
            row the same in any batch on a CPU.
        pieces: ``forward`` and ``backward`` of float32 and 16 bits instead of it; see `op`.
        options: For ``forward`` of the kernels.
    """

    def make() -> None:
        of.by_row = _ByRow(of, definition, pieces, options)

    _batch_invariance.when_on(make)


class _ByRow(op):
    def __init__(
        self, of: op, definition: Callable[..., torch.Tensor], pieces: Any, options: dict[str, Any]
    ) -> None:
        self._torchs, self._torchs_gradient, self._options = definition, of.gradient, options
        super().__init__(
            of.schema.replace("(", "_by_row(", 1),
            self._by_torch,
            grads=of.grads,
            kernel=of._kernel_file.rpartition(".")[2],
            saves=of.saves,
            gradient=None if of.gradient is None else self._gradient_by_torch,
            allocate=of.allocate,
            pieces=pieces,
            autocast=of.autocast,
            takes=(of.takes, of._asks_from),
        )
        self.own_backward = True  # compiled graphs get the operator
        self.threshold = Threshold(1, 1)

    def implementation(self, x: torch.Tensor, *, eager: bool = False) -> Any:
        found = super().implementation(x, eager=eager)
        if isinstance(found, ModuleType):
            return _Aligned(found, self._options)
        if found is self.pieces and found is not None:
            self._refuse_devices(x)
        return found

    def _by_torch(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        self._refuse_devices(x)
        y = self._torchs(*map(_contiguous, (x, *rest)))
        # A gradient passes `reshape` contiguous. Without it a sum over its rows has its strides.
        return y.reshape(-1).view(y.shape)

    def _gradient_by_torch(self, dy: torch.Tensor, **saved: Any) -> Sequence[torch.Tensor | None]:
        self._refuse_devices(dy)
        assert self._torchs_gradient is not None
        contiguous = {name: _contiguous(value) for name, value in saved.items()}
        return self._torchs_gradient(dy.contiguous(), **contiguous)

    def _refuse_devices(self, x: torch.Tensor) -> None:
        if x.device.type in ("cpu", "meta") or not x.numel() or _runtime.recorded():
            return
        why = _runtime.why_not_triton(x.device.type)
        raise RuntimeError(
            f"batch_invariant: there is no kernel for this call of {self.name} ({x.dtype} on "
            f"{x.device}{'; ' + why if why else ''}), and PyTorch's functions for that device "
            "compute a row differently in another batch. Pass float32, float16 or bfloat16 on a "
            "GPU with Triton, without torch.func and create_graph; or leave batch_invariant out."
        )


class _Aligned:
    """Kernels, of tensors that begin at a multiple of 16 bytes."""

    def __init__(self, kernels: ModuleType, options: dict[str, Any]) -> None:
        self._forward, self._backward = kernels.forward, kernels.backward
        self._options = options

    def forward(self, *args: Any) -> Any:
        return self._forward(*map(_placed, args), **self._options)

    def backward(self, dy: torch.Tensor, needs: Sequence[bool], **saved: Any) -> Any:
        placed = {name: _placed(value) for name, value in saved.items()}
        return self._backward(_placed(dy), needs, **placed)


def _placed(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.data_ptr() % ALIGNED:
        return value.clone(memory_format=torch.contiguous_format)
    return value


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value
