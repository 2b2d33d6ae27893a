"""Batch samplers for data-parallel ranks."""

from apex._upstream.missing import explain_attributes
from apex.transformer._data._batchsampler import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)

__all__ = ["MegatronPretrainingRandomSampler", "MegatronPretrainingSampler"]

explain_attributes(__name__)
