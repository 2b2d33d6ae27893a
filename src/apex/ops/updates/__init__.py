"""One file for each optimizer's algorithm: its update, and its step over lists of tensors."""

__all__: list[str] = []
