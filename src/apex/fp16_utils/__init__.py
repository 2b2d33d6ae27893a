"""Mixed precision by hand: converters, master parameters, and optimizers that keep masters."""

__all__: list[str] = []
