"""Parts that stand alone; each package is imported by its own name."""

__all__: list[str] = []
