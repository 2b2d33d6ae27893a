"""Cross-entropy of rows of logits; see :mod:`apex.ops.cross_entropy` for the definition.

Forward is one read of the logits, whatever their number: the largest logit and the sum of
exponentials so far are kept, and the sum is rescaled when a larger logit comes (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867). Backward is one read and
one write. Rows whose label is ``padding_idx`` are not read at all.

A label outside the row is never used as an address: such a row's loss and gradients are nan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from apex.kernels._cases import Case

# Elements per step: two 128-bit loads of 16-bit logits for each of 256 threads, and few enough
# values in registers (16 a thread) that eight programs fit an SM. Derived, not tuned on a GPU.
BLOCK = 4096
WARPS = 8


@triton.jit
def cross_entropy_forward(
    # data
    logits_ptr,
    same_logits_ptr,  # for the label's: a pointer of its own, so that widths of rows are checked
    labels_ptr,
    losses_ptr,
    lse_ptr,
    # shape and scalars
    row_stride,
    columns,
    smoothing,
    padding_idx,
    # compile-time
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row for each program; see :func:`forward`."""
    row = tl.program_id(0).to(tl.int64)  # int64: row * row_stride passes 2**31
    lanes = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row).to(tl.int64)
    if label == padding_idx:
        tl.store(losses_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
    else:
        x_row = logits_ptr + row * row_stride
        inside = (label >= 0) & (label < columns)
        chosen = tl.load(
            same_logits_ptr + row * row_stride + label, mask=inside, other=float("nan")
        ).to(tl.float32)
        # What the mean is taken from: logits far from zero would round it.
        base = tl.where(tl.abs(chosen) < float("inf"), chosen, 0.0)
        largest = -float("inf")
        total = 0.0
        plain = tl.zeros((BLOCK,), tl.float32)
        for at in range(0, columns, BLOCK):
            mask = at + lanes < columns
            x = tl.load(x_row + at + lanes, mask=mask, other=-float("inf")).to(tl.float32)
            if SMOOTH:
                plain += tl.where(mask, x - base, 0.0)
            grown = tl.maximum(largest, tl.max(x, axis=0))
            # A block of -inf before any other number: inf - inf would poison the sum.
            safe = tl.where(grown == -float("inf"), 0.0, grown)
            total = total * tl.exp(largest - safe) + tl.sum(tl.exp(x - safe), axis=0)
            largest = grown
        above = tl.log(total)  # what lse rounds away where logits are large
        loss = largest - chosen + above
        if SMOOTH:
            mean = tl.sum(plain, axis=0) / columns
            loss = (1.0 - smoothing) * loss + smoothing * (largest - base - mean + above)
        tl.store(losses_ptr + row, loss)
        tl.store(lse_ptr + row, largest + above)


@triton.jit
def cross_entropy_backward(
    # data
    grad_ptr,
    logits_ptr,
    lse_ptr,
    labels_ptr,
    out_ptr,
    # shape and scalars
    grad_stride,
    row_stride,
    out_stride,
    columns,
    smoothing,
    padding_idx,
    # compile-time
    BLOCK: tl.constexpr,
):
    """``out = grad * (exp(x - lse) - (1 - smoothing) * [column == label] - smoothing / columns)``.

    One block of one row for each program.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    label = tl.load(labels_ptr + row).to(tl.int64)
    grad = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
    lse = tl.load(lse_ptr + row).to(tl.float32)
    counts = label != padding_idx
    grad = tl.where((label >= 0) & (label < columns), grad, float("nan"))
    x_row = logits_ptr + row * row_stride
    x = tl.load(x_row + at, mask=mask & counts, other=-float("inf")).to(tl.float32)
    target = tl.where(at == label, 1.0 - smoothing, 0.0) + smoothing / columns
    out = tl.where(counts, grad * (tl.exp(x - lse) - target), 0.0)
    tl.store(out_ptr + row * out_stride + at, out, mask=mask)


def forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses and the logarithms of the sums of exponentials, float32 ``(rows,)``.

    Args:
        logits: ``(rows, columns)``; contiguous along columns.
        labels: ``(rows,)``, contiguous, of any integer dtype.
        smoothing: Share of the target that is spread over all classes.
        padding_idx: Label of rows that do not count.
    """
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    if rows:
        with torch.cuda.device(logits.device if logits.is_cuda else -1):
            cross_entropy_forward[(rows,)](
                logits,
                logits,
                labels,
                losses,
                lse,
                logits.stride(0),
                columns,
                smoothing,
                padding_idx,
                SMOOTH=smoothing != 0.0,
                BLOCK=_block(columns),
                num_warps=WARPS,
            )
    return losses, lse


def backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    padding_idx: int,
    out: torch.Tensor,
) -> None:
    """Write the gradient with respect to ``logits`` into ``out``, which may be ``logits``.

    Args:
        grad: ``(rows,)``, of any stride, 0 included.
        logits: As in :func:`forward`.
        lse: From :func:`forward`.
        labels: As in :func:`forward`.
        smoothing: As in :func:`forward`.
        padding_idx: As in :func:`forward`.
        out: Like ``logits``.
    """
    rows, columns = logits.shape
    block = _block(columns)
    if rows:
        with torch.cuda.device(logits.device if logits.is_cuda else -1):
            cross_entropy_backward[(rows, triton.cdiv(columns, block))](
                grad,
                logits,
                lse,
                labels,
                out,
                grad.stride(0),
                logits.stride(0),
                out.stride(0),
                columns,
                smoothing,
                padding_idx,
                BLOCK=block,
                num_warps=WARPS,
            )


def _block(columns: int) -> int:
    return min(BLOCK, max(256, int(triton.next_power_of_2(columns))))


_ROW = "one number a row"


def cases() -> Iterator[Case]:
    """What is inspected."""
    narrow = {
        "same_logits_ptr": "the one logit of the label",
        "labels_ptr": "one label a row",
        "losses_ptr": _ROW,
        "lse_ptr": _ROW,
        "grad_ptr": _ROW,
    }
    for kind in ("fp32", "fp16", "bf16"):
        for smooth in (False, True):
            yield Case(
                cross_entropy_forward,
                "cross entropy forward",
                f"{kind} smoothed" if smooth else kind,
                signature={
                    "logits_ptr": f"*{kind}", "same_logits_ptr": f"*{kind}", "labels_ptr": "*i64",
                    "losses_ptr": "*fp32", "lse_ptr": "*fp32", "row_stride": "i32",
                    "columns": "i32", "smoothing": "fp32", "padding_idx": "i32",
                },
                constants={"SMOOTH": smooth, "BLOCK": BLOCK},
                reads=("logits_ptr",),
                writes=(),
                narrow={name: narrow[name] for name in narrow if name != "grad_ptr"},
                tile=BLOCK,
                divisible=("row_stride", "columns"),
                options={"num_warps": WARPS},
            )  # fmt: skip
        yield Case(
            cross_entropy_backward,
            "cross entropy backward",
            kind,
            signature={
                "grad_ptr": "*fp32", "logits_ptr": f"*{kind}", "lse_ptr": "*fp32",
                "labels_ptr": "*i64", "out_ptr": f"*{kind}", "grad_stride": "i32",
                "row_stride": "i32", "out_stride": "i32", "columns": "i32",
                "smoothing": "fp32", "padding_idx": "i32",
            },
            constants={"BLOCK": BLOCK},
            reads=("logits_ptr",),
            writes=("out_ptr",),
            narrow={name: narrow[name] for name in ("grad_ptr", "lse_ptr", "labels_ptr")},
            tile=BLOCK,
            divisible=("row_stride", "out_stride", "columns"),
            options={"num_warps": WARPS},
        )  # fmt: skip
