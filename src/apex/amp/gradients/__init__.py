"""The gradients of an optimizer under amp, and the masters that they belong to.

:mod:`~apex.amp.gradients.ledger` has the states of gradients and the table of transitions;
:mod:`~apex.amp.gradients.masters` the pairs of master and model parameters;
:mod:`~apex.amp.gradients.overflow` who decides that a step is skipped;
:mod:`~apex.amp.gradients.fused` everything of ``fused_step``;
:mod:`~apex.amp.gradients.forwards` and :mod:`~apex.amp.gradients.distributed` what amp knows of
forwards and of other ranks; :mod:`~apex.amp.gradients.parameters` what an optimizer steps;
:mod:`~apex.amp.gradients.accumulation` and :mod:`~apex.amp.gradients.unscaling` sums and quotients;
:mod:`~apex.amp.gradients.step_check` whether an optimizer steps what it was given;
:mod:`~apex.amp.gradients.state_dicts` the hooks by which state dicts are float32.
"""

__all__: list[str] = []
