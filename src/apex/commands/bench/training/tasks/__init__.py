"""The tasks of `apex bench` by name, and the user's own from a file.

Both are functions of `TaskOptions`; the module is imported only once the task has been chosen. Data
come from installed packages or from a folder of the user's, and are the same at every seed: a seed
decides the first weights and the order.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from apex.commands.bench.training.tasks.task import Task, TaskOptions
from apex.commands.command_line import INSTALLED_AS, UsageError, of_notebook, raised

__all__ = ["NEEDED", "TASKS", "complete", "load"]


# Where a task is, module:function of this package, and what a list of tasks says of it.
TASKS = {
    "digits-mlp": ("digits:mlp", "three linear layers, digits of 16x16"),
    "digits-cnn": ("digits:cnn", "three convolutions, digits of 16x16"),
    "digits-vgg16": ("digits:vgg", "VGG16 with a quarter of the channels, digits of 32x32"),
    "cifar10-vgg16": ("cifar10:vgg", "VGG16, CIFAR-10's binary files in --data"),
    "cifar10-resnet18": ("cifar10:resnet18", "ResNet-18, CIFAR-10's binary files in --data"),
    "resnet50": ("resnet50:resnet50", "ResNet-50 on random images"),
    "text-lstm": ("text:lstm", "LSTM, next character of Python's documentation"),
    "text-transformer": (
        "text:transformer", "transformer, next character of Python's documentation",
    ),
    "bert-tiny": ("text:bert_tiny", "BERT of 2 layers, masked words, random weights"),
    "bert-base": ("text:bert_base", "BERT of 12 layers, masked words, random weights"),
    "seq2seq": ("text:seq2seq", "GRUs with attention that write words backwards; loss scale"),
    "dcgan-digits": (
        "dcgan:digits_dcgan", "DCGAN of digits: two models, two optimizers, three losses",
    ),
    "linear": ("linear:regression", "regression with Linear(1024, 512)"),
}  # fmt: skip

NEEDED = ("model", "loss", "loader")
OBJECT = (
    "an object with model(), loss(model, batch) and loader(batch_size, seed) "
    "(docs/precision-report.md)"
)
_OPTIONAL: dict[str, tuple[Any, str]] = {  # attributes with defaults in Task: what they must be
    "optimizer": (str, "a string"),
    "lr": ((int, float, type(None)), "a number"),
    "epochs": (int, "a whole number"),
    "accuracy": ((Callable, type(None)), "a function"),
    "test_loss": ((Callable, type(None)), "a function"),
    "test_size": ((int, type(None)), "a whole number"),
    "chance": ((int, float, type(None)), "a number"),
    "step": ((Callable, type(None)), "a function"),
    "losses": (int, "a whole number"),
    "growth_interval": (int, "a whole number"),
}


def load(name: str, options: TaskOptions) -> Task:
    """Make a task.

    Args:
        name: One of `TASKS`, or ``file.py:function`` for a task of the user's. The file is imported
            under its own name, with its folder first on the import path.
        options: What ``function`` is called with.

    Raises:
        UsageError: There is no such task, or it cannot be made; the message is one line.
    """
    if name in TASKS:
        return _ours(name, options)
    path, colon, function = name.rpartition(":")
    if not colon or not path or not function:
        own = f"{name.strip(':')}:build" if ".py" in name else "FILE.py:FUNCTION"
        raise UsageError(f"task {name}: use {own} or one of {', '.join(TASKS)}")
    build = getattr(_imported(name, Path(path)), function, None)
    write = f"write {function}(options) that returns {OBJECT}"
    if not callable(build):
        raise UsageError(f"task {name}: there is no function {function} in {path}; {write}")
    if given := _defined_as(build, options):
        raise UsageError(
            f"task {name}: apex calls {function}(options), and {path} defines {function}{given}; "
            f"{write}"
        )
    try:
        made = build(options)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"task {name}: {function} raised {raised(error)}") from error
    try:
        return complete(made)
    except TypeError as error:
        raise UsageError(
            f"task {name}: what {function} returned {error}; it must return {OBJECT}"
        ) from None


def _ours(name: str, options: TaskOptions) -> Task:
    module, _, function = TASKS[name][0].partition(":")
    try:
        task: Task = getattr(importlib.import_module(f"{__name__}.{module}"), function)(options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "apex"):
            raise
        package = INSTALLED_AS.get(package, package)
        raise UsageError(f"task {name} needs {package}: pip install {package}") from None
    return task


def _defined_as(build: Callable[..., Any], options: TaskOptions) -> str:
    """The arguments of a function that cannot be called with the options; empty if it can."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # a built-in function
        return ""
    try:
        signature.bind(options)
    except TypeError:
        return str(signature)
    return ""


def complete(made: Any) -> Task:
    """Give an object of the user's, which may be a module, the defaults of `Task`.

    Raises:
        TypeError: One of `NEEDED` is missing, or an attribute is of the wrong kind; the message
            goes on after "what the function returned".
    """
    if made is None:
        raise TypeError("is None")
    own_step = callable(getattr(made, "step", None))  # computes its losses itself
    needed = [name for name in NEEDED if name != "loss" or not own_step]
    missing = [name for name in needed if not callable(getattr(made, name, None))]
    if missing:
        raise TypeError(f"({type(made).__name__}) has no function {' and no '.join(missing)}")
    for name, (kind, described) in _OPTIONAL.items():
        if not isinstance(getattr(made, name, getattr(Task, name)), kind):
            given = type(getattr(made, name)).__name__
            raise TypeError(f"has {name} of type {given}; it must be {described}")
    if isinstance(made, Task):
        return made
    names = [name for name in (*NEEDED, *_OPTIONAL) if hasattr(made, name)]
    return Task(**{name: getattr(made, name) for name in names})


def _imported(name: str, file: Path) -> ModuleType:
    """Import a file of the user's as ``python file`` would find its neighbours."""
    if file.suffix != ".py" or not file.is_file():
        why = of_notebook(file) or f"there is no Python file {file}"
        raise UsageError(f"task {name}: {why}")
    file = file.resolve()
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        module = importlib.import_module(file.stem)
    except (Exception, SystemExit) as error:
        raise UsageError(f"task {name}: {file.name} raised {raised(error)}") from error
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise UsageError(
            f"task {name}: another module is called {file.stem} ({module.__name__} of "
            f"{getattr(module, '__file__', None) or 'Python itself'}); rename the file"
        )
    return module
