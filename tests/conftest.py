"""What holds for every test: the device, the interpreter for kernels, seeds, and which tests run.

There are three sizes. ``--all`` runs every test. ``--full`` leaves out the exhaustive matrices.
Without either the selection is quick: of each function's cases every value of every
``parametrize`` at least once (*each choice*), and nothing that is marked slow. Selecting tests by
path, node id, ``-k`` or ``-m`` is as good as ``--full``, unless ``--quick`` is given, too.
``--rest`` runs what ``--full`` adds to the quick selection.
"""

import dataclasses
import functools
import gc
import importlib.util
import json
import os
import pathlib
import random
import signal
import sys
import time

import pytest

# The suite is the CPU's, on every machine: kernels run in Triton's interpreter, on tensors of the
# CPU. All this is read later than here: by CUDA when it is first asked, by Triton when a kernel is
# decorated. Processes that tests start inherit it.
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
BEFORE = {name: os.environ.get(name) for name in CPU_ONLY}
os.environ.update(CPU_ONLY)

# A shell's `pytest ... &` has SIGINT ignored, which programs that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where one case of a function is enough in the quick selection, but for those that expect errors:
# names that few programs use, and what developers inspect kernels with.
LONG_TAIL = (
    "tests/RNN/",
    "tests/contrib/",
    "tests/extension_modules/",
    "tests/fp16_utils/",
    "tests/gpu/",
    "tests/kernels/",
    "tests/reparameterization/",
    "tests/transformer/",
)
STARTED = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="quick selection of named tests")
    parser.addoption("--full", action="store_true", help="run all but the exhaustive matrices")
    parser.addoption("--all", action="store_true", help="run the exhaustive matrices too")
    parser.addoption("--rest", action="store_true", help="run what --full adds to the quick ones")
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        help="make it the default device (tests/on_device.py); cuda: tests marked gpu, too",
    )


def pytest_configure(config):
    _test_this_tree(config)
    _forget_families_at_changes()
    option = config.option
    if option.device == "cuda":
        for name, value in BEFORE.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    if option.device:
        from tests.on_device import OnDevice

        plugin = OnDevice(option.device, CPU_ONLY)
        config.pluginmanager.register(plugin)
        plugin.begin()
    by_path = config.args_source is config.ArgsSource.ARGS
    named = by_path or option.keyword or option.markexpr
    option.full = option.full or option.rest or option.all or bool(named and not option.quick)
    is_worker = hasattr(config, "workerinput")  # a process of xdist, which has the same arguments
    if is_worker or not getattr(option, "numprocesses", None):
        _import_torch()
    if not (named or is_worker or option.collectonly):
        config.stash[STARTED] = time.monotonic()


def _test_this_tree(config):
    """See that apex is that of this tree, here and in the processes that tests start.

    The environment may have an editable install of another clone. ``pythonpath`` in pyproject.toml
    comes before it on the path of this process alone.
    """
    paths = [str(path) for path in config.getini("pythonpath")]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*paths, *inherited])))
    source = pathlib.Path(__file__).resolve().parent.parent / "src"
    found = importlib.util.find_spec("apex")  # where it was imported from, if it was
    if source.is_dir() and not pathlib.Path(found.origin).resolve().is_relative_to(source):
        raise pytest.UsageError(
            f"these tests are for {source}, but `import apex` gives {found.origin}: start pytest "
            f"in a new process, with the settings of {source.parent / 'pyproject.toml'}"
        )


def _import_torch():
    """Prepare a process that runs tests; the first one of xdist runs none, and saves 1.5 s."""
    import torch

    # Tensors are tiny: two threads gain nothing, and on a busy machine cost up to a hundred times.
    torch.set_num_threads(1)
    try:
        import hypothesis
    except ModuleNotFoundError:  # on a borrowed GPU machine the rest of the suite must still run
        return
    # The same examples every time, like the seeds below; no deadline, because CI machines stall.
    hypothesis.settings.register_profile("apex", derandomize=True, deadline=None, print_blob=True)
    hypothesis.settings.load_profile("apex")


def pytest_unconfigure(config):
    """Say in the last line what ran, and how to run the other size."""
    started = config.stash.get(STARTED, None)
    if started is None:
        return
    option, seconds = config.option, time.monotonic() - started
    size, other = "quick selection", "all but the exhaustive matrices: ./dev test --full"
    if option.full:
        size = "what the quick selection left out" if option.rest else "full suite"
        other = "the quick selection: ./dev test"
    line = f"{size}{', --all' * option.all}: {seconds:.0f} s; {other}"
    config.get_terminal_writer().line(line)


def _forget_families_at_changes():
    """Launchers keep how rows are cut: have patches of a kernel module or a GPU forget it.

    So a test that changes a constant sees it and leaves nothing, and others pay nothing.
    """
    change, undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo

    def setattr_and_forget(self, target, *rest, **options):
        change(self, target, *rest, **options)
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name.startswith(("apex.kernels", "torch.cuda")):
            self.is_of_kernels = True
            _forget_families()

    def undo_and_forget(self):
        undo(self)
        if vars(self).pop("is_of_kernels", False):
            _forget_families()

    pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo = setattr_and_forget, undo_and_forget


def _forget_families():
    for name, module in [*sys.modules.items()]:
        if name.startswith("apex.kernels"):
            for value in [*vars(module).values()]:
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Build the cases of a function; of an exhaustive matrix one, which is deselected later.

    5,320 of 17,986 items are of such matrices: they take a fifth of the time of a collection.
    """
    yield
    if metafunc.config.getoption("all"):
        return
    often = [call for call in metafunc._calls if not _has(call.marks, "exhaustive")]
    if not often or _has(metafunc.definition.iter_markers(), "exhaustive"):
        often = metafunc._calls[:1]
    metafunc._calls = often


def pytest_collection_modifyitems(config, items):
    import torch

    option = config.option
    often = [item for item in items if not item.get_closest_marker("exhaustive")]
    chosen = items if option.all else often
    if not option.full:
        chosen = _quick(often)
    elif option.rest:
        quick = set(_quick(often))
        chosen = [item for item in chosen if item not in quick]
    if option.device:
        from tests.on_device import runs_there

        chosen = [item for item in chosen if runs_there(item)]
    kept = set(chosen)
    if dropped := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=dropped)
    items[:] = chosen
    for item in items:
        if item.get_closest_marker("gpu") and option.device != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs --device cuda"))
        if item.get_closest_marker("dist") and not torch.distributed.is_available():
            item.add_marker(pytest.mark.skip(reason="this torch has no torch.distributed"))


def _has(marks, name):
    return any(mark.name == name for mark in marks)


def _quick(items):
    """Return those that are not slow and have a value that no case of their function had before."""
    chosen, seen = [], set()
    for item in items:
        function, case = item.nodeid.split("[")[0], getattr(item, "callspec", None)
        values = {function}
        has_errors = "raises" in item.function.__code__.co_names
        if case is not None and (has_errors or not function.startswith(LONG_TAIL)):
            values = {(function, level, value) for level, value in enumerate(case._idlist)}
        if not values <= seen and not item.get_closest_marker("slow"):
            chosen.append(item)
            seen |= values
    return chosen


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
    """Let Triton's interpreter do once what it does at each operation.

    The tests of ops take 91 s of processor time instead of 119 with all but the first of these.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "_patch_lang_anew"):
        return
    _replace_language_once(interpreter)
    _share_types(interpreter)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # then what was computed to find overflows of integers is not looked at
        interpreter.interpreter_builder.options = dataclasses.replace(
            options, sanitize_overflow=False
        )


def _replace_language_once(interpreter):
    """Replace `triton.language` once a launch, and not whenever a kernel calls a jitted function.

    That was half of the interpreter's time.
    """
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


def _share_types(interpreter):
    """Make the type of blocks of a size once, and what a tensor has of its type."""
    block_type, tensor = interpreter.tl.core.block_type, interpreter.tl.core.tensor
    of_blocks, of_tensors = block_type.__init__, tensor.__init__
    numpy_dtype, blocks, dtypes = interpreter._get_np_dtype, {}, {}

    def make_block_type(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            of_blocks(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def make_tensor(self, handle, type):
        if "_of_tensors" not in vars(type):
            of_tensors(self, handle, type)
            type._of_tensors = {key: value for key, value in vars(self).items() if key != "handle"}
        vars(self).update(type._of_tensors, handle=handle)

    def dtype_in_numpy(kind):
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(kind)
        return dtypes[name]

    block_type.__init__, tensor.__init__ = make_block_type, make_tensor
    interpreter._get_np_dtype = dtype_in_numpy


@pytest.fixture
def group_of_one():
    from tests.ranks import alone

    with alone():
        yield


@pytest.fixture(autouse=True)
def _fixed_seeds():
    import torch

    random.seed(0)
    # Without a GPU torch.manual_seed notes a stack of calls for each kind of device: 0.4 ms.
    is_on_gpu = torch.cuda.is_initialized()
    (torch.manual_seed if is_on_gpu else torch.default_generator.manual_seed)(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """A function: ``once(name, make)`` is what ``make()`` returned in the first process to ask.

    The processes of pytest-xdist share it, as JSON.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def shared(name, make):
        import fcntl  # not on Windows

        with open(folder / f"{name}.json", "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if not text:
                text = json.dumps(make())
                file.write(text)
        return json.loads(text)

    return shared


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes that talk over gloo, for the tests of a file."""
    yield from _ranks(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four of them."""
    yield from _ranks(tmp_path_factory, 4)


def _ranks(tmp_path_factory, count):
    from tests.ranks import Ranks

    with Ranks(tmp_path_factory.mktemp("ranks"), count=count) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def wheel(once, tmp_path_factory):
    """The wheel of this tree."""
    from tests.clients.runner import build_wheel

    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    return pathlib.Path(once("wheel", lambda: str(build_wheel(folder))))
