"""The command line: time, memory and accuracy by precision, on the user's own machine.

Nothing in the library imports this package. The modules here import what the ``bench`` extra
brings only when a command that needs it has been chosen, so that ``apex info`` works with
torch alone.
"""

__all__: list[str] = []
