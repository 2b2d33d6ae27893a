"""Old name of NVIDIA's Apex: what compiled Apex offered at the top level for lists of tensors.

Each function is called as ``f(chunk_size, noop_flag, tensor_lists, ...)``, by position only.
``chunk_size`` is taken and not needed. ``noop_flag`` is a one-element tensor; who reads or sets it
is said at each function, and it is only ever set to 1: clearing it is the caller's. The lists are
equally long, and the tensors at one position have the same number of elements; empty ones are
passed over. Every floating dtype is taken, mixed within a list too, on any device. Numbers may be
tensors of one element.

Nothing waits for a device, except for numbers that the original takes from the host and that are
given as tensors on a device (betas, eps, momentum and dampening), and for a flag on the CPU that is
to be set for tensors elsewhere.
"""

from apex.multi_tensor_apply.list_functions import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_l2norm_scale,
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
    multi_tensor_novograd,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
    update_scale_hysteresis,
)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
