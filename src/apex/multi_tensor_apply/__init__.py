"""``multi_tensor_applier``: how functions over lists of tensors are called."""

from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
