"""``apex debug``: a training script as it is, with a watch of ``apex.debug`` on what it trains.

``command`` and ``script`` import no torch: a script may set variables that torch reads when it is
imported. ``program`` is imported as soon as the script has imported torch.
"""

__all__: list[str] = []
