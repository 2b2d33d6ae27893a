"""Old name of NVIDIA's Apex: a step of LAMB over lists of tensors, as compiled Apex had it in 2019.

Arguments are positional only. For ``chunk_size`` and ``noop_flag`` see ``amp_C``.
"""

import torch

from apex.multi_tensor_apply.list_functions import multi_tensor_lamb

__all__ = ["lamb"]


def lamb(  # noqa: PLR0913
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], lr: float,
    beta1: float, beta2: float, epsilon: float, step: int, bias_correction: int,
    weight_decay: float, grad_averaging: int, mode: int, global_grad_norm: float,
    max_grad_norm: float, /,
) -> None:  # fmt: skip
    """``amp_C.multi_tensor_lamb`` without NVLAMB, with lists of gradients, weights and moments.

    ``global_grad_norm`` is a number or a tensor; after the step the gradients are the updates.
    """
    rest = (bias_correction, weight_decay, grad_averaging, mode, global_grad_norm, max_grad_norm)
    lists = (chunk_size, noop_flag, tensor_lists)
    multi_tensor_lamb(*lists, lr, beta1, beta2, epsilon, step, *rest, False)
