"""``LARC``: layer-wise adaptive rates around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from apex.amp._wrapped_optimizer import WrappedOptimizer
from apex.ops import _runtime
from apex.ops.lists.overlaps import own_copies
from apex.ops.lists.placements import is_sharded, placed
from apex.ops.lists.stages import Stages, finish, finish_on_shards
from apex.ops.lists.tensor_lists import grouped, local_parts, refuse_nested
from apex.ops.updates.larc import SQUARES, larc_stages

_own_copies = _runtime.not_compiled(own_copies)


class LARC(WrappedOptimizer):
    """Scale each tensor's learning rate by the ratio of the norms of its weight and its gradient.

    LARC wraps an optimizer. ``step`` adds the weight decay to the gradients and multiplies them by
    the local rates. The wrapped optimizer then steps without weight decay. The docstring of
    :mod:`apex.ops.updates.larc` has the formula. Norms are float32, whatever the parameter's dtype,
    and stay on the device. For sharded DTensors a single all-reduce adds them up over ranks.

    Groups, state and checkpoints are those of the wrapped optimizer.

    As in the original, ``step`` changes ``param.grad``. If the norm of a weight or of its gradient
    is 0, that step applies no weight decay to it. Gradients that share memory, such as one tensor
    for two weights, and inference tensors stay unchanged; the step then uses copies.

    Args:
        optimizer: The optimizer to wrap, of torch or of :mod:`apex.optimizers`.
        trust_coefficient: Factor of the ratio of the norms.
        clip: Use the smaller of the local and the global learning rate, instead of their product.
        eps: Added to the denominator.
        epsilon: Name of ``eps`` in the first version of Apex, which did not clip. It turns ``clip``
            off.

    Raises:
        TypeError: ``clip`` is a float, or ``optimizer`` is not an optimizer.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    #: ``from apex.parallel import LARC`` was the module; both spellings reach the class.
    LARC: ClassVar[type[torch.optim.Optimizer]]

    # What optimizers that an older Apex pickled whole may lack.
    trust_coefficient, clip, eps = 0.02, True, 1e-8
    _own = ("trust_coefficient", "clip", "eps")

    def __init__(
        self,
        optimizer: Any,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
        *,
        epsilon: float | None = None,
    ) -> None:
        if isinstance(clip, float):
            raise TypeError(
                f"LARC: clip was {clip!r}; it must be True or False. In the first version of apex "
                "the third argument was epsilon; pass eps by name."
            )
        super().__init__(optimizer)
        self.trust_coefficient = trust_coefficient
        self.clip = clip if epsilon is None else False
        self.eps = eps if epsilon is None else epsilon

    # -- the step ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, and let the wrapped optimizer step without weight decay.

        Args:
            closure: Function that evaluates the loss again. It is called once, before the gradients
                are scaled.

        Returns:
            What ``closure`` returned, or what the wrapped ``step`` returned without a closure.

        Raises:
            RuntimeError: A gradient is sparse, complex or a DTensor on another mesh than its
                parameter.
            TypeError: A gradient is a nested tensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        unscale = getattr(getattr(self.optim, "_amp_stash", None), "unscale", None)
        if unscale is not None:  # amp may have left unscaling to the step: do it here
            unscale()
        with self._without_decay() as decays, self._own_gradients():
            self._scale_gradients(decays)
            result = self.optim.step()
        return result if closure is None else loss

    @_runtime.not_compiled
    def _scale_gradients(self, decays: list[Any]) -> None:
        every = [param for group in self.param_groups for param in group["params"]]
        sharded = [*filter(is_sharded, every)]
        updates: list[tuple[list[torch.Tensor], Stages]] = []
        for group, decay in zip(self.param_groups, decays, strict=True):
            params = [param for param in group["params"] if param.grad is not None]
            grads = placed("LARC", params, [param.grad for param in params])
            columns = [local_parts(grads), local_parts(params)]
            for positions, (some, theirs), _ in grouped(columns) if params else ():
                stages = larc_stages(
                    some,
                    theirs,
                    lr=group["lr"],
                    weight_decay=decay,
                    trust_coefficient=self.trust_coefficient,
                    eps=self.eps,
                    clip=bool(self.clip),
                )
                updates.append(([params[i] for i in positions], stages))
        if sharded:
            finish_on_shards(updates, sharded, [SQUARES])
            return
        for _, stages in updates:
            finish(stages)

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Put copies in place of gradients that must not be written into, in this block."""
        every = [param for group in self.param_groups for param in group["params"]]
        params = [param for param in every if param.grad is not None]
        grads = [param.grad for param in params]
        copies = _own_copies(grads)
        try:
            for number, copy in copies.items():
                params[number].grad = copy
            yield
        finally:
            for number in copies:
                params[number].grad = grads[number]

    @contextmanager
    def _without_decay(self) -> Iterator[list[Any]]:
        """Set the groups' weight decay to 0 in this block; yields what it was."""
        having = [group for group in self.param_groups if "weight_decay" in group]
        kept = [group["weight_decay"] for group in having]
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group in having:
                group["weight_decay"] = 0.0
            yield decays
        finally:
            for group, decay in zip(having, kept, strict=True):
                group["weight_decay"] = decay

    def _check(self) -> None:
        every = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in every if param.grad is not None]
        refuse_nested("LARC: gradient", grads)
        for grad in grads:
            if grad.layout != torch.strided or grad.is_complex():
                raise RuntimeError("LARC does not support sparse or complex gradients.")


LARC.LARC = LARC
