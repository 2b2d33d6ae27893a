"""A process in which kernels are compiled and run by the interpreter of PTX.

The suite has ``TRITON_INTERPRET`` set for its whole process, and Triton reads it when a kernel is
decorated. So one other process, started when it is first needed, carries out calls::

    result = worker().call(function, *arguments)

Function, arguments and result are pickled; what the function raises is raised here as a `Raised`.
"""

import functools
import os
import pickle
import subprocess
import sys
import traceback


class Raised(Exception):
    """The traceback of what was raised in the process."""


class Worker:
    """The process."""

    def __init__(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment.pop("TRITON_INTERPRET", None)
        environment["DISABLE_PTXAS_OPT"] = "1"  # its code is not run
        words = [sys.executable, "-W", "error", "-c", f"from {__name__} import serve; serve()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(words, env=environment, **pipes)

    def call(self, function, *arguments):
        """What ``function(*arguments)`` returns there."""
        pickle.dump((function, arguments), self._process.stdin)
        self._process.stdin.flush()
        result, error = pickle.load(self._process.stdout)
        if error:
            raise Raised(error)
        return result

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@functools.cache
def worker():
    """The process that all tests of this one share; it ends with this one."""
    return Worker()


def serve():
    """Carry out calls until there are no more."""
    import torch

    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a call prints is no answer
        while True:
            try:
                function, arguments = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer = function(*arguments), ""
            except Exception:  # noqa: BLE001  (the other process raises it)
                answer = None, traceback.format_exc()
            pickle.dump(answer, answers)
            answers.flush()
