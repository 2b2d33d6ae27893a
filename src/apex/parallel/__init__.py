"""Distributed data parallel training, synchronised batch norm, and LARC."""

from typing import Any

import torch

from apex._upstream.missing import explain_attributes
from apex.parallel.convert_syncbn import convert_syncbn_model, create_syncbn_process_group
from apex.parallel.distributed import DistributedDataParallel, Reducer
from apex.parallel.LARC import LARC
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm

__all__ = [
    "DistributedDataParallel",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "LARC",
    "Reducer",
    "ReduceOp",
]

ReduceOp: Any = getattr(torch.distributed, "ReduceOp", None)  # None: a torch without distributed

explain_attributes(__name__)
