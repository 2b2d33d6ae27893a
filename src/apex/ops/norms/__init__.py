"""Norms of activations and of weights."""

__all__: list[str] = []
