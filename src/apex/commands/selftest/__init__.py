"""``apex selftest``: the checks are in `ops`, `optimizers`, `training` and `gpu`."""

__all__: list[str] = []
