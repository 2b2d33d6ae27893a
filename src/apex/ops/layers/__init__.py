"""Elementwise and dense operations of layers."""

__all__: list[str] = []
