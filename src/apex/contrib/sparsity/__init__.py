"""Automatic sparsity: set 2 of every 4 weights to zero, for sparse tensor cores."""

from apex._upstream.missing import explain_attributes
from apex.contrib.sparsity.asp import ASP
from apex.contrib.sparsity.sparse_masklib import create_mask

__all__ = ["ASP", "create_mask"]

explain_attributes(__name__)
