"""What the package ``kernels`` imports for :mod:`apex.hub`, on every device."""

from apex.patching import _layers as layers

__all__ = ["layers"]
