"""What a program must not notice: printed lines, warnings, random numbers, changes of modules."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Swallow lines on stdout and warnings; give the states of random numbers back at the end."""
    restore = _random_states()
    try:
        with _quiet(sys.stdout), _no_warnings():
            yield
    finally:
        restore()


def _random_states() -> Callable[[], None]:
    """Keep the states of Python, NumPy and torch on all devices; return what gives them back."""
    python, cpu = random.getstate(), torch.get_rng_state()
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if is_on_gpu else []
    numpy: Any = sys.modules.get("numpy")  # only if the program has imported it
    legacy = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if legacy is not None:
            numpy.random.set_state(legacy)

    return restore


@contextmanager
def _quiet(stream: Any) -> Iterator[None]:
    """Swallow what the replay writes to a stream, also through a reference to it (a log handler).

    Other threads of the program write on. One that Python did not start is autograd's.
    """
    dummy = threading._DummyThread
    others = {t.ident for t in threading.enumerate() if not isinstance(t, dummy)}
    others.discard(threading.get_ident())
    try:
        write = stream.write

        def filtered(text: str) -> Any:
            return write(text) if threading.get_ident() in others else len(text)

        stream.write = filtered
    except AttributeError:  # None without a console, or an object that takes no attributes
        yield
        return
    try:
        yield
    finally:
        del stream.write


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Ignore all warnings.

    Not ``warnings.catch_warnings``: at its end each warning that was shown once is shown again.
    """
    ignore: Any = ("ignore", None, Warning, None, 0)
    warnings.filters.insert(0, ignore)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        warnings.filters.remove(ignore)  # type: ignore[attr-defined]


_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def unchanged(*objects: Any) -> Iterator[None]:
    """Give modules back their attributes, and their parameters and buffers all that they had.

    That is their values, their gradients and whether they need one. Objects that are no modules
    are left out. What is inside of other objects that they hold (a list that grows) is not known.
    """
    modules = [one for one in objects if isinstance(one, torch.nn.Module)]
    found = {id(one): one for module in modules for one in module.modules()}.values()
    every = [one for one in found if not isinstance(one, torch.jit.ScriptModule)]
    attributes = [(one, {**vars(one)}, {k: {**vars(one)[k]} for k in _TABLES}) for one in every]
    tensors = [_Tensor(x) for m in modules for x in (*m.parameters(), *m.buffers())]
    try:
        yield
    finally:
        for one, before, tables in attributes:
            vars(one).clear()
            vars(one).update(before)
            for name, table in tables.items():
                before[name].clear()
                before[name].update(table)
        for tensor in tensors:
            tensor.restore()


class _Tensor:
    """What a parameter or buffer has: its values, its gradient, and whether it needs one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.needs_one = tensor, tensor.requires_grad
        self.gradient = tensor.grad if tensor.is_leaf else None
        self.values = [(x, x.detach().clone()) for x in (tensor, self.gradient) if x is not None]

    def restore(self) -> None:
        """Give it back."""
        for tensor, value in self.values:
            tensor.data.copy_(value)
        if self.tensor.is_leaf:
            self.tensor.requires_grad_(self.needs_one).grad = self.gradient
