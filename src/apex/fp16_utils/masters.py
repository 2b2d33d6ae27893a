"""An optimizer around another one, in whose groups float32 masters stand for 16-bit parameters.

The masters are those of :mod:`apex.amp.gradients.parameters`, in groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from apex.amp._wrapped_optimizer import WrappedOptimizer
from apex.amp.gradients.masters import Master
from apex.amp.gradients.parameters import Pairs, unscale_into
from apex.amp.levels import HALF_TYPES
from apex.ops.lists.placements import is_sharded
from apex.ops.lists.unscale import multiply_

Groups = list[list[torch.Tensor]]


def flat(groups: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of all groups."""
    return [tensor for group in groups for tensor in group]


class MasterOptimizer(WrappedOptimizer):
    """The part of :class:`~apex.fp16_utils.FP16_Optimizer` that knows no loss scaler."""

    def __init__(self, init_optimizer: Any) -> None:
        super().__init__(init_optimizer)
        if isinstance(init_optimizer, MasterOptimizer):
            raise TypeError(
                "FP16_Optimizer: init_optimizer is an FP16_Optimizer already. Pass the optimizer "
                "that it wraps."
            )
        if hasattr(init_optimizer, "_amp_stash"):
            raise RuntimeError(
                "FP16_Optimizer: the optimizer went through amp.initialize, which keeps masters "
                "and scales the loss itself. Use only one of the two."
            )
        self.fp16_groups: Groups = []
        self.fp32_from_fp16_groups: Groups = []
        self.fp32_from_fp32_groups: Groups = []
        self._watch_and_pair()
        self._add_new()

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self.optim

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The 16-bit parameters of all groups."""
        return flat(self.fp16_groups)

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters of all groups."""
        return flat(self.fp32_from_fp16_groups)

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The parameters without masters of all groups."""
        return flat(self.fp32_from_fp32_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its 16-bit parameters get masters."""
        self.optim.add_param_group(param_group)
        try:
            self._add_new()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _add_new(self) -> None:
        """Take in parameters that were added to the groups, unfrozen or converted to 16 bits.

        State of a 16-bit parameter moves to its master. Where :func:`_check` raises, nothing is
        changed.
        """
        for params in self.fp32_from_fp32_groups:  # model.half() was called since
            params[:] = [param for param in params if param.dtype not in HALF_TYPES]
        known = {*map(id, self.all_fp32_from_fp16_params), *map(id, self.all_fp32_from_fp32_params)}
        new = [
            (number, index, param)
            for number, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
            if param.requires_grad and id(param) not in known
        ]
        _check([param for _, _, param in new], {*map(id, self.all_fp16_params)})
        for groups in (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups):
            groups.extend([] for _ in self.param_groups[len(groups) :])
        wide, has_state = [], False
        for number, index, param in new:
            if param.dtype not in HALF_TYPES:
                self.fp32_from_fp32_groups[number].append(param)
                wide.append(param)
                continue
            master = param.detach().clone().float().requires_grad_()
            self.param_groups[number]["params"][index] = master
            self.fp16_groups[number].append(param)
            self.fp32_from_fp16_groups[number].append(master)
            if param in self.state:
                self.state[master] = self.state.pop(param)
                has_state = True
        if new:
            self._watch(wide)
            self._pair()
        if has_state:  # of 16 bits, which becomes float32
            self.optim.load_state_dict(self.optim.state_dict())

    def _watch_and_pair(self) -> None:
        self._still_scaled: set[int] = set()  # ids of those without masters, if they have gradients
        self._watch(self.all_fp32_from_fp32_params)
        self._pairs = Pairs([])
        self._pair()

    def _watch(self, params: Sequence[torch.Tensor]) -> None:
        arrived = self._still_scaled
        for param in params:
            handle = param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda tensor: arrived.add(id(tensor))
            )
            weakref.finalize(self, handle.remove).atexit = False

    def _pair(self) -> None:
        self._pairs.reconcile()
        both = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        self._pairs = Pairs([(weight, Master(master)) for weight, master in both])
        self._pairs.record()

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler patches the object's step, with the object inside.
        made_again = ("step", "_pairs", "_still_scaled")
        return {name: value for name, value in vars(self).items() if name not in made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch_and_pair()

    # -- gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        """Bring all gradients that are still scaled to a scale that is ``factor`` times theirs."""
        if factor != 1.0:
            wide = [p for p in self.all_fp32_from_fp32_params if id(p) in self._still_scaled]
            _multiply([*self.all_fp16_params, *wide], factor)

    @torch.no_grad()
    def _scale_unscaled(self, scale: float) -> None:
        """Scale the gradients of earlier passes on parameters without masters.

        All of these parameters count as scaled then: where a rank has not used one,
        DistributedDataParallel writes the other ranks' gradient, and no hook is called.
        """
        wide = self.all_fp32_from_fp32_params
        _multiply([param for param in wide if id(param) not in self._still_scaled], scale)
        self._still_scaled.update(map(id, wide))

    @torch.no_grad()
    def _unscale(self, scale: float, *, check: bool) -> bool:
        """Write the gradients of 16-bit parameters into their masters', divided by ``scale``.

        Other parameters' gradients are divided in place where they are still scaled. Return whether
        an element was inf or nan; False without ``check``.
        """
        wide = []
        for param in self.all_fp32_from_fp32_params:
            if param.grad is not None and id(param) in self._still_scaled:
                param.grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
                wide.append(param.grad)
        self._still_scaled.clear()
        for master in self.all_fp32_from_fp16_params:
            master.grad = None
        grads = [*wide, *(p.grad for p in self.all_fp16_params if p.grad is not None)]
        divisor: torch.Tensor | float = scale
        if check and grads:  # the flag comes on the divisor's device
            divisor = torch.tensor(scale, dtype=torch.float32, device=grads[0].device)
        found, _ = unscale_into(wide, self._pairs, {}, divisor)
        return found is not None and bool(found)


def _multiply(params: Sequence[torch.Tensor], factor: float) -> None:
    multiply_([param.grad for param in params if param.grad is not None], factor)


def _check(new: Sequence[torch.Tensor], taken: set[int]) -> None:
    """Raise if parameters cannot be stepped or, by the ids in ``taken``, are there already."""
    for param in new:
        if not param.is_floating_point() or torch.nn.parameter.is_lazy(param):
            raise TypeError(
                f"FP16_Optimizer: a parameter is {param.dtype}, or has no shape yet; allowed are "
                "torch.float16, torch.bfloat16, torch.float32 and torch.float64. Run a lazy model "
                "on a batch first."
            )
        if is_sharded(param):
            raise TypeError(
                "FP16_Optimizer: a parameter is sharded over ranks, and each rank would see only "
                "the overflows of its own shard. Use amp.initialize, with which all ranks skip a "
                "step together."
            )
        if id(param) in taken:
            raise ValueError(
                f"FP16_Optimizer: a parameter of shape {list(param.shape)} is in the groups twice, "
                "or together with its master. Pass each parameter once."
            )
        taken.add(id(param))
