"""``apex.transformer``: utilities in one process, loggers, names."""

import logging

import pytest
import torch

import apex.transformer
from apex.transformer import _ucc_util, log_util, utils
from apex.transformer.pipeline_parallel import utils as pipeline
from apex.transformer.tensor_parallel import layers
from apex.transformer.testing import commons


def test_divide():
    utils.ensure_divisibility(12, 4)
    assert utils.divide(12, 4) == 3
    for numbers in ((12, 5), (12, 0)):
        for function in (utils.ensure_divisibility, utils.divide):
            with pytest.raises(AssertionError, match="12 is not divisible by [05]"):
                function(*numbers)


def test_one_process_has_the_whole_tensor():
    x = torch.arange(6.0).view(2, 3)
    part = utils.split_tensor_into_1d_equal_chunks(x)
    assert part.tolist() == x.flatten().tolist()
    assert part.data_ptr() == x.data_ptr()
    joined = utils.gather_split_1d_tensor(part)
    assert torch.equal(joined, part)
    assert joined.data_ptr() != part.data_ptr()


def test_loggers():
    logger = log_util.get_transformer_logger("apex.transformer.some.module.py")
    assert logger.name == "apex.transformer.some.module"
    root = logging.getLogger("apex")
    level = root.level
    try:
        for verbosity, number in ((logging.ERROR, 40), ("DEBUG", 10)):
            log_util.set_logging_level(verbosity)
            assert logger.getEffectiveLevel() == number
    finally:
        root.setLevel(level)
    assert not logger.handlers
    assert not root.handlers


def test_names():
    assert _ucc_util.HAS_UCC in (False, True)
    assert apex.transformer.amp.GradScaler.__mro__[1:3] == (
        apex.amp.GradScaler,
        torch.amp.GradScaler,
    )
    assert apex.transformer.utils is utils


def test_arguments_that_are_refused():
    tensor = torch.ones(2)
    layers.set_tensor_model_parallel_attributes(tensor, True, 0, 1)
    refused = {
        "bf16 is 1; pass a bool": lambda: pipeline.calc_params_l2_norm([], 1),
        "attributes .'tensor_model_parallel', .* already": lambda: (
            layers.set_tensor_model_parallel_attributes(tensor, True, 0, 1)
        ),
        "accumulation_in_fp16 is 'x'; pass a bool": lambda: layers.ColumnParallelLinear(
            2, 2, accumulation_in_fp16="x"
        ),
        "backend is 'mpi'; pass 'nccl'": lambda: commons.initialize_distributed("mpi"),
    }
    for match, call in refused.items():
        with pytest.raises(ValueError, match=match):
            call()
