"""One pass in float32, with what is needed to run each of its products again alone.

A product keeps its operands and the gradients that reached its results. It belongs to the innermost
module that was running. Products of two activations in one module call (scores and the mixing of
values) are one attention: it runs again as a whole, from the module's inputs to its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from apex.debug.tensors import HALVES, tensors_of
from apex.debug.what_if.formats import (
    Format,
    InFormat,
    is_bias,
    is_floating,
    is_product,
    masks_of,
    product,
)

HALF_ERROR = (
    "apex.debug.what_if: {name} computed in {dtype} already. It compares with float32: call it "
    "before amp.initialize, and with a loss outside of torch.autocast."
)


def kept(leaf: Any) -> Any:
    """A leaf of arguments as it is now; a parameter is not written in a pass, so it is itself."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


class Piece:
    """What runs again: one product, or the attention of a module call.

    Attributes:
        owner: The module it belongs to.
        kind: Name of the function, or of the class of the module.
        gradients: Of its floating outputs, by their place.
        results: The largest magnitudes of these outputs; ``operands`` those of what goes in.
        is_part: Whether it is judged as a part of an attention.
    """

    def __init__(
        self, owner: torch.nn.Module | None, kind: str, function: Any, args: Any, kwargs: Any
    ) -> None:
        self.owner, self.kind, self.function = owner, kind, function
        self.results: list[torch.Tensor] = []
        self.is_part = False
        leaves, self.spec = tree_flatten((args, kwargs))
        masks = masks_of(function, args, kwargs)
        self.masks = [id(leaf) in masks for leaf in leaves]
        self.leaves = [kept(leaf) for leaf in leaves]
        self.operands = [
            largest(leaf)
            for leaf, mask in zip(leaves, self.masks, strict=True)
            if is_floating(leaf) and not mask
        ]
        self.gradients: dict[int, torch.Tensor] = {}

    def watch(self, output: Any) -> None:
        """Keep the gradients that will reach the outputs, and how large the outputs are."""
        for place, one in enumerate(filter(is_floating, tensors_of(output))):
            self.results.append(largest(one))
            if one.requires_grad:
                one.register_hook(partial(self._keep, place))  # type: ignore[no-untyped-call]

    def _keep(self, place: int, gradient: torch.Tensor) -> None:
        self.gradients[place] = gradient.detach()

    def run(self, form: Format | None, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
        """Its results, the gradients of its inputs and of its weight matrices, with their kinds."""
        fresh = [self._leaf(leaf) for leaf in self.leaves]
        args, kwargs = tree_unflatten(fresh, self.spec)
        torch.manual_seed(0)  # dropout drops the same in every run
        outputs = list(filter(is_floating, tensors_of(self.called(form, scale, args, kwargs))))
        found = [("result", one.detach()) for one in outputs]
        wanted = [
            one
            for one, mask in zip(fresh, self.masks, strict=True)
            if self._wants(one) and not mask
        ]
        wanted += self.weights()
        places = [p for p in self.gradients if outputs[p].requires_grad]
        if wanted and places:
            ends, seeds = [outputs[p] for p in places], [self.gradients[p] for p in places]
            gradients = torch.autograd.grad(ends, wanted, seeds, allow_unused=True)
            kinds = [isinstance(one, torch.nn.Parameter) for one in wanted]
            found += [
                ("weight gradient" if is_weight else "input gradient", gradient)
                for gradient, is_weight in zip(gradients, kinds, strict=True)
                if gradient is not None
            ]
        return found

    @staticmethod
    def _leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
            return leaf
        return leaf.detach().requires_grad_(leaf.requires_grad)

    @staticmethod
    def _wants(leaf: Any) -> bool:
        return is_floating(leaf) and leaf.requires_grad and not is_bias(leaf)

    def weights(self) -> list[torch.Tensor]:
        """Weight matrices that are no arguments."""
        return []

    def called(self, form: Format | None, scale: float, args: Any, kwargs: Any) -> Any:
        """The output, in float32 or a format."""
        if form is None:
            return self.function(*args, **kwargs)
        return product(form, scale, self.function, args, kwargs)


class Attention(Piece):
    """The products of two activations in one call of a module, with what is between them."""

    def __init__(self, frame: Frame, owner: torch.nn.Module) -> None:
        super().__init__(owner, type(owner).__name__, owner, frame.args, frame.kwargs)
        self.chosen = {number - frame.start for number in frame.free}
        for part in frame.free.values():
            part.is_part = True

    def weights(self) -> list[torch.Tensor]:
        """The matrices below the module: each sees another path through the attention."""
        assert self.owner is not None
        return [p for p in self.owner.parameters() if self._wants(p)]

    def called(self, form: Format | None, scale: float, args: Any, kwargs: Any) -> Any:
        """The output of the module, with these products in a format."""
        with nullcontext() if form is None else InFormat(form, scale, self.chosen):
            return self.function(*args, **kwargs)


@dataclass
class Frame:
    """A module call that runs.

    Attributes:
        start: Number of the first product that it may have.
        free: Its own products without a parameter, by their numbers.
    """

    module: torch.nn.Module
    args: Any
    kwargs: dict[str, Any]
    start: int
    free: dict[int, Piece] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def is_attention(self) -> bool:
        """Whether it has chained products of activations, from inputs that it did not write."""
        return len(self.free) > 1 and self.versions == _versions(self.args, self.kwargs)


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [one._version for one in tensors_of((args, kwargs))]


class Trace(TorchFunctionMode):
    """Context that notes the products of a forward.

    Attributes:
        pieces: What can run again.
        numbers: Of the products of each module, by its id, as :class:`InFormat` counts.
        outputs: Of each module call the largest magnitudes that it gave.
        called: The ids of the modules that were called.
        readers: Of each parameter, by id, the ids of the modules that multiplied with it.
        loss: Of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.numbers: dict[int | None, set[int]] = {}
        self.outputs: list[tuple[torch.nn.Module, torch.Tensor]] = []
        self.called: set[int] = set()
        self.readers: dict[int, set[int | None]] = {}
        self.loss = 0.0
        self._frames: list[Frame] = []
        self._count = 0

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """Note the products of ``model``, by hooks on its modules that are gone at the end."""
        handles: list[Any] = []
        try:
            for module in model.modules():
                if not isinstance(module, torch.jit.ScriptModule):  # its products are its parent's
                    handles.append(
                        module.register_forward_pre_hook(
                            self._enter, prepend=True, with_kwargs=True
                        )
                    )
                    handles.append(module.register_forward_hook(self._leave, always_call=True))
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.called.add(id(module))
        frame = Frame(module, args, kwargs, self._count)
        frame.versions = _versions(args, kwargs)
        self._frames.append(frame)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        while self._frames and self._frames[-1].module is not module:
            self._frames.pop()  # of a forward that raised, and whose error was caught
        frame = self._frames.pop()
        floating = [one for one in tensors_of(output) if is_floating(one) and one.numel()]
        self.outputs += [(module, largest(one)) for one in floating]
        if frame.is_attention():
            self._add(Attention(frame, module), output)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, and note it if it is a product."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if is_product(func, kwargs):
            self._note(func, args, kwargs, output)
        return output

    def _note(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._frames[-1] if self._frames else None
        owner = None if frame is None else frame.module
        name = getattr(function, "__name__", "product")
        for one in tensors_of(output):
            if one.dtype in HALVES:
                where = name if owner is None else f"{name} in a {type(owner).__name__}"
                dtype = str(one.dtype).removeprefix("torch.")
                raise ValueError(HALF_ERROR.format(name=where, dtype=dtype))
        key = None if owner is None else id(owner)
        self.numbers.setdefault(key, set()).add(self._count)
        parameters = [p for p in tensors_of((args, kwargs)) if isinstance(p, torch.nn.Parameter)]
        for parameter in parameters:
            self.readers.setdefault(id(parameter), set()).add(key)
        piece = Piece(owner, name, function, args, kwargs)
        if frame is not None and not parameters:
            frame.free[self._count] = piece
        self._count += 1
        self._add(piece, output)

    def _add(self, piece: Piece, output: Any) -> None:
        piece.watch(output)
        self.pieces.append(piece)


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, 0-dim; 0 of no elements."""
    if tensor.numel() == 0:
        return tensor.detach().new_zeros(())
    size: torch.Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf"))
    return size
