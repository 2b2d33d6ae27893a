"""The gradients of an optimizer under amp, and the masters that they belong to.

:mod:`~apex.amp.gradients.ledger` begins with the states of gradients and the table of transitions,
:mod:`~apex.amp.gradients.parameters` with the rules for the pairs of master and model parameters.
"A step at O2" in docs/how-it-works.md says who is called when.
"""

__all__: list[str] = []
