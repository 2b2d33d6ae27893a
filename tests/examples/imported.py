"""Import the program of an example."""

import importlib
import pathlib
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def program(folder, name):
    """Import a program with its siblings; other examples have modules of the same names."""
    path = EXAMPLES / folder
    names = [file.stem for file in path.glob("*.py")]
    others = {module: sys.modules.pop(module) for module in names if module in sys.modules}
    sys.path.insert(0, str(path))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(path))
        for module in names:
            sys.modules.pop(module, None)
        sys.modules.update(others)
