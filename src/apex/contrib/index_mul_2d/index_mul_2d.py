"""``index_mul_2d``: gather and product in one kernel each way."""

from apex.ops.layers.index_mul_2d import index_mul_2d

__all__ = ["index_mul_2d"]
