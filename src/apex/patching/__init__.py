"""``apex.patch``: layers of transformers' models, computed by the operations here.

``models`` finds and replaces them; ``layers`` has their forwards, and :mod:`apex.hub` offers those.
"""

__all__: list[str] = []
