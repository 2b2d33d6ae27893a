"""Training on several devices."""

from typing import Any

import torch

from apex._missing import explain_attributes
from apex.parallel.distributed import DistributedDataParallel, Reducer
from apex.parallel.LARC import LARC

__all__ = ["LARC", "DistributedDataParallel", "ReduceOp", "Reducer"]

ReduceOp: Any = getattr(torch.distributed, "ReduceOp", None)  # None: a torch without distributed

explain_attributes(__name__)
