"""Operations: definition, choice of path and autograd, one file for each."""

__all__: list[str] = []
