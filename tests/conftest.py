"""What holds for every test: the interpreter for kernels, fixed seeds, and which tests run."""

import functools
import gc
import os
import random
import signal
import sys

import pytest
import torch

if not torch.cuda.is_available():
    # Read by triton when a kernel is decorated, so it must be set before any kernel is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's `pytest ... &` has SIGINT ignored, which programs that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors here are tiny: two threads gain nothing, and on a busy machine cost up to a hundred times.
torch.set_num_threads(1)

try:
    import hypothesis
except ModuleNotFoundError:  # on a borrowed GPU machine the rest of the suite must still run
    pass
else:
    # The same examples every time, like the seeds below; no deadline, because CI machines stall.
    hypothesis.settings.register_profile("apex", derandomize=True, deadline=None, print_blob=True)
    hypothesis.settings.load_profile("apex")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the exhaustive matrices too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        _deselect(config, items, "exhaustive")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("dist") and not torch.distributed.is_available():
            item.add_marker(pytest.mark.skip(reason="this torch has no torch.distributed"))


def _deselect(config, items, marker):
    dropped = [item for item in items if item.get_closest_marker(marker)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imported modules and collected tests stay: the collector of garbage walks over them once.

    Those of the whole suite are 800,000 objects, which take it 0.4 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup():
    """Let Triton's interpreter replace `triton.language` once a launch.

    It does so again whenever a kernel calls a jitted function, which is half of its time.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "_patch_lang_anew"):
        return
    interpreter._patch_lang_anew = interpreter._patch_lang
    language = interpreter.tl

    @functools.cache
    def used(function):
        names = [id(value) for value in function.__globals__.values()]
        return [place for place in (language, language.core) if id(place) in names]

    def patch(function):
        if all(place.range.__name__ == "_new_range" for place in used(function)):
            return getattr(interpreter, "_LangPatchScope", lambda: None)()  # nothing to restore
        return interpreter._patch_lang_anew(function)

    interpreter._patch_lang = patch


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this tree."""
    from tests.clients.runner import build_wheel

    pytest.importorskip("build")
    return build_wheel(tmp_path_factory.mktemp("wheel"))
