"""Batch norm of images with channels last, over groups of processes."""

from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
