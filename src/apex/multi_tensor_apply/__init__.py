"""Old names of NVIDIA's Apex: ``multi_tensor_applier`` calls functions over lists of tensors.

Programs that capture such calls, or optimizer steps, in CUDA graphs call :func:`release_captured`
after they delete the graphs.
"""

from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply
from apex.ops.lists.pointer_tables import release_captured

__all__ = ["MultiTensorApply", "multi_tensor_applier", "release_captured"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
