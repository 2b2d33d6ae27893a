"""The gradients of an optimizer under amp, and the masters that they belong to.

:mod:`~apex.amp.gradients.ledger` begins with the states of gradients and the table of transitions,
:mod:`~apex.amp.gradients.pairs` with the rules for the pairs of master and model parameters. The
picture in CONTRIBUTING.md has all files.
"""

__all__: list[str] = []
