"""``apex bench``: time, memory and accuracy by precision, on the user's own machine.

``training`` measures and answers, ``output`` draws. Only the command line imports them, when the
command is chosen: they need what the ``bench`` extra brings.
"""

__all__: list[str] = []
