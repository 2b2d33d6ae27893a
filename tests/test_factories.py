"""What the library makes names what torch's defaults would decide.

Programs set a default device and a default dtype for their models. `torch.zeros(2)` in a scaler, a
norm or a flag would follow them: on a default GPU amp stopped, and under a default float16 the norm
of the sharded optimizers was inf. So each call of a factory names `device=`, and `dtype=` where a
float or nothing would decide it. The parameters of public modules follow the defaults as those of
`torch.nn` do; their constructors say so by `device=None, dtype=None`.
"""

import ast
import functools
import operator

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.trees import EXTENSION_MODULES, files, tree

FACTORIES = {*_device_constructors(), torch.normal}  # what a default device decides
INTEGERS = {torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices}


@functools.cache
def _of_torch(dotted):
    """The factory of this name; None if it makes no new tensor, or is of another release."""
    try:
        found = operator.attrgetter(dotted)(torch)
    except AttributeError:
        return None
    return found if found in FACTORIES or found in (torch.Tensor, torch.Generator) else None


def _factory(node):
    """What an expression like `torch.zeros` stands for, if it makes a new tensor."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    is_torchs = names and isinstance(node, ast.Name) and node.id == "torch"
    return _of_torch(".".join(reversed(names))) if is_torchs else None


def _has_a_float(nodes):
    inside = [part for node in nodes for part in ast.walk(node)]
    return any(
        isinstance(part, ast.Div)
        or (isinstance(part, ast.Constant) and isinstance(part.value, float))
        for part in inside
    )


def _named(call, function):
    """The keywords of a call, also those of a dictionary that the function writes down before."""
    found = {word.arg: word.value for word in call.keywords if word.arg}
    passed = [word.value.id for word in call.keywords if not word.arg]
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {getattr(target, "id", None) for target in targets} & {*passed}:
                keys = [key.value for key in node.value.keys]
                found.update(zip(keys, node.value.values, strict=True))
    return found


def _missing(call, function):
    """What a call leaves to torch's defaults, as words of a message."""
    factory = _factory(call.func)
    if factory is torch.Tensor:
        return ["torch.Tensor(...) is of the default dtype"]
    if factory is torch.Generator:
        return [] if call.args or call.keywords else ["no device"]
    named = _named(call, function)
    missing = [] if "device" in named else ["no device"]
    integers = factory in INTEGERS or (factory is torch.arange and not _has_a_float(call.args))
    if "dtype" not in named and not integers:
        missing.append("no dtype")
    if getattr(function, "name", None) != "__init__":
        words = ((word, named.get(word)) for word in ("device", "dtype"))
        missing += [f"{word}=None" for word, value in words if _is_none(value)]
    return missing


def _is_none(node):
    return isinstance(node, ast.Constant) and node.value is None


def _complaint(node, function):
    """What a node leaves open; None if nothing."""
    if isinstance(node, ast.Call) and _factory(node.func):
        return ", ".join(_missing(node, function)) or None
    if isinstance(node, ast.Attribute) and _factory(node) in FACTORIES:
        return "not called: call it where it is written"
    imports = [n.name for n in node.names] if isinstance(node, ast.ImportFrom) else []
    if imports and node.module == "torch" and any(_of_torch(n) in FACTORIES for n in imports):
        return "write torch.NAME, which this test looks for"
    return None


def _complaints(module):
    """The line, the expression and what it leaves open, of each factory in a module."""
    found, rest = [], [(module, module)]
    while rest:
        node, function = rest.pop()
        function = node if isinstance(node, ast.FunctionDef) else function
        if said := _complaint(node, function):
            found.append((node.lineno, ast.unparse(node)[:80], said))
        below = ast.iter_child_nodes(node)
        is_factory = isinstance(node, ast.Call) and _factory(node.func)
        rest += [(one, function) for one in below if not (is_factory and one is node.func)]
    return sorted(found)


def test_factories_name_device_and_dtype():
    every = {file: _complaints(tree(file)) for file in [*files(), *EXTENSION_MODULES.glob("*.py")]}
    assert {str(file): found for file, found in every.items() if found} == {}


PLANTED = {
    "torch.zeros(2)": "no device, no dtype",
    "torch.zeros((), dtype=x.dtype)": "no device",
    "torch.tensor(1 / scale, device='cpu')": "no dtype",
    "torch.arange(4)": "no device",
    "torch.arange(0, 1, 0.1, device='cpu')": "no dtype",
    "torch.arange(4, device='cpu')": None,
    "torch.randperm(4, device='cpu')": None,
    "torch.fft.fftfreq(4)": "no device, no dtype",
    "torch.empty(2, device=None, dtype=None)": "device=None, dtype=None",
    "torch.Generator()": "no device",
    "torch.Generator('cpu')": None,
    "torch.Tensor(3)": "torch.Tensor(...) is of the default dtype",
    "torch.zeros_like(x)": None,
    "from torch import zeros, Tensor": "write torch.NAME, which this test looks for",
    "[*map(torch.zeros, sizes)]": "not called: call it where it is written",
    "torch.stack([torch.ones(()), x])": "no device, no dtype",
    "torch.full((), torch.ones(()), device='cpu', dtype=x.dtype)": "no device, no dtype",
    "def f():\n    on = {'device': 'cpu', 'dtype': x.dtype}\n    return torch.ones(2, **on)": None,
    "def f():\n    on = {'device': 'cpu'}\n    return torch.ones(2, **on)": "no dtype",
    "def __init__(self):\n    self.w = torch.empty(2, device=None, dtype=None)": None,
}


@pytest.mark.parametrize(("program", "missing"), PLANTED.items(), ids=range(len(PLANTED)))
def test_what_the_rule_finds(program, missing):
    assert [said for _, _, said in _complaints(ast.parse(program))] == (
        [] if missing is None else [missing]
    )
