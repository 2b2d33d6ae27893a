"""The report: time, memory and accuracy by precision, on the user's own machine.

``training`` is `apex bench`, ``kernels`` is `apex bench kernels`. Only the command line imports
them, when one of the two is chosen: they need what the ``bench`` extra brings.
"""

__all__: list[str] = []
