"""Batch norm over groups of processes, for images whose last dimension holds the channels."""

from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
