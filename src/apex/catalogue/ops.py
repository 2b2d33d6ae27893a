"""All ops on tensors."""

from apex.catalogue import layers, norms_and_losses
from apex.catalogue.entry import Op

__all__ = ["OPS"]

OPS: tuple[Op, ...] = (*norms_and_losses.OPS, *layers.OPS)
