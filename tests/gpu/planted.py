"""Faults that are planted in Triton kernels and launches, and not in PTX; for test_driver.py."""

from unittest import mock

import torch
import triton
import triton.language as tl

from apex.ops.lists.pointer_tables import TableCache
from apex.optimizers import FusedSGD
from tests.gpu.driver import gpu


@triton.jit
def list_kernel(x_ptr):
    """Has the name of one that promises the bits of its definition."""
    tl.store(x_ptr, tl.exp2(tl.load(x_ptr)))


@triton.jit
def claiming(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Reads from an address that it says is aligned."""
    lanes = tl.arange(0, BLOCK)
    tl.store(y_ptr + lanes, tl.load(tl.multiple_of(x_ptr + 1, 16) + lanes))


@triton.jit
def copied(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Copies ``n`` numbers; with a mask that is too long where ``n`` is."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lanes, tl.load(x_ptr + lanes, lanes < n), lanes < n)


def approximate():
    """An approximate instruction in a kernel over lists."""
    list_kernel[(1,)](torch.zeros(1))


def misaligned():
    """A wide access at an odd address."""
    claiming[(1,)](torch.zeros(2048), torch.zeros(1024), BLOCK=1024)


def too_long():
    """One number beyond a view, which its storage has."""
    x, y = torch.zeros(64), torch.zeros(64)
    copied[(2,)](x[:40], y, 41, BLOCK=32)


def too_long_a_list():
    """One number beyond a tensor of a list, which only a table has the address of."""
    of_class = TableCache.of_launch

    def longer(self, numels, columns, device):
        return of_class(self, tuple(many + 1 for many in numels), columns, device)

    params = [torch.nn.Parameter(torch.zeros(many)) for many in (64, 100)]
    for param in params:
        param.grad = torch.zeros_like(param)
    with mock.patch.object(TableCache, "of_launch", longer):
        FusedSGD(params, lr=0.1).step()


def running(function):
    """Call a function where kernels are executed."""
    with gpu():
        function()


def unwritten():
    """Whether memory that nobody wrote is full of NaN, where a kernel leaves out a number."""
    with gpu():
        y = torch.empty(64)
        copied[(2,)](torch.zeros(64), y, 63, BLOCK=32)
    return y.isnan().tolist()
