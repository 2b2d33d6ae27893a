"""Names of NVIDIA's Apex alone: those that are missing here, and those of ``apex`` itself.

``missing`` says what to use instead of a name that does not exist. ``notices`` has the functions
that programs import from ``apex``.
"""

__all__: list[str] = []
