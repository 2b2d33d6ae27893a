"""``SyncBatchNorm`` under the import path of the original's CUDA version; there is one class."""

from apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
