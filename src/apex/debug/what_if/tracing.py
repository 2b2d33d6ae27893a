"""Passes in float32, with what is needed to run each of their products again alone.

A product keeps its operands and the gradients that reached its results. It belongs to the innermost
module that was running. Products of two activations in one module call (scores and the mixing of
values) are one attention: it runs again as a whole, from the module's inputs to its outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from apex._compat import private
from apex._compat.private import tree_flatten, tree_map_only
from apex.amp.casting.kept_modules import by_name, own_tensors
from apex.debug import calls
from apex.debug.tensors import HALVES, largest
from apex.debug.what_if import formats
from apex.debug.what_if.formats import InFormat, Products, Rounding, floating, is_bias

Results = dict[tuple[str, int], torch.Tensor]  # by kind and place
RESULT, INPUT, WEIGHT = "result", "input gradient", "weight gradient"
EXACT = Rounding(formats.FLOAT32)
_GRAD = getattr(torch.Tensor.grad, "__get__")  # noqa: B009  # torch types it as a tensor
_TIMES = {"div", "divide", "mul", "multiply", "true_divide", "truediv"}  # of weights by their norm


class ProductCall:
    """What runs again: one product, or the attention of a module call.

    Attributes:
        owner: The module it belongs to.
        chosen: Of an attention the numbers of its products in the module call; else empty.
        parameters: The ids of those among its arguments.
        gradients: Of its floating outputs, by their place.
        is_part: Whether it is judged as a part of an attention.
        channel: The dimension of its results that has the channels, from the end.
    """

    def __init__(
        self, owner: Any, call: Any, leaves: Sequence[Any], spec: Any, chosen: Any = ()
    ) -> None:
        self.owner, self.call, self.chosen, self.is_part = owner, call, chosen, False
        self._spec, self._places = spec, formats.operands(call, leaves, spec)
        self.parameters = {id(one) for one in leaves if isinstance(one, torch.nn.Parameter)}
        self._leaves = [_kept(one) for one in leaves]
        self.channel = formats.channel_of(call, leaves)
        self._wanted = {
            n: (WEIGHT if id(leaves[n]) in self.parameters else INPUT, n)
            for n in self._places
            if leaves[n].requires_grad and not is_bias(leaves[n])
        }
        self._seen, self._is_exact, self._random = Results(), not chosen, calls.random_states()
        self.gradients = dict[int, torch.Tensor]()

    def compute(self, leaves: list[Any]) -> Any:
        """Call the product in the pass; note what it gives and the gradients of operands."""
        for place, key in self._wanted.items():
            see = partial(self._see, key)
            leaves[place] = formats.mapped(leaves[place], torch.Tensor.detach, see)
        args, kwargs = formats.built(leaves, self._spec)
        output = self.call(*args, **kwargs)
        self._seen = {(RESULT, place): one.detach() for place, one in enumerate(floating(output))}
        # for the program, which may write it (ReLU): hooks on a view that is written never run
        output = tree_map_only(torch.Tensor, torch.clone, output)
        self.watch(output)
        return output

    def watch(self, output: Any) -> None:
        """Keep the gradients that will reach the outputs."""
        for place, one in enumerate(floating(output)):
            if one.grad_fn is not None:  # its hooks see what the program's hooks on tensors give
                one.grad_fn.register_prehook(partial(self._keep, place, one.output_nr))

    def _see(self, key: tuple[str, int], gradient: torch.Tensor) -> torch.Tensor:
        self._seen[key] = gradient.to_dense()
        return gradient

    def _keep(self, place: int, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        # The second backward of a gradient penalty reaches operands by other ways as well.
        self._is_exact &= not torch.is_grad_enabled()
        if (gradient := gradients[number]) is not None:
            self.gradients[place] = gradient.detach().to_dense()

    def seen(self, kind: str) -> list[torch.Tensor]:
        """What the pass gave of one product: its results, or gradients of its operands."""
        return [one for (found, _), one in self._seen.items() if found == kind]

    def exact(self) -> Results:
        """What :meth:`run` gives in float32: of one product what the pass computed."""
        return self._seen if self._is_exact else self.run(EXACT)

    def run(self, rounding: Rounding) -> Results:
        """Its results, the gradients of its inputs and of its weight matrices, in a format.

        Of an attention the products inside are rounded, and not what comes in and goes out.
        Gradients have the format's loss scale.
        """
        calls.set_random_states(self._random)  # dropout drops the same in every run
        border = EXACT if self.chosen else rounding
        leaves = [*self._leaves]
        for place in self._places:
            leaves[place] = border.operand(leaves[place]).detach()
        wanted = {key: leaves[n].requires_grad_() for n, key in self._wanted.items()}
        if self.chosen:  # each matrix sees another path through the attention
            own = [one for one in self.owner.parameters() if one.requires_grad and not is_bias(one)]
            wanted |= {(WEIGHT, -n): one for n, one in enumerate(own, 1)}
        args, kwargs = formats.built(leaves, self._spec)
        with InFormat(rounding, self.chosen) if self.chosen else nullcontext():
            outputs = floating(self.call(*args, **kwargs))
        found = {(RESULT, n): border.result(x.detach()) for n, x in enumerate(outputs)}
        given = {n: one for n, one in self.gradients.items() if outputs[n].requires_grad}
        if wanted and given:
            seeds = [border.result_gradient(one * rounding.scale) for one in given.values()]
            ends, every = [outputs[n] for n in given], [*wanted.values()]
            gradients = torch.autograd.grad(ends, every, seeds, allow_unused=True)
            for key, one in zip(wanted, gradients, strict=True):
                if one is not None:
                    found[key] = formats.rounded_(one.to_dense(), border.form.result)
        return found

    def sizes(self) -> list[float]:
        """The largest magnitudes of what goes in."""
        return [float(largest(self._leaves[place])) for place in self._places]


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


class ProductTrace(Products):
    """Context that notes the products of passes.

    Attributes:
        pieces: What can run again, of one pass: its products in their order, and attentions.
        calls: Of each module call in it the id of the module, and the sizes of what it gave.
        readers: Of each parameter, by id, the ids of the modules that multiplied with it.
        hidden: Of matrices that no function of torch's was seen to use, and of what such functions
            made of them alone (a view, a cast) and none used: the tensor and the ids of parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.hidden: dict[int, tuple[torch.Tensor, set[int]]] = {}
        self.forget()

    def forget(self) -> None:
        """Let go of one pass, which keeps all activations."""
        self.pieces: list[ProductCall] = []
        self.calls: list[tuple[int, list[torch.Tensor]]] = []
        self._frames = [Frame(None, ((), {}), 0, [], {})]

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Know of the calls of modules, by hooks that are gone at the end."""
        matrices = [one for one in model.parameters() if one.dim() > 1]
        self.hidden = {id(one): (one, {id(one)}) for one in matrices}
        with ExitStack() as stack:
            for one in model.modules():
                if not isinstance(one, torch.jit.ScriptModule):  # its products are its parent's
                    add = one.register_forward_pre_hook
                    stack.callback(add(self._enter, prepend=True, with_kwargs=True).remove)
                    stack.callback(one.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and note which matrices it uses."""
        output = super().__torch_function__(func, types, args, kwargs)
        is_own = getattr(func, "namespace", "aten") == "aten"  # not an operator of the program's
        if self.hidden and is_own and func != _GRAD:
            with private.DisableTorchFunction():
                self._note_use(formats.name_of(func), args, kwargs, output)
        return output

    def _note_use(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        used = [one for one in given if id(one) in self.hidden]
        if not used or not (made := calls.tensors_in(output)):
            return  # its shape, for example
        is_scaled = name.strip("_").removeprefix("r") in _TIMES
        if is_scaled and made[0].shape != used[0].shape:
            return  # a product by hand
        ids = set[int]().union(*[self.hidden.pop(key)[1] for key in {id(one) for one in used}])
        if is_scaled or len(used) == len(given):
            self.hidden |= {id(one): (one, ids) for one in made}

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        versions = [] if calls.is_transformed() else _versions(args, kwargs)
        self._frames.append(Frame(module, (args, kwargs), self.count, versions, {}))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        frame = self._frames.pop()
        if calls.is_transformed():
            self.calls.append((id(module), []))
            return
        with private.DisableTorchFunction():  # hooks run in this context, 3.5 us a call
            self.calls.append((id(module), [largest(one) for one in floating(output)]))
            if len(frame.free) > 1 and frame.versions == _versions(*frame.given):
                for part in frame.free.values():
                    part.is_part = True
                chosen = {number - frame.start for number in frame.free}
                self.pieces.append(ProductCall(module, module, *formats.flat(*frame.given), chosen))
                self.pieces[-1].watch(output)

    def product(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a product, and note it."""
        frame, (leaves, spec) = self._frames[-1], formats.flat(args, kwargs)
        piece = ProductCall(frame.module, function, leaves, spec)
        output = piece.compute(leaves)
        if halves := [one.dtype for one in calls.tensors_in(output) if one.dtype in HALVES]:
            raise ValueError(
                f"apex.debug.what_if: {function.__name__} computed in {halves[0]} already; call "
                "what_if before amp.initialize, and with a loss without torch.autocast"
            )
        for key in piece.parameters:
            self.readers[key].add(id(frame.module))
        if not piece.parameters:
            frame.free[self.count] = piece
        self.pieces.append(piece)
        return output


def _versions(args: Any, kwargs: Any) -> list[int]:
    with private.DisableTorchFunction():
        return [*map(calls.version_of, calls.tensors_in((args, kwargs) if kwargs else args))]


def keepers(
    model: torch.nn.Module, called: Collection[int], readers: Mapping[int, set[int]]
) -> dict[str, str | None]:
    """Of each module the innermost one at or around it that a policy can name; None if none.

    It was called, and nothing outside of it has or reads a weight or a buffer of it. The model
    itself cannot be named.

    Args:
        model: The model.
        called: The ids of the modules that a forward calls.
        readers: Of each weight, by id, the ids of the modules that multiply with it.
    """
    modules = by_name(model)
    users: dict[int, set[int]] = defaultdict(set, {key: {*ids} for key, ids in readers.items()})
    for one in model.modules():
        for tensor in own_tensors(one).values():
            users[id(tensor)].add(id(one))
    found: dict[str, str | None] = {"": None}
    for name in sorted(modules.keys() - {""}, key=len):  # what is around comes first
        inside = {id(one): one for one in modules[name].modules()}
        tensors = [id(tensor) for one in inside.values() for tensor in own_tensors(one).values()]
        is_alone = id(modules[name]) in called and all(
            users[key] <= inside.keys() for key in tensors
        )
        found[name] = name if is_alone else found[name.rpartition(".")[0]]
    return found
