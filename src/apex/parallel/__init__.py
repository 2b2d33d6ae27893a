"""Training on several devices."""

from torch.distributed import ReduceOp

from apex._missing import explain_attributes
from apex.parallel.distributed import DistributedDataParallel, Reducer
from apex.parallel.LARC import LARC

__all__ = ["LARC", "DistributedDataParallel", "ReduceOp", "Reducer"]

explain_attributes(__name__)
