"""One pass in float32, with what is needed to run each of its products again alone.

A product keeps its operands and the gradients that reached its results. It belongs to the innermost
module that was running. Products of two activations in one module call (scores and the mixing of
values) are one attention: it runs again as a whole, from the module's inputs to its outputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from apex.debug import calls
from apex.debug.tensors import HALVES, tensors_of
from apex.debug.what_if import formats
from apex.debug.what_if.formats import FLOAT32, InFormat, Rounding, floating, is_bias


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, 0-dim; 0 of no elements."""
    return tensor.detach().abs().amax() if tensor.numel() else tensor.new_zeros(())


Results = dict[tuple[str, int], torch.Tensor]  # by kind and place
RESULT, INPUT, WEIGHT = "result", "input gradient", "weight gradient"
EXACT = Rounding(FLOAT32)


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
        parameters: Those among its arguments.
        gradients: Of its floating outputs, by their place.
        results: The largest magnitudes of these outputs.
        is_part: Whether it is judged as a part of an attention.
    """

    def __init__(self, owner: Any, call: Any, args: Any, kwargs: Any, chosen: Any = None) -> None:
        self.owner, self.call, self.chosen, self.is_part = owner, call, chosen, False
        leaves, self._spec = tree_flatten((args, kwargs))
        self._places = formats.operands(call, args, kwargs, leaves)
        self.parameters = [one for one in leaves if isinstance(one, torch.nn.Parameter)]
        self._leaves = [_kept(one) for one in leaves]
        compared = [n for n in self._places if leaves[n].requires_grad and not is_bias(leaves[n])]
        weights = {id(one) for one in self.parameters}
        self._wanted = {n: WEIGHT if id(leaves[n]) in weights else INPUT for n in compared}
        self.results, self._random = list[torch.Tensor](), calls.random_states()
        self.gradients, self._seen = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        self._outputs, self._is_exact = list[torch.Tensor](), False

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Call the product in the pass; note what it gives and the gradients of operands."""
        leaves = tree_flatten((args, kwargs))[0]
        self._is_exact = len({id(leaves[place]) for place in self._wanted}) == len(self._wanted)
        for place in self._wanted:
            leaves[place] = _watched(leaves[place], self._seen, place)
        args, kwargs = tree_unflatten(leaves, self._spec)
        output = self.call(*args, **kwargs)
        self._outputs = [one.detach() for one in floating(output)]
        output = _copied(output)
        self.watch(output)
        return output

    def watch(self, output: Any) -> None:
        """Keep how large the outputs are, and the gradients that will reach them."""
        self.results = [largest(one) for one in floating(output)]
        _on_gradients(output, self._keep)

    def _keep(self, place: int, gradient: torch.Tensor) -> None:
        # The second backward of a gradient penalty reaches operands by other ways as well.
        self._is_exact &= not torch.is_grad_enabled()
        self.gradients[place] = gradient.detach()

    def exact(self) -> Results:
        """What :meth:`run` gives in float32: of one product what the pass computed."""
        if not self._is_exact:
            return self.run(EXACT)
        found: Results = {(RESULT, place): one for place, one in enumerate(self._outputs)}
        return found | {(self._wanted[n], n): one.to_dense() for n, one in self._seen.items()}

    def run(self, rounding: Rounding) -> Results:
        """Its results, the gradients of its inputs and of its weight matrices, in a format.

        Of an attention the products inside are rounded, and not what comes in and goes out.
        """
        calls.set_random_states(self._random)  # dropout drops the same in every run
        border = rounding if self.chosen is None else EXACT
        leaves = [*self._leaves]
        for place in self._places:
            leaves[place] = border.operand(leaves[place]).detach()
        wanted = {(kind, n): leaves[n].requires_grad_() for n, kind in self._wanted.items()}
        if self.chosen is not None:  # each matrix sees another path through the attention
            own = [one for one in self.owner.parameters() if one.requires_grad and not is_bias(one)]
            wanted |= {(WEIGHT, -n): one for n, one in enumerate(own, 1)}
        args, kwargs = tree_unflatten(leaves, self._spec)
        with nullcontext() if self.chosen is None else InFormat(rounding, self.chosen):
            outputs = floating(self.call(*args, **kwargs))
        found = {(RESULT, n): border.result(x.detach()) for n, x in enumerate(outputs)}
        ends = [n for n in self.gradients if outputs[n].requires_grad]
        if wanted and ends:
            seeds = [border.result_gradient(self.gradients[n]) for n in ends]
            every, given = [*wanted.values()], [outputs[n] for n in ends]
            gradients = torch.autograd.grad(given, every, seeds, allow_unused=True)
            both = zip(wanted, gradients, strict=True)
            found |= {key: border.operand_gradient(one) for key, one in both if one is not None}
        return found

    def sizes(self) -> list[torch.Tensor]:
        """The largest magnitudes of what goes in."""
        return [largest(self._leaves[place]) for place in self._places]


def _copied(output: Any) -> Any:
    """For the program, which may write it (ReLU): hooks on a view that is written never run."""
    return tree_map_only(torch.Tensor, torch.clone, output)


def _on_gradients(output: Any, hook: Callable[[int, torch.Tensor], None]) -> None:
    """Call ``hook`` with the place and the gradient of each floating output, in each backward."""

    def found(place: int, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if (gradient := gradients[number]) is not None:
            hook(place, gradient)

    for place, one in enumerate(floating(output)):
        if one.grad_fn is not None:  # its hooks see what the program's hooks on tensors give
            one.grad_fn.register_prehook(partial(found, place, one.output_nr))


class GradientSizes(TorchFunctionMode):
    """Context that keeps in ``found`` the largest magnitudes of the gradients of products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and watch what it gives if it is a product."""
        product = formats.product_of(func, kwargs or {})
        output = func(*args, **(kwargs or {}))
        output = _copied(output) if product is func else output
        if product is not None:
            _on_gradients(output, lambda _, gradient: self.found.append(largest(gradient)))
        return output


def _kept(leaf: Any) -> Any:
    """A copy of a tensor, since the program may write it; a parameter is one itself."""
    is_one = isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)
    return leaf.detach().clone() if is_one else leaf


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
        others: How often products were called that are not judged, by name.
        loss: Of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[ProductCall] = []
        self.numbers: dict[int, set[int]] = defaultdict(set)
        self.outputs: list[tuple[int, torch.Tensor]] = []
        self.called: set[int] = set()
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.others = Counter[str]()
        self.loss, self._count = 0.0, 0
        self._frames = [Frame(None, ((), {}), 0, [], {})]

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
        with torch._C.DisableTorchFunction():  # hooks run in this context, 3.5 us a call
            self.outputs += [(id(module), largest(one)) for one in floating(output)]
            if len(frame.free) > 1 and frame.versions == _versions(frame.given):
                for part in frame.free.values():
                    part.is_part = True
                chosen = {number - frame.start for number in frame.free}
                self.pieces.append(ProductCall(module, module, *frame.given, chosen))
                self.pieces[-1].watch(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and note it if it is a product."""
        kwargs = kwargs or {}
        if (product := formats.product_of(func, kwargs)) is not None:
            output = self._noted(product, args, kwargs)
            return output if product is func else args[0].copy_(output)
        if name := formats.not_judged(func, kwargs):
            self.others[name] += 1
        return func(*args, **kwargs)

    def _noted(self, function: Any, args: Any, kwargs: Any) -> Any:
        frame, number = self._frames[-1], self._count
        piece, owner = ProductCall(frame.module, function, args, kwargs), id(frame.module)
        output = piece.compute(args, kwargs)
        for one in tensors_of(output):
            if one.dtype in HALVES:
                raise ValueError(
                    f"apex.debug.what_if: {function.__name__} computed in {one.dtype} already; "
                    "call it before amp.initialize, and with a loss without torch.autocast"
                )
        for parameter in piece.parameters:
            self.readers[id(parameter)].add(owner)
        if not piece.parameters:
            frame.free[number] = piece
        self.numbers[owner].add(number)
        self.pieces.append(piece)
        self._count += 1
        return output


def _versions(given: Any) -> list[int]:
    with torch._C.DisableTorchFunction():
        return list(map(calls.version_of, tensors_of(given)))
