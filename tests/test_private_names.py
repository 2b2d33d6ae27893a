"""The private names of torch that apex uses are those that its lists have."""

import ast
import functools
import importlib
import inspect
import pkgutil

import torch
from torch import nn

from apex._compat import names, private
from tests.trees import EXTENSION_MODULES, SRC, files, tree

# -- what is used is listed, and no more -----------------------------------------------------------

PRELOADED = {"commands/bench/training/worker.py: torch._dynamo"}  # imported early, if it is there
OF_PYTHON = {"_asdict", "_field_defaults", "_fields", "_replace", "_testMethodName"} | {
    "_threading_atexits"
}
OF_OTHERS = {  # attributes of programs and other libraries, keys of saved states, documented ones
    "_amp_lazy_init",
    "_amp_stash",
    "_fields",
    "_growth_tracker",
    "_lazy_init_maybe_master_weights",
    "_loss_function",
    "_saved_other",
}
CLASSES = (
    torch.Tensor,
    torch.UntypedStorage,
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    torch.library.Library,
)
LOOKED_UP_BY = {"attrgetter", "getattr", "hasattr", "setattr"}


def _is_private(name):
    return isinstance(name, str) and name.isidentifier() and name[0] == "_" and name[1:2] != "_"


@functools.cache
def _sources():
    """The library's files, but the lists themselves."""
    every = [*files(), *sorted(EXTENSION_MODULES.glob("*.py"))]
    return [file for file in every if file.parent.name != "_compat" or file.stem == "__init__"]


def _place(file):
    return file.relative_to(SRC).as_posix() if file.is_relative_to(SRC) else file.name


@functools.cache
def _nodes(file):
    """The nodes of a file's tree, but those that only type checkers see, and docstrings."""
    found, waiting = [], [tree(file)]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            waiting += ast.iter_child_nodes(node)
    return found


def _below(node):
    """Of ``a.b.c``: ``a.b`` and ``a``."""
    while isinstance(node, ast.Attribute):
        node = node.value
        yield node


def _chain(node):
    """The names of ``a.b.c``, or nothing."""
    found = [node, *_below(node)][::-1]
    if not isinstance(found[0], ast.Name):
        return []
    return [found[0].id, *(one.attr for one in found[1:])]


def _imported(node):
    """What an import names -> what the file calls it."""
    if isinstance(node, ast.Import):
        return {a.name if a.asname else a.name.split(".")[0]: a.asname or a.name.split(".")[0]
                for a in node.names}  # fmt: skip
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {f"{node.module}.{a.name}": a.asname or a.name for a in node.names}
    return {}


def _aliases(file):
    """What stands for a part of torch in a file, by its name there."""
    found = {}
    for node in _nodes(file):
        found |= {name: path for path, name in _imported(node).items()}
    for node in _nodes(file):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            first, *rest = _chain(node.value) or [""]
            path = found.get(first, "")
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if path.split(".")[0] == "torch" and rest and isinstance(target, ast.Name):
                    found.setdefault(target.id, ".".join([path, *rest]))
    return found


def _paths(file):
    """Each private path of torch that a file imports, or names from ``torch`` on."""
    aliases, inner = _aliases(file), set()
    for node in _nodes(file):
        paths = list(_imported(node))
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            inner |= set(map(id, _below(node)))
            first, *rest = _chain(node) or [""]
            paths = [".".join([aliases.get(first, ""), *rest])]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths = [node.value] if node.value.replace(".", "").isidentifier() else []
        for path in paths:
            if path.startswith("torch.") and any(map(_is_private, path.split("."))):
                yield path


def test_private_paths_of_torch_are_taken_from_the_list():
    found = {f"{_place(file)}: {path}" for file in _sources() for path in _paths(file)}
    assert found == PRELOADED


def _taken(file):
    """What a file takes from ``apex._compat.private``."""
    for node in _nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module == "apex._compat.private":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and _chain(node)[:1] == ["private"]:
            yield _chain(node)[1]


def test_the_list_has_the_names_that_are_used_and_no_others():
    listed = {row.name for row in names.NAMES}
    assert len(listed) == len(names.NAMES)
    used = {name for file in _sources() for name in _taken(file)}
    assert used - {"PrivateNameError", "missing", "need", "count"} == listed


@functools.cache
def _is_of_torch(name):
    return any(private.has(kind, name) for kind in CLASSES)


@functools.cache
def _attributes(file):
    """Private names of a file's attributes, and of strings that may be some; whether `self` has it.

    Those of modules are in `_paths`.
    """
    found, modules = [], _aliases(file)
    for node in _nodes(file):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if (_chain(node) or [""])[0] not in modules:
                found.append((node.attr, ast.unparse(node.value) in ("self", "cls")))
        elif isinstance(node, ast.Constant) and _is_private(node.value):
            if _is_of_torch(node.value):
                found.append((node.value, False))
        elif isinstance(node, ast.Call) and (_chain(node.func) or [""])[-1] in LOOKED_UP_BY:
            for one in node.args:
                if isinstance(one, ast.Constant) and _is_private(one.value):
                    found.append((one.value, False))
    return found


@functools.cache
def _defined(file):
    """Private names that a file defines or assigns."""
    found = set()
    for node in _nodes(file):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            found.add(getattr(node, "attr", None) or getattr(node, "id", None))
    return found


def _overridden():
    """Private methods and attributes of classes of torch that a class of apex has its own of."""
    for module in pkgutil.walk_packages([str(SRC)], "apex.", onerror=lambda name: None):
        if module.name.startswith(("apex.kernels", "apex.__main__")):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__.startswith("apex."):
                of_torch = [one for one in kind.__mro__ if one.__module__.startswith("torch.")]
                for name in set(filter(_is_private, vars(kind))) - {"_abc_impl", "_backward_cls"}:
                    if any(name in vars(one) for one in of_torch):
                        yield name, kind.__module__


def _used():
    """The private attributes of torch's objects, with the files that use them."""
    listed = {name for row in names.ATTRIBUTES for name in row.names.split()}
    ours = set().union(*map(_defined, _sources())) | OF_PYTHON | OF_OTHERS
    ours |= {row.path.rpartition(".")[2] for row in names.NAMES if row.holder}
    for file in _sources():
        for name, is_own in _attributes(file):
            if name not in ours or (name in listed and not (is_own and name in _defined(file))):
                yield name, _place(file)
        for node in _nodes(file):  # of operators, and of modules
            if isinstance(node, ast.Constant) and node.value in listed:
                yield node.value, _place(file)
    for name, module in _overridden():
        yield name, module.removeprefix("apex.").replace(".", "/")


# What begins the code of a file or a folder, in this order; without features: whatever happens.
BEGUN = {
    "amp/graphs/": ("amp.capture",),
    "amp/grad_scaler": ("amp.GradScaler", "GradScaler"),
    "amp/distributed_checkpoint.py": ("torch.distributed.checkpoint.state_dict",),
    "amp/": ("amp.initialize",),
    "optimizers/": ("FusedOptimizer", "GradScaler"),
    "contrib/optimizers/": ("DistributedFusedOptimizer", "FusedOptimizer", "GradScaler"),
    "ops/lists/shards.py": ("DistributedFusedOptimizer",),
    "ops/lists/unscale.py": ("sparse gradients",),
    "debug/": ("apex.debug", "GradScaler"),
    "contrib/sparsity/": ("ASP",),
    "RNN/": ("apex.RNN",),
    "reparameterization/": ("apex.reparameterization",),
    "transformer/": ("tensor_parallel", "amp.GradScaler"),
    "parallel/convert_syncbn.py": ("convert_syncbn_model",),
    "parallel/sync_batchnorm": ("SyncBatchNorm",),
    "contrib/cudnn_gbn/": ("SyncBatchNorm",),
    "contrib/nccl_allocator/": ("nccl_allocator",),
    "": (),
}


def test_the_list_has_the_attributes_that_are_used_and_what_uses_them():
    found = {}
    for name, place in _used():
        begun = next(features for key, features in BEGUN.items() if place.startswith(key))
        found.setdefault(name, {})[place] = begun
    assert found.keys() == {name for row in names.ATTRIBUTES for name in row.names.split()}
    for name, places in found.items():
        rows = [row for row in names.ATTRIBUTES if name in row.names.split()]
        for place, begun in places.items() if all(row.features for row in rows) else ():
            assert any({*begun} & {*row.features} for row in rows), (name, place)
    for row in names.ATTRIBUTES:
        begun = [features for name in row.names.split() for features in found[name].values()]
        assert {*row.features} <= {*sum(begun, ())}, row
