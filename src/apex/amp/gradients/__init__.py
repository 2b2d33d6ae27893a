"""The gradients of an optimizer under amp, and the masters that they belong to.

:mod:`~apex.amp.gradients.ledger` has the states of gradients and the table of transitions;
:mod:`~apex.amp.gradients.masters` the pairs of master and model parameters;
:mod:`~apex.amp.gradients.overflow` who decides that a step is skipped;
:mod:`~apex.amp.gradients.fused` everything of ``fused_step``;
:mod:`~apex.amp.gradients.distributed` what amp knows of other ranks.
"""

__all__: list[str] = []
