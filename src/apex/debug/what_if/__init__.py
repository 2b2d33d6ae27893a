"""Which number formats a model can be trained in, measured layer by layer, without the hardware.

* ``formats`` says what products are rounded to, and emulates it;
* ``tracing`` notes the products of a pass in float32, ``judging`` runs each again in the formats,
  ``updates`` asks whether the weights themselves could have 16 bits;
* ``verdicts`` concludes, ``result`` is what comes out: an answer, a table, a policy, a plot;
* ``entry`` checks the arguments.
"""

__all__: list[str] = []
