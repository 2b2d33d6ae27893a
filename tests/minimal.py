"""Turns this interpreter into a minimal machine; run by test_minimal_imports in a new process.

Gone are Triton, NumPy and what the extras bring, the modules that only Unix has, and
torch.distributed. Two different ways, because they are missing in two different ways:

* Packages and Unix modules are simply not there on such machines. Every finder answers "not
  found" for them, before torch is imported, so that torch takes its own way without them too.
* torch.distributed is a folder that even a torch built without it ships: the package imports,
  says `is_available() == False` and holds next to nothing. torch decides that by asking whether
  its compiled part has certain entry points, so they are removed before it asks. Such a package
  is still a trap for our code (a module that imports it works here and its names do not exist),
  hence the stricter rule: no module of apex may import it, at all, when it is itself imported.
"""

import builtins
import sys

EXTRAS = {"matplotlib", "msgspec", "numpy", "rich", "scipy", "sklearn", "gymnasium", "transformers"}
ABSENT = {"triton", "resource", "fcntl", *EXTRAS}
ENTRY_POINTS = ("_c10d_init", "_rpc_init", "_dist_autograd_init")


class _Without:
    """A finder that does not know the absent packages, and is otherwise the one it wraps."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        if name == "torch.distributed":
            for entry in ENTRY_POINTS:
                if hasattr(sys.modules["torch._C"], entry):
                    delattr(sys.modules["torch._C"], entry)
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


def _refuse_distributed(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    wanted = {name, *(f"{name}.{item}" for item in fromlist or ())}
    if importer.partition(".")[0] == "apex" and any(
        word == "torch.distributed" or word.startswith("torch.distributed.") for word in wanted
    ):
        raise ModuleNotFoundError(
            f"{importer} imports torch.distributed while it is imported", name="torch.distributed"
        )
    return _import(name, globals, locals, fromlist, level)


def become_minimal():
    """Take everything away; torch must not have been imported before."""
    assert "torch" not in sys.modules
    for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
        del sys.modules[name]
    sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
    builtins.__import__ = _refuse_distributed
    import torch

    assert not torch.distributed.is_available()


_import = builtins.__import__
