"""One pass in float32, with what is needed to run each of its products again alone.

A product keeps its operands and the gradients that reached its results. It belongs to the innermost
module that was running. Products of two activations in one module call (scores and the mixing of
values) are one attention: it runs again as a whole, from the module's inputs to its outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from apex.debug import calls
from apex.debug.tensors import HALVES, tensors_of
from apex.debug.what_if import formats
from apex.debug.what_if.formats import Format, floating, is_bias


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, 0-dim; 0 of no elements."""
    return tensor.detach().abs().amax() if tensor.numel() else tensor.new_zeros(())


Results = dict[tuple[str, int], torch.Tensor]  # by kind and place


def _leaf(leaf: Any, *, copied: bool = False) -> Any:
    """A tensor where a backward ends; a parameter is one itself, and no pass writes it."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
        return leaf
    one = leaf.detach().clone() if copied else leaf.detach()
    return one.requires_grad_(leaf.requires_grad)


class _Watched(torch.autograd.Function):
    """Gives an operand on, and notes the gradient of this one use of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: dict[int, torch.Tensor], place: int) -> Any:
        ctx.found, ctx.place = found, place
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.found[ctx.place] = gradient
        return gradient, None, None


_watched: Any = _Watched.apply  # torch has no types for it


class ProductCall:
    """What runs again: one product, or the attention of a module call.

    Attributes:
        owner: The module it belongs to.
        chosen: Of an attention the numbers of its products in the module call.
        gradients: Of its floating outputs, by their place.
        results: The largest magnitudes of these outputs.
        operands: The largest magnitudes of what goes in.
        is_part: Whether it is judged as a part of an attention.
    """

    def __init__(self, owner: Any, call: Any, args: Any, kwargs: Any, chosen: Any = None) -> None:
        self.owner, self.call, self.chosen, self.is_part = owner, call, chosen, False
        leaves, self.spec = tree_flatten((args, kwargs))
        ids = formats.operands(call, args, kwargs)
        self.leaves = [(_leaf(leaf, copied=True), id(leaf) in ids) for leaf in leaves]
        self.operands = [largest(leaf) for leaf in leaves if id(leaf) in ids]
        self.results, self.random = list[torch.Tensor](), calls.random_states()
        self.gradients, self._seen = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        self._outputs, self._is_exact = list[torch.Tensor](), False

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Call the product in the pass; note what it gives and the gradients of operands."""
        leaves, wanted = tree_flatten((args, kwargs))[0], self._wanted([x for x, _ in self.leaves])
        self._is_exact = len({id(leaves[place]) for place in wanted}) == len(wanted)
        for place in wanted:
            leaves[place] = _watched(leaves[place], self._seen, place)
        args, kwargs = tree_unflatten(leaves, self.spec)
        output = self.call(*args, **kwargs)
        self._outputs = [one.detach() for one in floating(output)]
        # The program gets copies: it may write them (ReLU), and hooks on a written view never run.
        output = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, output)
        self.watch(output)
        return output

    def _wanted(self, leaves: Sequence[Any]) -> list[int]:
        """The places of the operands whose gradients are compared."""
        both = enumerate(zip(leaves, self.leaves, strict=True))
        return [n for n, (x, (_, is_in)) in both if is_in and x.requires_grad and not is_bias(x)]

    def watch(self, output: Any) -> None:
        """Keep the gradients that will reach the outputs, and how large the outputs are."""
        for place, one in enumerate(floating(output)):
            self.results.append(largest(one))
            if one.grad_fn is not None:  # its hooks see what the program's hooks on tensors give
                one.grad_fn.register_prehook(partial(self._keep, place, one.output_nr))

    def _keep(self, place: int, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        # The second backward of a gradient penalty reaches operands by other ways as well.
        self._is_exact &= not torch.is_grad_enabled()
        if (gradient := gradients[number]) is not None:
            self.gradients[place] = gradient

    def exact(self) -> Results:
        """What :meth:`run` gives in float32: of one product what the pass computed."""
        if not self._is_exact:
            return self.run(None)
        found: Results = {("result", place): one for place, one in enumerate(self._outputs)}
        for place, gradient in self._seen.items():
            found[_kind(self.leaves[place][0]), place] = gradient.to_dense()
        return found

    def run(self, form: Format | None, scale: float = 1.0) -> Results:
        """Its results, the gradients of its inputs and of its weight matrices."""
        leaves = [_leaf(leaf) for leaf, _ in self.leaves]
        wanted = {place: leaves[place] for place in self._wanted(leaves)}
        if self.chosen is not None:  # each matrix sees another path through the attention
            own = [one for one in self.owner.parameters() if one.requires_grad and not is_bias(one)]
            wanted |= dict(enumerate(own, len(leaves)))
        calls.set_random_states(self.random)  # dropout drops the same in every run
        if form is not None and self.chosen is None:
            given = [is_in for _, is_in in self.leaves]
            output = formats.product(form, scale, self.call, leaves, self.spec, given)
        else:
            args, kwargs = tree_unflatten(leaves, self.spec)
            with nullcontext() if form is None else formats.InFormat(form, scale, self.chosen):
                output = self.call(*args, **kwargs)
        outputs = floating(output)
        found: Results = {("result", place): one.detach() for place, one in enumerate(outputs)}
        places = [place for place in self.gradients if outputs[place].requires_grad]
        if not wanted or not places:
            return found
        ends, seeds = zip(*((outputs[p], self.gradients[p]) for p in places), strict=True)
        gradients = torch.autograd.grad(ends, [*wanted.values()], seeds, allow_unused=True)
        for (place, one), gradient in zip(wanted.items(), gradients, strict=True):
            if gradient is not None:
                found[_kind(one), place] = gradient.to_dense()
        return found


def _kind(leaf: Any) -> str:
    return f"{'weight' if isinstance(leaf, torch.nn.Parameter) else 'input'} gradient"


class Frame(NamedTuple):
    """A module call that runs: its first product has the number ``start``.

    ``free`` has its own products without a parameter, by their numbers; ``versions`` tell whether
    it writes its inputs, which then cannot be given to it again.
    """

    module: torch.nn.Module | None
    given: tuple[Any, Any]
    start: int
    versions: list[int]
    free: dict[int, ProductCall]


class ProductTrace(TorchFunctionMode):
    """Context that notes the products of a forward.

    Attributes:
        pieces: What can run again.
        numbers: Of the products of each module, by its id, as :class:`InFormat` counts.
        outputs: The largest magnitudes that module calls gave, by the ids of the modules.
        called: The ids of the modules that were called.
        readers: Of each parameter, by id, the ids of the modules that multiplied with it.
        loss: Of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[ProductCall] = []
        self.numbers: dict[int, set[int]] = defaultdict(set)
        self.outputs: list[tuple[int, torch.Tensor]] = []
        self.called: set[int] = set()
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.loss, self._count = 0.0, 0
        self._frames: list[Frame] = []

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """Note the products of ``model``, by hooks on its modules that are gone at the end."""
        with ExitStack() as stack:
            for one in model.modules():
                if not isinstance(one, torch.jit.ScriptModule):  # its products are its parent's
                    add = one.register_forward_pre_hook
                    stack.callback(add(self._enter, prepend=True, with_kwargs=True).remove)
                    stack.callback(one.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.called.add(id(module))
        given = (args, kwargs)
        self._frames.append(Frame(module, given, self._count, _versions(given), {}))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        frame = self._frames.pop()
        self.outputs += [(id(module), largest(one)) for one in floating(output)]
        if len(frame.free) > 1 and frame.versions == _versions(frame.given):
            for part in frame.free.values():
                part.is_part = True
            chosen = {number - frame.start for number in frame.free}
            self.pieces.append(ProductCall(module, module, *frame.given, chosen))
            self.pieces[-1].watch(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and note it if it is a product."""
        if formats.is_product(func, kwargs or {}):
            return self._noted(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _noted(self, function: Any, args: Any, kwargs: Any) -> Any:
        frame = self._frames[-1] if self._frames else Frame(None, ((), {}), 0, [], {})
        owner = frame.module
        piece, number = ProductCall(owner, function, args, kwargs), self._count
        output = piece.compute(args, kwargs)
        for one in tensors_of(output):
            if one.dtype in HALVES:
                raise ValueError(
                    f"apex.debug.what_if: {function.__name__} computed in {one.dtype} already; "
                    "call it before amp.initialize, and with a loss without torch.autocast"
                )
        parameters = [p for p in tensors_of((args, kwargs)) if isinstance(p, torch.nn.Parameter)]
        for parameter in parameters:
            self.readers[id(parameter)].add(id(owner))
        if not parameters:
            frame.free[number] = piece
        self.numbers[id(owner)].add(number)
        self.pieces.append(piece)
        self._count += 1
        return output


def _versions(given: Any) -> list[int]:
    return list(map(calls.version_of, tensors_of(given)))
