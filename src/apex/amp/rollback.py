"""Interim."""

import contextlib, threading

lock = threading.RLock()


@contextlib.contextmanager
def rollback(models, optimizers):
    with lock:
        yield
