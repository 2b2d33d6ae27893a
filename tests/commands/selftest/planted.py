"""Checks that end their process or take too long, for processes that import them."""

import os
import signal
import time

import torch

from apex.commands.selftest.check import Check, Measured, Setting


def fine(setting):
    yield Measured("process", os.getpid(), float("inf"), "")


def dies(setting):
    os.kill(os.getpid(), signal.SIGKILL)
    yield Measured("never", 0, 0, "")


def sleeps(setting):
    time.sleep(600)
    yield Measured("never", 0, 0, "")


RUN = {"fine": fine, "dies": dies, "sleeps": sleeps}


def plan(*arguments, kinds, **options):
    """Checks of these kinds, in order; those up to a ``/`` have one subject."""
    setting, subject, found = Setting(torch.device("cpu"), "definition"), 0, []
    for kind in kinds.split():
        subject += kind == "/"
        if kind != "/":
            check = Check("area", f"{len(found)} {kind}", RUN[kind], subject=f"subject {subject}")
            found.append((check, setting))
    return found
