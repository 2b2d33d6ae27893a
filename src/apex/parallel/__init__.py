"""Training on several devices."""

from apex._missing import explain_attributes
from apex.parallel.LARC import LARC

__all__ = ["LARC"]

explain_attributes(__name__)
