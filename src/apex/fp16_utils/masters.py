"""The parameters of an ``FP16_Optimizer``, their masters, and the gradients of both."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from apex.amp.gradients.accumulation import write_zeros
from apex.amp.gradients.masters import Master
from apex.amp.gradients.pairs import Pairs
from apex.amp.gradients.parameters import unscale_into
from apex.ops.lists.placements import is_sharded
from apex.ops.lists.unscale import multiply_

HALF_TYPES = (torch.float16, torch.bfloat16)

Groups = list[list[torch.Tensor]]


class MasterGroups:
    """Parameters by group of an optimizer, in whose groups masters stand for those of 16 bits.

    Args:
        halves: The 16-bit parameters that have masters already, by group.
        masters: Their masters.
        wide: Parameters of 32 or 64 bits, which need none.

    Attributes:
        pairs: Parameters with their masters, in columns.
        still_scaled: ids of parameters in ``wide`` whose gradient, if any, is still scaled.
    """

    def __init__(self, halves: Groups, masters: Groups, wide: Groups) -> None:
        self.halves, self.masters, self.wide = halves, masters, wide
        self.still_scaled: set[int] = set()
        self.pairs = Pairs([])
        for param in self.all_wide:
            self._watch(param)
        self._pair()

    @property
    def all_halves(self) -> list[torch.Tensor]:
        """The 16-bit parameters of all groups."""
        return [param for group in self.halves for param in group]

    @property
    def all_masters(self) -> list[torch.Tensor]:
        """The masters of all groups."""
        return [param for group in self.masters for param in group]

    @property
    def all_wide(self) -> list[torch.Tensor]:
        """The parameters without masters of all groups."""
        return [param for group in self.wide for param in group]

    def _watch(self, param: torch.Tensor) -> None:
        arrived = self.still_scaled
        hook = lambda tensor: arrived.add(id(tensor))  # noqa: E731
        handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        weakref.finalize(self, handle.remove).atexit = False

    def _pair(self) -> None:
        self.pairs.reconcile()
        both = zip(self.all_halves, self.all_masters, strict=True)
        self.pairs = Pairs([(weight, Master(master)) for weight, master in both])
        self.pairs.note()

    def add_new(self, optimizer: Any) -> None:
        """Take in parameters that ``optimizer`` has got, or that were unfrozen.

        State that ``optimizer`` has for a 16-bit parameter moves to the master.

        Raises:
            TypeError: A parameter is not a real floating tensor, lazy or sharded; nothing was
                changed.
            ValueError: A parameter is there twice; nothing was changed.
        """
        for params in self.wide:  # model.half() was called since
            params[:] = [param for param in params if param.dtype not in HALF_TYPES]
        known = {*map(id, self.all_masters), *map(id, self.all_wide)}
        new = [
            (number, index, param)
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if param.requires_grad and id(param) not in known
        ]
        self._check([param for _, _, param in new])
        for groups in (self.halves, self.masters, self.wide):
            groups.extend([] for _ in optimizer.param_groups[len(groups) :])
        has_state = False
        for number, index, param in new:
            if param.dtype not in HALF_TYPES:
                self.wide[number].append(param)
                self._watch(param)
                continue
            master = param.detach().clone().float().requires_grad_()
            optimizer.param_groups[number]["params"][index] = master
            self.halves[number].append(param)
            self.masters[number].append(master)
            if param in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(param)
                has_state = True
        if new:
            self._pair()
        if has_state:  # of 16 bits, which becomes float32
            optimizer.load_state_dict(optimizer.state_dict())

    def _check(self, new: Sequence[torch.Tensor]) -> None:
        taken = {*map(id, self.all_halves)}
        for param in new:
            if not param.is_floating_point() or torch.nn.parameter.is_lazy(param):
                raise TypeError(
                    f"FP16_Optimizer: a parameter is {param.dtype}, or has no shape yet; allowed "
                    "are torch.float16, torch.bfloat16, torch.float32 and torch.float64. Run a "
                    "lazy model on a batch first."
                )
            if is_sharded(param):
                raise TypeError(
                    "FP16_Optimizer: a parameter is sharded over ranks, and each rank would see "
                    "only the overflows of its own shard. Use amp.initialize, where ranks decide "
                    "together."
                )
            if id(param) in taken:
                raise ValueError(
                    f"FP16_Optimizer: a parameter of shape {list(param.shape)} is in the groups "
                    "twice, or is there beside its master. Pass each parameter once."
                )
            taken.add(id(param))

    # -- gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Bring all gradients that are still scaled to a scale that is ``factor`` times theirs."""
        if factor == 1.0:
            return
        wide = [param for param in self.all_wide if id(param) in self.still_scaled]
        grads = (param.grad for param in (*self.all_halves, *wide))
        multiply_([grad for grad in grads if grad is not None], factor)

    @torch.no_grad()
    def scale_unscaled(self, scale: float) -> None:
        """Scale the gradients of earlier passes on parameters without masters.

        All of these parameters count as scaled then: where a rank has not used one,
        DistributedDataParallel writes the other ranks' gradient, and no hook is called.
        """
        wide = self.all_wide
        grads = (param.grad for param in wide if id(param) not in self.still_scaled)
        multiply_([grad for grad in grads if grad is not None], scale)
        self.still_scaled.update(map(id, wide))

    @torch.no_grad()
    def unscale(self, scale: float, *, check: bool) -> bool:
        """Write the gradients of 16-bit parameters into their masters', divided by ``scale``.

        Other parameters' gradients are divided in place where they are still scaled. The program's
        gradients of 16-bit parameters stay scaled.

        Returns:
            Whether an element was inf or nan; False without ``check``.
        """
        wide = []
        for param in self.all_wide:
            if param.grad is not None and id(param) in self.still_scaled:
                param.grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
                wide.append(param.grad)
        self.still_scaled.clear()
        for master in self.all_masters:
            master.grad = None
        divisor: torch.Tensor | float = scale
        if check:  # the flag comes on the divisor's device
            halves = (param.grad for param in self.all_halves if param.grad is not None)
            first = next((grad for grad in (*wide, *halves)), torch.empty(()))
            divisor = torch.tensor(scale, dtype=torch.float32, device=first.device)
        found, _ = unscale_into(wide, self.pairs, {}, divisor)
        return found is not None and bool(found)

    def refuse_missed(self) -> None:
        """Raise if gradients of 16-bit parameters have not been brought to their masters."""
        both = zip(self.all_halves, self.all_masters, strict=True)
        if any(param.grad is not None and master.grad is None for param, master in both):
            raise RuntimeError(
                "FP16_Optimizer: step() was called before gradients were copied to the masters. "
                "Call optimizer.backward(loss) instead of loss.backward(); or scale the loss "
                "by optimizer.loss_scale and call optimizer.update_master_grads() afterwards."
            )

    def zero_grad(self, optimizer: Any, *, set_to_none: bool) -> None:
        """Clear the gradients of masters, 16-bit parameters and all else in the groups."""
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        for param in (*stepped, *self.all_halves):
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                write_zeros(param.grad)


@torch.no_grad()
def load(targets: Groups, groups: Groups) -> None:
    """Copy saved tensors by group."""
    for tensors, saved in zip(targets, groups, strict=True):
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)


def check_optimizer(optimizer: Any) -> None:
    """Raise if ``optimizer`` cannot be wrapped by an ``FP16_Optimizer``."""
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise TypeError(
            f"FP16_Optimizer: init_optimizer was a {type(optimizer).__name__}; it must be an "
            "optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if hasattr(optimizer, "fp32_from_fp16_groups"):
        raise TypeError("FP16_Optimizer: init_optimizer is an FP16_Optimizer already.")
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError(
            "FP16_Optimizer: the optimizer went through amp.initialize, which keeps masters and "
            "scales the loss itself. Use one of the two."
        )
