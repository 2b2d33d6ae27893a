"""Puts stubs of the top-level modules into the wheel: one file cannot say that it has types."""

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Stubs(BuildHookInterface):
    """``amp_C-stubs/__init__.pyi`` and the like: the modules themselves, whose code is ignored."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files; an editable install is read as it is."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        for module in sorted(Path(self.root, "src/extension_modules").glob("[!_]*.py")):
            copy = Path(self._folder.name, module.name)
            copy.write_bytes(module.read_bytes())
            build_data["force_include"][str(copy)] = f"{module.stem}-stubs/__init__.pyi"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copies."""
        if version != "editable":
            self._folder.cleanup()
