"""Which number formats a model can be trained in, measured layer by layer, without the hardware.

* ``formats`` says what products are rounded to, and emulates it;
* ``tracing`` notes the products of a pass in float32, ``judging`` runs each again in the formats
  and decides, ``updates`` asks whether the weights themselves could have 16 bits;
* ``result`` has ``what_if`` and what it gives: an answer, a table, a policy, a plot.
"""

__all__: list[str] = []
