"""Cross-entropy of a linear layer's outputs, which are never all in memory.

    logits = input @ weight.T + bias
    loss   = reduction of cross_entropy(logits, targets)  (:mod:`apex.ops.losses.cross_entropy`)

A language model's logits are its largest tensor by far, and a plain program holds three or four of
that size at once: 8,192 tokens of a vocabulary of 32,768 in float32 are 1 GiB each. Here they are
made for some rows at a time, turned into their own gradient in place, multiplied into the gradients
of ``input``, ``weight`` and ``bias``, and overwritten by the next rows.

When that happens is decided by what is known when:

* For ``mean`` and ``sum`` in float32 and bfloat16 in the forward, if gradients are wanted: they are
  known up to the one factor that the backward brings. Three products as in a plain program (Hsu et
  al., "Liger Kernel", arXiv:2410.10989, section 3.2).
* For ``none`` each row has a factor of its own, and in float16 the factor (a loss scale) is what
  keeps small gradients from becoming 0. There the backward makes the logits once more: four
  products.

``acc_policy="compact"`` needs an eighth of the logits beyond inputs and gradients. Rows at a time
are fewer; products of pieces add up in the gradient of ``weight`` itself; and the backward
multiplies the gradients that the forward left in place, and gives them away. A second backward over
the same graph makes them again.

Products are PyTorch's, in the inputs' dtype. Logits are rounded to it, as those of a plain program;
gradients of ``weight`` and ``bias`` add up in float32, but for the above. Losses are float32.
float64, transforms and gradients of gradients take the definition, with all logits in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._check import ArgumentError, check_shape, check_tensors, traced
from apex.ops._dtypes import Optional, wide
from apex.ops._op import UNSURE, op
from apex.ops.layers import dense
from apex.ops.losses import cross_entropy as rows_op
from apex.ops.losses import linear_log_probs as row_numbers
from apex.ops.losses._pieces import LEAST, pieces

REDUCTIONS, POLICIES = ("none", "mean", "sum"), ("balanced", "compact")
Reduction = Literal["none", "mean", "sum"]
AccPolicy = Literal["balanced", "compact"]


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional, targets: torch.Tensor, smoothing: float,
    ignore_index: int, reduction: str, *_: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute the definition, with all logits in memory."""
    losses = rows_op.losses(F.linear(x, weight, bias), targets, smoothing, ignore_index)
    return _reduced(losses, targets, ignore_index, reduction)


def _reduced(
    losses: torch.Tensor, targets: torch.Tensor, ignore_index: int, reduction: str
) -> torch.Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


# -- piece by piece ------------------------------------------------------------------------------


def _allocate(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional, targets: torch.Tensor, smoothing: float,
    ignore_index: int, reduction: str, chunk_size: int, wanted: Sequence[bool],
    acc_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Loss, ``sums`` and gradients, to be rounded; those that nobody wants have no element."""
    sums, to = x.new_empty((len(x), 2), dtype=wide(x)), wide(weight)
    return (
        sums.new_empty(x.shape[:1] if reduction == "none" else ()),
        sums,
        x.new_empty(x.shape if wanted[0] else (0,)),
        weight.new_empty(weight.shape if wanted[1] else (0,), dtype=acc_dtype or to),
        weight.new_empty(weight.shape[:1] if wanted[2] else (0,), dtype=to),
    )


def _computed(
    needs: Sequence[bool], *, x: torch.Tensor, weight: torch.Tensor, bias: Optional,
    targets: torch.Tensor, smoothing: float, ignore_index: int, chunk_size: int,
    acc_dtype: torch.dtype | None, dy: Optional = None, sums: Optional = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Losses and ``sums``, unless these are given, and gradients, if there is a ``dy`` per row.

    Gradients of weight and bias are to be rounded.
    """
    losses, new_sums, dx, dweight, dbias = _allocate(
        x, weight, bias, targets, smoothing, ignore_index, "none", chunk_size, needs, acc_dtype
    )
    dweight.zero_()
    dbias.zero_()
    loss = rows_op.OP.implementation(x)
    for rows, logits in pieces(x, weight, bias, chunk_size, acc_dtype is not None):
        given: Any = {"logits": logits, "labels": targets[rows], "smoothing": smoothing}
        given["padding_idx"] = ignore_index
        if sums is None:
            losses[rows], new_sums[rows] = loss.forward(**given)
        if dy is None:
            continue
        given["sums"] = (new_sums if sums is None else sums)[rows]
        [slope] = loss.backward(dy[rows], [True], **given, out=logits)
        if needs[0]:
            torch.mm(slope, weight, out=dx[rows])
        if needs[1]:
            dense.add_product(dweight, slope, x[rows])
        if needs[2]:
            dbias.add_(slope.sum(0, dtype=dbias.dtype))
    return losses, new_sums, dx, dweight, dbias


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional, targets: torch.Tensor, smoothing: float,
    ignore_index: int, reduction: str, chunk_size: int, wanted: Sequence[bool],
    acc_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dy = None
    if reduction != "none":
        factor = torch.ones((), dtype=wide(x), device=x.device)
        if reduction == "mean":
            factor = factor / (targets != ignore_index).sum()
        dy = factor.expand(len(x))
    losses, *others = _computed(
        wanted, x=x, weight=weight, bias=bias, targets=targets, smoothing=smoothing,
        ignore_index=ignore_index, chunk_size=chunk_size, acc_dtype=acc_dtype, dy=dy,
    )  # fmt: skip
    # Not losses.sum() * factor, which is not always what evaluation gives.
    return _reduced(losses, targets, ignore_index, reduction), *others


def _backward(
    dy: torch.Tensor, needs: Sequence[bool], *, reduction: str, wanted: Sequence[bool],
    dx: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor, in_place: bool = False,
    **rest: Any,
) -> list[Optional]:  # fmt: skip
    dtype = rest["x"].dtype
    if reduction == "none":
        found = [t.to(dtype) for t in _computed(needs, dy=dy, **rest)[2:]]
    else:
        found = [dx, dweight, dbias]
        shapes = (rest["x"].shape, rest["weight"].shape, rest["weight"].shape[:1])
        kept = zip(found, shapes, needs, strict=True)
        if any(need and t.shape != shape for t, shape, need in kept):  # given away
            again = {key: t for key, t in rest.items() if key != "sums"}
            found = [*_forward(**again, reduction=reduction, wanted=needs)[2:]]
        # In one dimension: a 0-dim factor would be rounded to 16 bits.
        scale, factor = _scaled_in_place if in_place else _scaled, dy.reshape(1)
        each = zip(found, needs, strict=True)
        found = [scale(t, factor, dtype) if need else t for t, need in each]
    return [t if need else None for t, need in zip(found, needs, strict=True)]


def _scaled(kept: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply without a copy in float32."""
    return torch.mul(kept, factor, out=torch.empty_like(kept, dtype=dtype))


def _scaled_in_place(kept: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same without a second gradient. ``kept`` has no element then, and autograd no copy."""
    if kept.dtype != dtype:
        return _scaled(kept, factor, dtype)
    given, kept.data = kept.data, kept.new_empty(0)  # `.data`: not a new version of what is saved
    # A CPU multiplies in float32, in a copy.
    for part in torch.split(given, dense.SLICE) if given.is_cpu else [given]:
        part.mul_(factor)
    return given


OP = op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor targets, float smoothing, "
    "int ignore_index, str reduction, int chunk_size, bool[] wanted, ScalarType? acc_dtype)"
    " -> (Tensor loss, Tensor sums, Tensor dx, Tensor dweight, Tensor dbias)",
    reference,
    grads=("x", "weight", "bias"),
    allocate=_allocate,
    pieces=SimpleNamespace(forward=_forward, backward=_backward),
    autocast="half",
)
# For eager calls: an operator must not write to its arguments.
COMPACT = SimpleNamespace(forward=_forward, backward=partial(_backward, in_place=True))


def linear_cross_entropy(  # noqa: PLR0913  # torch's arguments, and those of language models
    input: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,  # not for torch.jit.script: take LinearCrossEntropyLoss there, or torch.compile
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
    acc_policy: AccPolicy = "balanced",
    acc_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Compute ``F.cross_entropy(F.linear(input, weight, bias).float(), targets)`` in pieces.

    Only the logits of ``chunk_size`` rows are in memory at a time. With 4,096 rows or more, a
    forward and backward pass needs less than a seventh of the memory. In some cases the gradient
    needs float32 copies in addition:

    * CPU and ROCm, 16-bit weight: a piece's input, and 4,096 columns of its logits.
    * CUDA with torch 2.9, 16-bit weight: a product of 4,096 rows of the weight.
    * CPU with AVX-512 but without bfloat16 instructions: 256 rows of bfloat16 logits.

    Args:
        input: ``(..., features)``.
        weight: ``(classes, features)``; may be tied to an embedding.
        targets: ``(...)``: class numbers in any integer dtype.
        bias: ``(classes,)`` or ``None``.
        ignore_index: Target of rows that do not count.
        label_smoothing: Fraction of the target that is spread evenly over all classes.
        reduction: ``"mean"`` over the rows that count (NaN if none does), ``"sum"`` or ``"none"``.
        chunk_size: Number of rows in a piece. The default is an eighth of all rows, but at least
            1,024, in whole tiles of 128 rows, and at most 2**28 logits (512 MiB in 16 bits).
        acc_policy: ``"balanced"``, or ``"compact"`` to save memory. With 1,025 rows or more
            ``"compact"`` needs at most an eighth of the logits' memory beyond gradients. Its pieces
            are smaller by default, and it makes no other copy of the gradients. It has not been
            timed on a GPU.
        acc_dtype: The dtype in which ``"compact"`` adds up the gradient of ``weight``. The default
            is the weight's own dtype, which rounds once for each piece. ``torch.float32`` needs
            another copy of 16-bit weights. ``"balanced"`` always uses float32.
        softcap: Bound of the logits: ``softcap * tanh(logits / softcap)``, as in Gemma 2.
        temperature: Divisor of the logits, after ``softcap``.
        z_loss: Adds ``z_loss * logsumexp(logits) ** 2`` to the loss of each row that counts, as in
            PaLM (with 1e-4). If you pass ``softcap``, ``temperature`` or ``z_loss``, the backward
            pass computes the logits again, and pieces run without Triton kernels.

    Returns:
        0-dim tensor, or ``(...)`` for ``"none"``, in float32, or float64 for float64 input.

    Raises:
        ArgumentError: An argument has an unsupported dtype, shape, device or value, or dtypes
            differ outside of autocast. It is a TypeError, a ValueError and a RuntimeError.
        IndexError: A target is out of range, on a CPU. On a GPU the loss is NaN, or torch's own
            function stops with a device-side assertion.

    Example:
        >>> hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> linear_cross_entropy(hidden, weight, torch.tensor([1, 3]))
        tensor(1.3863)
    """
    smoothing, ignore_index = float(label_smoothing), int(ignore_index)
    _check_options(smoothing, reduction, chunk_size, acc_policy, acc_dtype)
    if softcap is not None or temperature != 1.0 or z_loss:
        row_numbers.check_options("linear_cross_entropy", softcap, temperature, z_loss)
        options = row_numbers.RowOptions(
            ignore_index, softcap, temperature, chunk_size or 0, acc_policy == "compact", acc_dtype,
            entropy=False,
        )  # fmt: skip
        log_probs, lse, _, mean = _rows(input, weight, targets, bias, options)
        losses = -log_probs
        if smoothing:
            losses = (1.0 - smoothing) * losses + smoothing * (lse - mean)
        losses = losses + z_loss * lse.square() if z_loss else losses
        return _reduced(losses, targets, ignore_index, reduction)
    if OP.choose(input) is UNSURE or not _fit(input, weight, targets, bias):
        _check_tensors(input, weight, targets, bias)
    elif (
        chunk_size is None
        and acc_policy == "balanced"
        and input.dim() == 2
        and input.shape[0] * weight.shape[0] <= LEAST
    ):
        args = (input, weight, bias, targets, smoothing, ignore_index)
        return _refusing_labels(reference, *args, reduction)
    x, weight, bias = OP.cast(input, weight, bias)
    if acc_policy == "compact":
        acc_dtype = _checked_acc_dtype(acc_dtype, weight)
    shape, targets = targets.shape, targets.long()  # a narrower dtype would wrap ignore_index
    if x.dim() != 2:
        x, targets = x.flatten(0, -2) if x.dim() > 1 else x[None], targets.reshape(-1)
    args = (x, weight, bias, targets, smoothing, ignore_index)
    plain = _runtime.forced() == "reference" or _runtime.transformed()
    plain_if_small = chunk_size is None and acc_dtype is None
    if not plain and plain_if_small and not torch.compiler.is_compiling():  # a guard there
        plain = x.shape[0] * weight.shape[0] <= LEAST
    wanted = [t is not None and t.requires_grad for t in (x, weight, bias)]
    known = reduction != "none" and x.dtype != torch.float16  # all but one factor of gradients
    known = known and torch.is_grad_enabled() and any(wanted)
    if plain:
        with _runtime.without_autocast(x.device.type):
            loss = _refusing_labels(reference, *args, reduction)
    elif known:
        loss = _refusing_labels(_called, *args, reduction, chunk_size or 0, wanted, acc_dtype)
    else:
        losses = _refusing_labels(OP, *args, "none", chunk_size or 0, [False] * 3, acc_dtype)
        loss = _reduced(losses, targets, ignore_index, reduction)
    return loss.reshape(shape) if reduction == "none" and len(shape) != 1 else loss


def linear_log_probs(
    input: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    acc_policy: AccPolicy = "balanced",
    acc_dtype: torch.dtype | None = None,
) -> row_numbers.LogProbs:
    """Compute each row's log-probability of its target, and the entropy of its distribution.

    Both are differentiable. Neither pass has all logits in memory, because the backward pass
    computes them again. See :func:`linear_cross_entropy` for more on the arguments.

    Args:
        input: ``(..., features)``.
        weight: ``(classes, features)``.
        targets: ``(...)``: class numbers in any integer dtype.
        bias: ``(classes,)`` or ``None``.
        ignore_index: Target of rows whose results and gradients are 0.
        softcap: Bound of the logits, or ``None``.
        temperature: Divisor of the logits, after ``softcap``.
        chunk_size: Number of rows in a piece.
        acc_policy: ``"balanced"`` or ``"compact"``.
        acc_dtype: The dtype in which ``"compact"`` adds up the gradient of ``weight``.

    Returns:
        ``(log_probs, entropy)``, each ``(...)``, in float32, or float64 for float64 input.

    Raises:
        ArgumentError: As in :func:`linear_cross_entropy`.
        IndexError: A target is out of range, on the CPU.

    Example:
        >>> hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> linear_log_probs(hidden, weight, torch.tensor([1, 3])).entropy
        tensor([1.3863, 1.3863])
    """
    _check_options(0.0, "none", chunk_size, acc_policy, acc_dtype, "linear_log_probs")
    row_numbers.check_options("linear_log_probs", softcap, temperature)
    options = row_numbers.RowOptions(
        int(ignore_index), softcap, temperature, chunk_size or 0, acc_policy == "compact", acc_dtype
    )
    log_probs, _, entropy, _ = _rows(input, weight, targets, bias, options, "linear_log_probs")
    return row_numbers.LogProbs(log_probs, entropy)


def _rows(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: Optional,
    options: row_numbers.RowOptions, name: str = "linear_cross_entropy",
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The numbers of each row, in the shape of ``targets``."""
    _check_tensors(x, weight, targets, bias, name)
    x, weight, bias = OP.cast(x, weight, bias)
    if options.compact:
        options = options._replace(acc_dtype=_checked_acc_dtype(options.acc_dtype, weight, name))
    rows = x.reshape(-1, x.shape[-1]), weight, bias, targets.reshape(-1).long()
    return tuple(one.reshape(targets.shape) for one in row_numbers.rows_of(name, *rows, options))


def _refusing_labels(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Call it; where an index is out of range say which row and what is allowed."""
    try:
        return function(*args)
    except (IndexError, RuntimeError):
        weight, targets, ignore_index = args[1], args[3], args[5]
        rows_op.check_labels("linear_cross_entropy", targets, weight.shape[0], ignore_index)
        raise


def _called(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """The operation; for ``"compact"`` with a backward in place where nothing is recorded."""
    if args[-1] is not None:
        with _runtime.without_autocast(x.device.type):
            if OP.choose(x) is OP.pieces and OP._are_plain((x, *args)):
                return OP.compute(x, *args[:3], (COMPACT, *args[3:]))  # behind the tensors
    return OP(x, *args)


# -- what is refused -----------------------------------------------------------------------------


def _checked_acc_dtype(
    acc_dtype: torch.dtype | None, weight: torch.Tensor, name: str = "linear_cross_entropy"
) -> torch.dtype:
    allowed = {weight.dtype: 0, wide(weight): 0}  # in this order
    if acc_dtype is not None and acc_dtype not in allowed:
        raise ArgumentError(
            f"{name}: acc_dtype is {acc_dtype}; allowed for a weight of {weight.dtype} are "
            f"{', '.join(map(str, allowed))}, or None for the first of these."
        )
    return acc_dtype or weight.dtype


def _check_options(
    smoothing: float, reduction: str, chunk_size: int | None, acc_policy: str,
    acc_dtype: torch.dtype | None, name: str = "linear_cross_entropy",
) -> None:  # fmt: skip
    said = None
    if reduction not in REDUCTIONS:
        said = f"reduction is {reduction!r}; allowed are {', '.join(REDUCTIONS)}."
    elif not 0.0 <= smoothing <= 1.0:
        said = f"label_smoothing is {smoothing}; pass a number from 0 to 1."
    elif chunk_size is not None and (isinstance(chunk_size, float) or chunk_size < 1):
        said = f"chunk_size is {chunk_size!r}; pass at least 1 row, or None."
    elif acc_policy not in POLICIES:
        said = f"acc_policy is {acc_policy!r}; allowed are {', '.join(POLICIES)}."
    elif acc_dtype is not None and acc_policy != "compact":
        said = (
            f"acc_dtype is {acc_dtype}, which needs acc_policy='compact'. Pass "
            "acc_policy='compact', or acc_dtype=None."
        )
    if said:
        raise ArgumentError(f"{name}: {said}")


def _fit(x: torch.Tensor, weight: torch.Tensor, targets: Any, bias: Optional) -> bool:
    """Whether :func:`_check_tensors` has nothing to say about plain tensors."""
    return (
        dense.fit(x, weight, bias)
        and type(targets) is torch.Tensor
        and targets.dtype == torch.int64
        and targets.device == x.device
        and targets.shape == x.shape[:-1]
        and weight.shape[0] > 0
    )


def _check_tensors(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: Optional,
    name: str = "linear_cross_entropy",
) -> None:  # fmt: skip
    dense.check(name, x, {"weight": weight}, {"bias": bias})
    tensors = {"input": x, "targets": targets}
    check_tensors(name, tensors, floating=(), integers=["targets"], required=["targets"])
    if traced():
        return
    if not weight.shape[0]:
        raise ArgumentError(
            f"{name}: weight of shape {list(weight.shape)} has no classes. Pass at least one row."
        )
    check_shape(name, "targets", targets, x.shape[:-1], f"input {list(x.shape)}")
