"""A process in which kernels are compiled and run by the interpreter of PTX.

The suite has ``TRITON_INTERPRET`` set for its whole process, and Triton reads it when a kernel is
decorated. So one other process, started when it is first needed, carries out calls.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import warnings
from unittest import mock


def _begin():
    import torch

    warnings.simplefilter("error")
    torch.set_num_threads(1)


@functools.cache
def process():
    """The process that all tests of this one share."""
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, spawn, _begin)


def call(function, *arguments):
    """What ``function(*arguments)`` returns or raises there."""
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        return process().submit(function, *arguments).result()
