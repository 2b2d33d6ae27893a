"""Rows of a matrix, chosen by an index, times rows of another."""

from apex.contrib.index_mul_2d.index_mul_2d import index_mul_2d

__all__ = ["index_mul_2d"]
