"""A pass of the whole model beside float32's: what the layers' own results cannot show.

Layers that are safe alone are computed together, and much lies between them: sums, squares, norms
by hand, masks, the loss. So a copy of the model goes through ``amp.initialize`` at each level of a
format, with the policy that is offered, and the first batch runs. Compared are the loss and the
gradients of weight matrices, of these the median cosine and the median size: some are wrong in
healthy networks too, because they are zero by mathematics (of keys in attention) or mostly point
where a norm ignores them (of inputs around 300 before a batch norm).

Limits: 14 healthy networks and 14 faulty ones (``tests/debug/what_if/networks.py``), three seeds
each. Of healthy ones the cosine was at least 0.942 (a constant channel of 300 before a batch norm;
0.993 of the others) and the loss at most 1 % off. Faulty ones without a fault in a layer had a
cosine below 0.90, a loss that was off by a tenth and a cosine below 0.98, gradients 10 times as
large, or numbers that were not finite. 33 more healthy networks, written afterwards: 0.995, and 0.3
% where the loss is not near 0. The loss alone decides nothing: that of a policy gradient with
ratios of 1 is 0, and that of a copy beside its teacher, whose gradients are 0 too.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from apex._compat import private
from apex._compat.private import tree_map_only
from apex.debug.calls import tensors_in
from apex.debug.tensors import HALVES

LEVELS = {"float16": ("O1", "O2"), "bfloat16": ("O4", "O5")}
COSINE, TIMES = 0.9, 3.0
SURE, OFF = 0.99, 0.1  # up to this cosine a loss that is so far off is wrong
LOSS = 0.5  # of a layer alone
Gradients = Sequence[torch.Tensor | None]


class SinglePass(NamedTuple):
    """The loss of a pass and the gradients of its parameters, in float32 and not scaled."""

    loss: float
    gradients: Gradients


class Whole(NamedTuple):
    """A pass beside that in float32.

    Attributes:
        exact: The loss in float32.
        loss: The loss here.
        cosine: The median cosine of the gradients of weight matrices.
        why: What is wrong; empty if nothing is.
    """

    exact: float
    loss: float
    cosine: float
    why: str


@dataclass
class Level:
    """What became of the first batch at a level of amp.

    Attributes:
        name: Of the level.
        state: "trains" if loss and gradients are near those in float32, else "fails"; "not run" if
            that could not be found out.
        why: What is wrong, as the end of a sentence.
        whole: The numbers, if there are any.
    """

    name: str
    state: Literal["trains", "fails", "not run"]
    why: str = ""
    whole: Whole | None = None


class Alike(NamedTuple):
    """The cosine between two tensors, and their sizes (2-norms)."""

    cosine: float
    size: float
    found: float


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine between two tensors; 1 if both are zero, 0 if one is; -1 if not finite."""
    return _alike(a, b).cosine


def _alike(a: torch.Tensor, b: torch.Tensor) -> Alike:
    a, b = a.flatten(), b.flatten()
    sizes = float(a @ a) ** 0.5, float(b @ b) ** 0.5  # on a CPU a third of vector_norm's time
    if not all(1e-15 < one < 1e15 for one in sizes):  # their squares are beyond float32
        a, b = a.double(), b.double()
        sizes = float(a.norm()), float(b.norm())
    if 0.0 in sizes:
        return Alike(float(sizes[0] == sizes[1]), *sizes)
    found = float(a @ b) / sizes[0] / sizes[1]
    return Alike(-1.0 if math.isnan(found) else found, *sizes)


_PRODUCTS = ("addmm", "baddbmm", "bmm", "convolution", "convolution_backward", "mm", "mv")


class Widened(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of 16-bit numbers on a CPU in float32, rounded once, as ``amp`` does in float16.

    A CPU without instructions for them takes 15 times float32's time (24 layers of 512, batch 128).
    amp's kernels for that stay in the process, and are not for a model that is to stay plain torch.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Widen what is multiplied."""
        given = [one for one in args if isinstance(one, torch.Tensor)]
        narrow = {one.dtype for one in given}
        if (
            func._schema.name.removeprefix("aten::") not in _PRODUCTS
            or len(narrow) != 1  # an error of the program
            or narrow.isdisjoint(HALVES)
            or given[0].device.type != "cpu"
        ):
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs or {}))
        found, (dtype,) = func(*args, **kwargs), narrow
        return tree_map_only(torch.Tensor, lambda one: one.to(dtype), found)


def is_finite(gradients: Gradients) -> bool:
    """Whether all of them are."""
    every = [one for one in gradients if one is not None]
    if math.isfinite(sum(float(one.sum()) for one in every)):  # usual, and cheap
        return True
    return all(bool(one.isfinite().all()) for one in every)


def compared(exact: SinglePass, found: SinglePass, usual: float) -> Whole:
    """Compare a pass with that in float32.

    Args:
        exact: The pass in float32.
        found: The other one.
        usual: The largest loss of the batches in float32.
    """
    both = zip(exact.gradients, found.gradients, strict=True)
    pairs = [(a, b) for a, b in both if a is not None and b is not None and a.dim() > 1]
    alike = [_alike(a, b) for a, b in pairs]
    alike = [one for one in alike if one.size > 0.0]
    middle = statistics.median_high([one.cosine for one in alike] or [1.0])
    why = ""
    if not math.isfinite(found.loss):
        why = f"the loss is {found.loss}"
    elif not is_finite(found.gradients):
        why = "gradients are inf or NaN"
    elif middle < SURE and abs(found.loss - exact.loss) > OFF * usual:
        why = f"the loss is {found.loss:.3g}, in float32 {exact.loss:.3g}"
    elif middle < COSINE:
        why = f"the median cosine of the weights' gradients to float32's is {middle:.2f}"
    elif alike:
        size = statistics.median_low([one.found / max(one.size, 1e-30) for one in alike])
        if not 1 / TIMES < size < TIMES:
            why = f"the weights' gradients are {size:.2g} times as large as in float32"
    return Whole(exact.loss, found.loss, middle, why)


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy; what forwards have left in attributes, with a graph, is copied without it."""
    every = [value for module in model.modules() for value in vars(module).values()]
    left = [one for one in tensors_in(every) if not one.is_leaf]
    return copy.deepcopy(model, {id(one): one.detach().clone() for one in left})


def at_level(
    name: str,
    model: torch.nn.Module,
    policy: Any,
    run: Callable[[torch.nn.Module, float], SinglePass],
    scales: Sequence[float],
    compare: Callable[[SinglePass], Whole],
) -> Level:
    """Run a copy of the model at a level; never raises for what the program does there.

    Args:
        name: The level.
        model: Which is copied.
        policy: For ``amp.initialize``.
        run: Runs the first batch with a model, at a loss scale.
        scales: Loss scales, from the largest on: the first whose gradients are finite counts.
        compare: Gives the comparison with float32.
    """
    from apex.amp.frontend import initialize  # a watch does without amp
    from apex.amp.functions import disable_casts

    try:
        again = copied(model)
    except Exception as error:  # noqa: BLE001  # of the program's own __deepcopy__
        return Level(name, "not run", f"copy.deepcopy of the model fails ({_line(error)})")
    try:
        again = initialize(again, opt_level=name, policy=policy, verbosity=0)
        for scale in scales:
            with Widened():  # type: ignore[no-untyped-call]
                found = run(again, scale)
            if not math.isfinite(found.loss) or is_finite(found.gradients):
                break
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Level(name, "not run", _line(error))
    except Exception as error:  # noqa: BLE001  # an error there is the answer
        return Level(name, "fails", f"{type(error).__name__}: {_line(error)}")
    if all(one is None for one in found.gradients):
        return Level(name, "not run", "the loss does not depend on its model argument")
    with disable_casts():  # else products of the comparison would be rounded too
        whole = compare(found)
    why = whole.why
    if why == "gradients are inf or NaN" and len(scales) > 1:
        powers = [f"2**{math.log2(one):.0f}" for one in (scales[0], scales[-1])]
        why += f" at every loss scale from {powers[0]} down to {powers[1]}"
    return Level(name, "fails" if why else "trains", why, whole)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160].rstrip(".")
