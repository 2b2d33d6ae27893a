"""The functions of the top-level module ``amp_C``, by what they do."""

__all__: list[str] = []
