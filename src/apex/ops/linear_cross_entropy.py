"""Cross-entropy of a linear layer's outputs, which are never all in memory.

    logits = input @ weight.T + bias
    loss   = reduction of cross_entropy(logits, targets)        (:mod:`apex.ops.cross_entropy`)

A language model's logits are its largest tensor by far, and a plain program holds three or four of
that size at once: 8,192 tokens of a vocabulary of 32,768 in float32 are 1 GiB each. Here they are
made for some rows at a time, turned into their own gradient in place, multiplied into the gradients
of ``input``, ``weight`` and ``bias``, and overwritten by the next rows.

When that happens is decided by what is known when:

* For ``mean`` and ``sum`` in float32, float64 and bfloat16 in the forward pass, if gradients are
  wanted: they are known up to the one factor that backward brings. Three products as in a plain
  program (Hsu et al., "Liger Kernel", arXiv:2410.10989, section 3.2).
* For ``none`` each row has a factor of its own, and in float16 the factor (a loss scale) is what
  keeps small gradients from becoming 0. There backward makes the logits once more: four products.

Products are torch's, in the inputs' dtype. Logits are rounded to it, as those of a plain program.
Losses are float32 (float64 for float64). Sums over pieces run in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops import cross_entropy as rows_op
from apex.ops._library import batched, define, ordinary, tracing

REDUCTIONS = ("none", "mean", "sum")

# Logits of a piece: at least 16 MiB of float32, so that products stay large enough to be fast
# (128 rows of 32,768), at most 256 MiB, above which a GPU's products gain nothing; in between an
# eighth of all. No more than the least in all are left to torch's plain functions, which are faster
# then. Derived from sizes; 64 to 512 rows differ by less than 10 % on a CPU.
LEAST, MOST, SHARE = 2**22, 2**26, 8

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
) -> torch.Tensor:
    """Compute the definition, one loss for each row, with all logits in memory."""
    return rows_op.reference(F.linear(x, weight, bias), targets, smoothing, ignore_index)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute the loss; see :func:`apex.contrib.xentropy.linear_cross_entropy`."""
    smoothing, ignore_index = float(label_smoothing), int(ignore_index)
    if tracing():
        logits, targets = F.linear(x, weight, bias).flatten(0, -2), targets.long()
        losses = rows_op.reference(logits, targets.flatten(), smoothing, ignore_index)
        losses = _reduced(losses, targets.flatten(), ignore_index, reduction)
        return losses.view_as(targets) if reduction == "none" else losses
    _check(x, weight, targets, bias, smoothing, reduction, chunk_size)
    x, weight, bias = _as_autocast_wants(x, weight, bias)
    _check_dtypes(x, weight, bias)
    shape, targets = targets.shape, targets.long()  # a narrower dtype would wrap ignore_index
    if x.dim() != 2:
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if _plain(x, weight, bias, chunk_size):
        loss = _in_one_piece(x, weight, bias, targets, smoothing, ignore_index, reduction)
    else:
        height = chunk_size or chunk_rows(x.shape[0], weight.shape[0])
        loss = _in_pieces(x, weight, bias, targets, smoothing, ignore_index, reduction, height)
    return loss.reshape(shape) if reduction == "none" and len(shape) != 1 else loss


def _in_one_piece(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    logits = F.linear(x, weight, bias)
    try:
        return F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            targets.long(),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=smoothing,
        )
    except IndexError:
        rows_op.check_labels("linear_cross_entropy", targets, weight.shape[0], ignore_index)
        raise


def _in_pieces(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    reduction: str,
    height: int,
) -> torch.Tensor:
    wanted = [t is not None and t.requires_grad for t in (x, weight, bias)]
    at_once = reduction != "none" and x.dtype != torch.float16
    if at_once and torch.is_grad_enabled() and any(wanted):
        mean = reduction == "mean"
        loss: torch.Tensor = REDUCED(
            x, weight, bias, targets, smoothing, ignore_index, mean, height, *wanted
        )[0]
        return loss
    losses: torch.Tensor = ROWS(x, weight, bias, targets, smoothing, ignore_index, height)[0]
    return _reduced(losses, targets, ignore_index, reduction)


def chunk_rows(rows: int, classes: int) -> int:
    """How many rows' logits are made at a time."""
    share = -(-rows // SHARE)
    return max(1, LEAST // classes, min(MOST // classes, share))


def _reduced(
    losses: torch.Tensor, targets: torch.Tensor, ignore_index: int, reduction: str
) -> torch.Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


def _plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk_size: int | None
) -> bool:
    """Whether to call torch's own functions with all logits in memory."""
    if not torch.compiler.is_compiling() and (
        _runtime.forced() == "reference" or not ordinary(x, weight, bias)
    ):
        return True
    return chunk_size is None and x.shape[0] * weight.shape[0] <= LEAST


# -- what is refused -----------------------------------------------------------------------------


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    smoothing: float,
    reduction: str,
    chunk_size: int | None,
) -> None:
    for name, given in (("input", x), ("weight", weight), ("targets", targets)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(
                f"linear_cross_entropy: {name} is of type {type(given).__name__}; pass a tensor."
            )
    _check_shapes(x, weight, targets, bias)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"linear_cross_entropy: reduction is {reduction!r}; "
            f"allowed are {', '.join(REDUCTIONS)}."
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(
            f"linear_cross_entropy: label_smoothing is {smoothing}; allowed is 0 to 1."
        )
    if chunk_size is not None and (isinstance(chunk_size, float) or chunk_size < 1):
        raise ValueError(
            f"linear_cross_entropy: chunk_size is {chunk_size!r}; pass at least 1 row, or None."
        )
    if targets.dtype not in rows_op.INTEGERS:
        raise TypeError(
            f"linear_cross_entropy: targets are {targets.dtype}; "
            "pass class numbers, an integer dtype."
        )


def _check_shapes(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if (
        x.dim() < 1
        or weight.dim() != 2
        or weight.shape[1] != x.shape[-1]
        or not weight.shape[0]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        raise ValueError(
            f"linear_cross_entropy: input has shape {tuple(x.shape)}, weight {tuple(weight.shape)}"
            f", bias {None if bias is None else tuple(bias.shape)}. "
            "Pass (..., features), (classes, features) and (classes,)."
        )
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: targets have shape {tuple(targets.shape)}; "
            f"for this input pass {tuple(x.shape[:-1])}."
        )
    devices = {str(t.device) for t in (x, weight, targets, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(
            f"linear_cross_entropy: tensors are on {', '.join(sorted(devices))}. Move all to one."
        )


def _check_dtypes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(dtypes) > 1 or not x.is_floating_point():
        raise TypeError(
            f"linear_cross_entropy: dtypes are {', '.join(sorted(map(str, dtypes)))}. "
            "Pass one floating dtype for input, weight and bias, or call it under torch.autocast."
        )


def _as_autocast_wants(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast as ``F.linear`` is cast: everything but float64."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(x), cast(weight), None if bias is None else cast(bias)


# -- piece by piece ------------------------------------------------------------------------------


def _pieces(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, height: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows and their logits, which the next slice's overwrite.

    Functions with ``out`` and in-place ones are left alone by autocast, so none is cast twice.
    """
    rows = x.shape[0]
    if not rows:
        return
    buffer = x.new_empty(min(height, rows), weight.shape[0])
    turned = weight.t()
    for start in range(0, rows, height):
        here = slice(start, min(rows, start + height))
        logits = buffer[: here.stop - start]
        if bias is None:
            torch.mm(x[here], turned, out=logits)
        else:
            torch.addmm(bias, x[here], turned, out=logits)
        yield here, logits


class _Sums:
    """Gradients as they grow, piece by piece; those that nobody wants stay empty."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        need_x: bool,
        need_weight: bool,
        need_bias: bool,
    ) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.x, self.weight = x, weight
        self.need_x, self.need_weight, self.need_bias = need_x, need_weight, need_bias
        self.of_x, self.of_weight, self.of_bias = _empty_gradients(
            x, weight, wide, need_x, need_weight, need_bias
        )
        self.of_weight.zero_()
        self.of_bias.zero_()

    def add(self, rows: slice, slope: torch.Tensor) -> None:
        """Take up the gradient of some rows' logits."""
        if self.need_x:
            torch.mm(slope, self.weight, out=self.of_x[rows])
        if self.need_weight and self.of_weight.dtype == slope.dtype:
            self.of_weight.addmm_(slope.t(), self.x[rows])
        elif self.need_weight:
            self.of_weight.add_(torch.mm(slope.t(), self.x[rows]))
        if self.need_bias:
            self.of_bias.add_(slope.sum(0, dtype=self.of_bias.dtype))


def _empty_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    wide: torch.dtype,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> Gradients:
    return (
        x.new_empty(x.shape if need_x else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,), dtype=wide),
        weight.new_empty(weight.shape[:1] if need_bias else (0,), dtype=wide),
    )


def _rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    height: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and ``lse``, one a row."""
    rows_op.check_labels("linear_cross_entropy", targets, weight.shape[0], ignore_index)
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = torch.empty(x.shape[0], dtype=wide, device=x.device)
    lse = torch.empty_like(losses)
    for here, logits in _pieces(x, weight, bias, height):
        losses[here], lse[here] = rows_op.forward(logits, targets[here], smoothing, ignore_index)
    return losses, lse


def _rows_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    lse: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    height: int,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> Gradients:
    sums = _Sums(x, weight, need_x, need_weight, need_bias)
    for here, logits in _pieces(x, weight, bias, height):
        rows_op.backward_into(
            logits, grad[here], logits, lse[here], targets[here], smoothing, ignore_index
        )
        sums.add(here, logits)
    return sums.of_x, sums.of_weight.to(weight.dtype), sums.of_bias.to(weight.dtype)


def _reduced_at_once(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    mean: bool,
    height: int,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and its gradients; those of weight and bias in float32, to be rounded once."""
    rows_op.check_labels("linear_cross_entropy", targets, weight.shape[0], ignore_index)
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = torch.empty(x.shape[0], dtype=wide, device=x.device)
    factor = torch.ones((), dtype=wide, device=x.device)
    if mean:
        factor = factor / (targets != ignore_index).sum()
    grad = factor.expand(x.shape[0])
    sums = _Sums(x, weight, need_x, need_weight, need_bias)
    for here, logits in _pieces(x, weight, bias, height):
        losses[here], lse = rows_op.forward(logits, targets[here], smoothing, ignore_index)
        rows_op.backward_into(
            logits, grad[here], logits, lse, targets[here], smoothing, ignore_index
        )
        sums.add(here, logits)
    return losses.sum() * factor, sums.of_x, sums.of_weight, sums.of_bias


# -- as operations of torch ----------------------------------------------------------------------


def _rows_fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = x.new_empty(x.shape[:1], dtype=torch.promote_types(x.dtype, torch.float32))
    return losses, torch.empty_like(losses)


def _rows_backward_fake(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> Gradients:
    return _empty_gradients(x, weight, weight.dtype, *rest[-3:])


def _reduced_fake(
    x: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((), dtype=wide), *_empty_gradients(x, weight, wide, *rest[-3:])


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, targets, *ctx.numbers = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, targets, output[1])


def _keep_reduced(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, targets, *ctx.numbers = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # for those it would be zeros of the weight's size
    ctx.save_for_backward(x, weight, bias, targets, *output[1:])


def _of_rows(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias, targets, lse = ctx.saved_tensors
    smoothing, ignore_index, height = ctx.numbers
    needs = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # create_graph=True
        losses = reference(x, weight, bias, targets, smoothing, ignore_index)
        return *_again(losses, grad, (x, weight, bias), needs), None, None, None, None
    found = ROWS_BACKWARD(
        grad, x, weight, bias, targets, lse, smoothing, ignore_index, height, *needs
    )
    return *_those(found, needs), None, None, None, None


def _of_reduced(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    x, weight, bias, targets, *found = ctx.saved_tensors
    smoothing, ignore_index, mean, *_rest = ctx.numbers
    needs = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():
        losses = reference(x, weight, bias, targets, smoothing, ignore_index)
        loss = _reduced(losses, targets, ignore_index, "mean" if mean else "sum")
        return *_again(loss, grad, (x, weight, bias), needs), *[None] * 8
    scaled = [
        _scaled(t, grad, x.dtype) if need else t for t, need in zip(found, needs, strict=True)
    ]
    return *_those(scaled, needs), *[None] * 8


def _scaled(found: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``found * grad``, computed in float32 and rounded once, without a float32 copy."""
    if found.dtype == dtype or batched(grad):
        return (found * grad).to(dtype)
    out = torch.empty_like(found, dtype=dtype)
    return torch.mul(found, grad.reshape(1), out=out)


def _those(found: Any, needs: tuple[bool, ...]) -> list[torch.Tensor | None]:
    return [t if need else None for t, need in zip(found, needs, strict=True)]


def _again(
    loss: torch.Tensor,
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor | None, ...],
    needs: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """Gradients that are differentiable themselves, from the definition."""
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor targets"
_NEEDS = "bool need_x, bool need_weight, bool need_bias"
ROWS_BACKWARD = define(
    f"linear_cross_entropy_rows_backward(Tensor grad, {_TENSORS}, Tensor lse, float smoothing,"
    f" int ignore_index, int height, {_NEEDS}) -> (Tensor x, Tensor weight, Tensor bias)",
    _rows_backward,
    _rows_backward_fake,
)
ROWS = define(
    f"linear_cross_entropy_rows({_TENSORS}, float smoothing, int ignore_index, int height)"
    " -> (Tensor losses, Tensor lse)",
    _rows,
    _rows_fake,
    keep=_keep_rows,
    backward=_of_rows,
)
REDUCED = define(
    f"linear_cross_entropy({_TENSORS}, float smoothing, int ignore_index, bool mean, int height,"
    f" {_NEEDS}) -> (Tensor loss, Tensor of_x, Tensor of_weight, Tensor of_bias)",
    _reduced_at_once,
    _reduced_fake,
    keep=_keep_reduced,
    backward=_of_reduced,
)
