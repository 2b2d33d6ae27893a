"""Interim."""

import contextlib
import threading

lock = threading.RLock()


@contextlib.contextmanager
def rollback(models, optimizers):
    with lock:
        yield
