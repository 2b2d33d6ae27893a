"""Casting: which functions, weights and inputs become 16-bit, and when.

Imports go one way only: ``models``, ``log``, ``rules``, ``dispatcher``, ``containers``, ``state``.
"""

__all__: list[str] = []
