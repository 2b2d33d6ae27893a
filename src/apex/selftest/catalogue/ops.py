"""All ops on tensors."""

from apex.selftest.catalogue import layers, norms_and_losses
from apex.selftest.catalogue.entry import Op

__all__ = ["OPS"]

OPS: tuple[Op, ...] = (*norms_and_losses.OPS, *layers.OPS)
