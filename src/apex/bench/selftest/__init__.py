"""``apex selftest``: is what is installed here right on this machine?

The checks are in `ops`, `optimizers`, `training` and `gpu`; what they go over is in
`apex.bench.catalogue`. `check` runs them, `report` shows them, `command` is the command line.
"""

__all__: list[str] = []
