"""Training on several devices."""

from apex.parallel.LARC import LARC

__all__ = ["LARC"]
