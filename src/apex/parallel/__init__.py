"""Training on several devices."""

from apex._missing import explain_attributes
from apex.parallel.convert_syncbn import convert_syncbn_model, create_syncbn_process_group
from apex.parallel.LARC import LARC
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm

__all__ = ["LARC", "SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]

explain_attributes(__name__)
