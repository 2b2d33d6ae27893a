"""Casting: which functions, weights and inputs become 16-bit, and when.

Imports go from the end of this list to its beginning only:

* :mod:`~apex.amp.casting.state`: the thread's autocast state, and whose casts it stands for.
* :mod:`~apex.amp.casting.dispatcher`: autocast kernels for what torch's lists lack.
* :mod:`~apex.amp.casting.rules`: registrations, edited lists, and the wrappers they need.
* :mod:`~apex.amp.casting.log`: the cast log of ``verbosity=2``.
* :mod:`~apex.amp.casting.containers`: casting what is inside of lists, dicts and other containers.
* :mod:`~apex.amp.casting.models`: hooks and weights of a model.
"""

__all__: list[str] = []
