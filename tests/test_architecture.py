"""Rules about the tree itself."""

import ast
import functools
import graphlib
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest
import torch
from torch.torch_version import TorchVersion

from apex import _compat
from tests.trees import EXTENSION_MODULES, SRC, files, tree

OLD_NAMES = {"RNN", "fp16_utils", "multi_tensor_apply", "reparameterization"}  # of 2018, alone
ABOVE_OPS = {  # packages for users: each may use the operations, and its own files
    "contrib",
    "fused_dense",
    "mlp",
    "normalization",
    "optimizers",
    "parallel",
    "transformer",
}
ANYWHERE = {"_compat", "_upstream"}
ALLOWED = {  # package -> other packages it may import, besides those
    "_compat": set(),
    "_upstream": {"amp"},  # which rank speaks
    "kernels": set(),
    "ops": {"kernels"},
    "amp": {"debug", "ops"},  # initialize(debug=True), imported where it is asked for
    "debug": {"amp", "ops"},  # what_if runs copies at the levels of amp, imported where it does
    "catalogue": {"ops", *ABOVE_OPS},
    # FP16_Optimizer is a level of apex bench
    "commands": {"amp", "catalogue", "debug", "fp16_utils", "ops", *ABOVE_OPS},
    "patching": {"normalization", "ops"},
    "hub": {"patching"},
    **{name: {"ops"} for name in ABOVE_OPS | OLD_NAMES},
    "contrib": {"ops", "optimizers", "normalization"},  # the same under older names
    # FP16_Optimizer, under its name of 2019; attributes by which subclasses step by themselves
    "optimizers": {"fp16_utils", "multi_tensor_apply", "ops"},
    "fp16_utils": {"amp", "multi_tensor_apply", "ops"},
    # its norms are theirs, marked; its GradScaler is amp's with other defaults
    "transformer": {"amp", "contrib", "normalization", "ops"},
    "parallel": {"amp", "ops"},  # the wrapper sends masters to all ranks
}
TRITON_PACKAGE = "kernels"


def _top(file):
    parts = file.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else None


def _package(file):
    return ("apex", *file.parent.relative_to(SRC).parts)


def _imported_names(file, of):
    """Yield the full dotted name of everything that a file imports, however it is spelled."""
    for node in ast.walk(of):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = _package(file)
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


@functools.cache
def _imports(file):
    return frozenset(_imported_names(file, tree(file)))


def _packages_imported_by(file):
    """Yield the packages of apex that a file imports; a plain `import apex` is none of them."""
    for name in _imports(file):
        parts = name.split(".")
        if parts[0] == "apex" and len(parts) > 1 and (SRC / parts[1]).is_dir():
            yield parts[1]


def test_every_package_has_its_arrows():
    packages = {_top(file) for file in files()} - {None}
    assert packages <= set(ALLOWED)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_arrows_point_one_way(package):
    for file in files():
        if _top(file) == package:
            allowed = {package, *ANYWHERE, *ALLOWED[package]}
            assert set(_packages_imported_by(file)) <= allowed, file


def test_no_import_circles():
    """Imports in functions and under TYPE_CHECKING count too; a package's __init__ ties nothing."""
    named = {
        ".".join(("apex", *file.relative_to(SRC).with_suffix("").parts)): file
        for file in files()
        if file.name != "__init__.py"
    }
    graph = {}
    for name, file in named.items():
        found = set(_imports(file))
        found |= {dotted.rpartition(".")[0] for dotted in found}  # from module import name
        graph[name] = (found & named.keys()) - {name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


MOVED = {  # paths that programs know
    "apex.ops.group_norm": "apex.ops.norms.group_norm",
    "apex.ops.linear_cross_entropy": "apex.ops.losses.linear_cross_entropy",
    "apex.ops.pointer_tables": "apex.ops.lists.pointer_tables",
    "apex.ops.storage": "apex.ops.lists.storage",
    "apex.ops.swiglu": "apex.ops.layers.swiglu",
}


@pytest.mark.parametrize(("known", "now"), MOVED.items())
def test_moved_modules_are_found_under_both_paths(known, now):
    """One module, so that what a program sets there is seen."""
    assert importlib.import_module(known) is importlib.import_module(now)


def test_nothing_imports_the_commands_but_their_entry():
    """And only `apex what-if` imports the report, for its tasks: commands are strings."""
    for file in files():
        place, found = file.relative_to(SRC).as_posix(), set(_packages_imported_by(file))
        if _top(file) not in ("catalogue", "commands") and place != "__main__.py":
            assert not found & {"catalogue", "commands"}, file
        imports_report = any(name.startswith("apex.commands.bench") for name in _imports(file))
        is_report = place.startswith("commands/bench/") or file.name == "what_if.py"
        assert is_report or not imports_report, file


def test_packages_of_old_names_say_so_and_only_old_names_import_them():
    """But for two attributes of the optimizers, under names of 2019, and a level of the report."""
    modules = [file for file in EXTENSION_MODULES.glob("*.py") if not file.name.startswith("_")]
    for file in [*modules, *(SRC / name / "__init__.py" for name in OLD_NAMES)]:
        assert tree(file).body[0].value.value.startswith("Old name"), file
    importers = {package for package, allowed in ALLOWED.items() if allowed & OLD_NAMES}
    assert importers - OLD_NAMES == {"commands", "optimizers"}


def test_nothing_new_imports_the_api_of_2017_to_2019():
    """`apex.amp` itself shows it, under the old paths too, and `fp16_utils` is of that time."""
    names = ("_amp_state", "_initialize", "amp", "handle", "legacy", "opt", "scaler")
    old = {f"apex.amp.{name}" for name in names}
    for file in files():
        module = ".".join(("apex", *file.relative_to(SRC).with_suffix("").parts[:2]))
        if module not in {*old, "apex.amp.__init__"} and _top(file) != "fp16_utils":
            assert not {".".join(name.split(".")[:3]) for name in _imports(file)} & old, file


def test_nothing_imports_the_extension_modules():
    names = {file.stem for file in EXTENSION_MODULES.glob("*.py")}
    for file in files():
        roots = {name.split(".")[0] for name in _imports(file)}
        assert not roots & names, file


def test_only_kernels_import_triton_at_the_top():
    for file in files():
        top = [n for n in tree(file).body if isinstance(n, ast.Import | ast.ImportFrom)]
        roots = {name.split(".")[0] for name in _imported_names(file, ast.Module(top, []))}
        assert "triton" not in roots or _top(file) == TRITON_PACKAGE, file


def test_no_two_names_differ_only_in_case():
    for folder in {file.parent for file in files()}:
        names = [path.name.lower() for path in folder.iterdir()]
        assert len(names) == len(set(names)), folder


ON_A_CPU = ("CPU", "SparseCPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")


def _only_on_cuda(call):
    """The overloads of torch's that a call may take, if none of them has a kernel on a CPU."""
    given = {word.arg for word in call.keywords} - {None}
    found = []
    if not (ast.unparse(call.func).startswith("torch.") or hasattr(torch.Tensor, call.func.attr)):
        return []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{call.func.attr}"):
        name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        named = {argument.name for argument in schema.arguments} - set(positional[: len(call.args)])
        needed = {argument.name for argument in schema.arguments if argument.is_out}
        fits = needed <= given <= named and len(call.args) <= len(positional)
        if fits and torch._C._dispatch_has_kernel(name):
            found.append(name)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has(name, key) for name in found for key in ON_A_CPU):
        return []
    return [name.removeprefix("aten::") for name in found]


def test_what_only_cuda_has_is_listed_and_newer_names_are_asked_for_in_one_file():
    found = {}
    for file in [*files(), *EXTENSION_MODULES.glob("*.py")]:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                for overload in _only_on_cuda(node):
                    place = file.relative_to(file.parents[1]).as_posix()
                    found.setdefault(overload, set()).add(place)
    assert found.keys() == _compat.CUDA_ONLY.keys()
    newer = {name for name, release in _compat.CUDA_ONLY.items() if TorchVersion(release) > "2.9"}
    assert {name: found[name] for name in newer} == dict.fromkeys(newer, {"_compat/__init__.py"})


def _modules():
    walk = pkgutil.walk_packages([str(SRC)], "apex.", onerror=lambda name: None)
    need_triton = ("apex.kernels",)
    return ["apex", *(m.name for m in walk if not m.name.startswith(need_triton))]


@pytest.mark.parametrize("name", _modules())
def test_all_is_written_by_hand_and_true(name):
    importlib.import_module(name)
    module = sys.modules[name]  # a package may give another object the name of its submodule
    assigned = [
        node
        for node in tree(pathlib.Path(module.__file__)).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and "__all__" in {getattr(target, "id", None) for target in _targets(node)}
    ]
    is_package = hasattr(module, "__path__")
    assert len(assigned) == 1 or (not assigned and not is_package), f"{name}: one __all__, please"
    listed = ast.literal_eval(assigned[0].value) if assigned else []
    assert len(set(listed)) == len(listed)
    assert [entry for entry in listed if not hasattr(module, entry)] == []


def _targets(node):
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def test_import_is_free():
    """No triton, no CUDA context, no output, no log handler, no new warning filter."""
    probe = """
import logging, sys, warnings
import torch
filters = list(warnings.filters)
import apex
from apex import amp
assert apex.amp is amp
assert "triton" not in sys.modules
assert "apex.optimizers" not in sys.modules
assert apex.optimizers.FusedAdam and apex.normalization.FusedLayerNorm and apex.parallel.LARC
assert apex.debug.watch
assert "optimizers" in dir(apex) and not hasattr(apex, "nothing")
assert "triton" not in sys.modules
assert not torch.cuda.is_initialized()
assert warnings.filters == filters
names = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] == "apex"]
assert not any(logging.getLogger(n).handlers for n in names), names
assert all(logging.getLogger(n).propagate for n in ("apex", *names)), names
assert logging.root.handlers == []
import apex.commands.command_line
later = [f"apex.commands.{name}" for name in ("bench", "info", "selftest", "debugging")]
later = ("apex.catalogue", *later)
assert not [m for m in sys.modules if m.startswith(later)]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


OF_THE_ORIGINAL = {  # the same name in two of its packages
    "FP16_Optimizer",
    "FastLayerNorm",
    "FusedAdam",
    "FusedLAMB",
    "FusedLayerNorm",
    "FusedSGD",
    "GradScaler",
    "LossScaler",
    "MixedFusedLayerNorm",
}


def test_a_class_name_means_one_thing():
    places = {}
    for file in files():
        for node in tree(file).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(SRC)))
    several = {name: found for name, found in places.items() if len(found) > 1}
    assert several.keys() - OF_THE_ORIGINAL == set(), several
