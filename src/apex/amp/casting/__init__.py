"""Casting: which functions, weights and inputs become 16-bit, and when.

Imports go one way only: ``models``, ``rules``, ``log``, ``dispatcher``, ``containers``,
``switches``.
"""

__all__: list[str] = []
