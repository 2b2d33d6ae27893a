"""What the package ``kernels`` imports for :mod:`apex.hub`, on every device."""

from apex import _fused_layers as layers

__all__ = ["layers"]
