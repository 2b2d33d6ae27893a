"""The suite on another device, with no test edited: ``--device cuda``.

Tensors that name no device are on the GPU, also those that modules make while they are imported.
Random numbers are drawn on the CPU and moved, so that a failure is never other numbers.
``autocast("cpu")`` and ``GradScaler("cpu")`` mean the device. Tests marked ``gpu`` run as they are.
Processes that other tests start stay on the CPU, and what is about the CPU does not run.

``--device cpu`` does all that with the CPU as the default device, so that nothing moves: it shows
that a failure on a GPU comes from the GPU.
"""

import functools
import importlib
import os
import pkgutil
import warnings

import pytest
import torch

from apex.commands.selftest.gpu import WARNED

# What does not run on another device, and why: whole folders, files, single tests.
OF_THE_CPU = {
    "tests/amp/casting/test_float16_on_cpu.py": "float16 as oneDNN computes it",
    "tests/amp/test_frames.py": "counts Python frames, of which a default device adds some",
    "tests/amp/test_graphs.py": "graphs recorded on a CPU; tools/gpu/graphs.py has CUDA's",
    "tests/amp/optimizer/test_optimizer.py::test_at_most_one_host_read_per_step": (
        "a method that it replaces is called twice under a default device"
    ),
    "tests/commands/bench/": "commands that choose a device themselves",
    "tests/commands/": "commands that choose a device themselves",
    "tests/clients/": "programs in environments of their own",
    "tests/debug/test_both_ways.py": "scripts in forked processes, which cannot use a GPU",
    "tests/debug/test_command.py": "scripts in processes of their own",
    "tests/debug/test_devices.py": "stand-ins for GPUs, of tensors of the CPU",
    "tests/debug/test_reproduce.py::test_script_runs_without_apex": "loads tensors in a process "
    "that has no GPU",
    "tests/examples/": "programs in processes of their own",
    "tests/gpu/": "interprets PTX, on tensors of the CPU",
    "tests/commands/info/": "what the command says of this machine",
    "tests/kernels/": "compiles without a GPU",
    "tests/ops/test_batch_invariance.py::test_without_the_switch_the_number_of_elements_decides": (
        "what is computed in pieces on a CPU"
    ),
    "tests/ops/test_batch_invariance.py::test_no_function_tells_places_in_a_vector_apart": (
        "what stands for torch's functions on a CPU"
    ),
    "tests/optimizers/test_process_defaults.py": "compares with no default device",
    "tests/parallel/test_multiproc.py": "scripts in processes of their own",
    "tests/commands/selftest/": "commands that choose a device themselves",
    "tests/test_": "the tree, the script, defaults that the tests set themselves",
    "tests/typed/": "types, by mypy",
}
DRAWN = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
DRAWN_LIKE = ("rand_like", "randn_like", "randint_like")
IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
PLAIN = (torch.Tensor, torch.nn.Parameter)


def runs_there(item):
    """Whether a test says something about another device."""
    if item.get_closest_marker("gpu"):
        return True
    return not (item.get_closest_marker("dist") or item.nodeid.startswith(tuple(OF_THE_CPU)))


def to_cpu(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


class OnDevice:
    """A pytest plugin; ``of_children`` is the environment of processes that tests start."""

    def __init__(self, device, of_children):
        self.device, self.of_children = torch.device(device), of_children
        self.active, self.environment = True, {}
        self.patch = pytest.MonkeyPatch()

    def begin(self):
        """Patch torch and set the default device, before any test is imported."""
        self.environment = {name: os.environ.get(name) for name in self.of_children}
        if self.device.type == "cuda":
            _decorate_kernels()
            torch.cuda.init()  # sees the GPU, whatever the environment of children hides later
        for name in DRAWN + DRAWN_LIKE:
            self.patch.setattr(torch, name, self.drawn(getattr(torch, name), name in DRAWN))
        for name in IN_PLACE:
            self.patch.setattr(torch.Tensor, name, self.drawn_in_place(getattr(torch.Tensor, name)))
        for kind, default in ((torch.autocast, None), (torch.amp.GradScaler, "cuda")):
            self.patch.setattr(kind, "__init__", self.of_a_device(kind.__init__, default))
        torch.set_default_device(self.device)

    def pytest_unconfigure(self):
        """Undo it all."""
        torch.set_default_device(None)
        self.patch.undo()
        _update_environment(self.environment)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Run tests marked gpu as they are: no default device, their processes on the GPU."""
        self.active = not item.get_closest_marker("gpu")
        torch.set_default_device(self.device if self.active else None)
        if self.device.type == "cuda":
            _update_environment(self.of_children if self.active else self.environment)
        return (yield)

    @pytest.fixture(autouse=True)
    def _what_waits_is_asked_for_one_test(self):
        """torch warns of its own mode; left on, it would be an error in every later test."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", WARNED)
            yield
        if torch.cuda.is_initialized():
            torch.cuda.set_sync_debug_mode("default")

    def drawn(self, real, is_factory):
        """Draw on the CPU, and move."""

        @functools.wraps(real)
        def draw(*args, **kwargs):
            generator = kwargs.get("generator")
            elsewhere = kwargs.get("device") is not None or kwargs.get("out") is not None
            if not self.active or elsewhere or (generator and generator.device.type != "cpu"):
                return real(*args, **kwargs)
            given = [value for value in args if isinstance(value, torch.Tensor)]
            if any(type(value) not in PLAIN or value.is_meta for value in given):
                return real(*args, **kwargs)
            wants_grad = kwargs.pop("requires_grad", False)
            if is_factory and not given:
                kwargs["device"] = "cpu"
            found = real(*map(to_cpu, args), **kwargs)
            return found.to(self.device).requires_grad_(wants_grad)

        return draw

    def drawn_in_place(self, real):
        """Draw the same on the CPU, and copy: initial weights are those of the CPU."""

        @functools.wraps(real)
        def draw(self_, *args, **kwargs):
            there = type(self_) in PLAIN and self_.device.type == self.device.type != "cpu"
            if not (self.active and there) or kwargs.get("generator") is not None:
                return real(self_, *args, **kwargs)
            drawn = torch.empty(self_.shape, dtype=self_.dtype, device="cpu")
            return self_.copy_(real(drawn, *map(to_cpu, args), **kwargs))

        return draw

    def of_a_device(self, init, default):
        """Take the device for "cpu"."""

        @functools.wraps(init)
        def __init__(self_, device=default, *args, **kwargs):
            device = kwargs.pop("device_type", device)
            if self.active and device == "cpu":
                device = self.device.type
            init(self_, device, *args, **kwargs)

        return __init__


def _decorate_kernels():
    """Import every kernel: Triton reads TRITON_INTERPRET, which children have, only then."""
    try:
        kernels = importlib.import_module("apex.kernels")
        for module in pkgutil.walk_packages(kernels.__path__, "apex.kernels."):
            importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # apex then computes without kernels
        warnings.warn(f"no kernels: {error.name} is not installed", stacklevel=1)


def _update_environment(values):
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
