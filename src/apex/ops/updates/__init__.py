"""One file for each optimizer's algorithm: its update, and its step over lists of tensors.

A file has

* ``reference``, the definition, and an :class:`~apex.ops.lists.multi_tensor.Update` of it and the
  kernel, with a named tuple of the scalars that both take;
* the hyperparameters of one step. ``lr`` and ``weight_decay`` are numbers, or tensors that are read
  on their device; ``beta1`` and ``beta2`` are decays of averages, ``eps`` is added to a root, and
  ``step`` says which step this is, from 1: a number, or counted on a device and read there;
* the step, in place: ``name_(columns, hyper, options)``. Columns are gradients, weights, and the
  states that it names; each is of one dtype, all are on one device and of the same sizes.

In the formulas ``factor`` is what the gradient is multiplied by on the way in: 1 / loss scale,
times a clipping coefficient. ``l2`` or ``decay`` is the weight decay: in the gradient, or
decoupled.
"""

__all__: list[str] = []
