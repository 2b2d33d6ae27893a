"""Casting: which functions, weights and inputs become 16-bit, and when.

Imports go one way only: ``models``, ``containers``, ``log``, ``rules``, ``dispatcher``, ``state``.
"""

__all__: list[str] = []
