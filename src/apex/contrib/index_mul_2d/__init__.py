"""Multiply indexed rows of one matrix by the rows of another."""

from apex.contrib.index_mul_2d.index_mul_2d import index_mul_2d

__all__ = ["index_mul_2d"]
