"""Products, bytes and errors of two algorithms that no GPU has timed, without a GPU.

Linear cross-entropy by default and with ``acc_policy="compact"``, and Newton-Schulz in its standard
and its Gram form. Products and bytes are counted where functions are dispatched, on meta tensors:
so they are those of a GPU, but for sums of 16-bit products in float32: with CUDA and torch 2.10 or
newer one of 4,096 columns each here is one for all. Errors are to float64, on a CPU.

    python -m benchmarks.products [--json benchmarks/results/products.json]
"""

import argparse
import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from apex.contrib.xentropy import linear_cross_entropy
from apex.ops.losses import linear_cross_entropy as losses
from apex.ops.updates.newton_schulz import Iteration, newton_schulz
from tests.counted import Counted
from tools import quiet_without_reader

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
JORDAN = (3.4445, -4.7750, 2.0315)
FORMS = {
    "standard": Iteration((JORDAN,), 1e-7, 5),
    "Gram": Iteration((JORDAN,), 1e-7, 5, gram=True),
}
Row = dict[str, Any]


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The rms error, as a part of the rms of what is exact."""
    return float(((found.double() - exact).square().mean() / exact.square().mean()).sqrt())


def memory_of_loss(rows: int, features: int, classes: int) -> list[Row]:
    """Products and peak bytes of forward and backward, in bfloat16."""
    made = partial(torch.empty, dtype=BF16, device="meta")
    found = []
    for way, acc_dtype in (("balanced", None), ("compact", BF16), ("compact, float32 sum", F32)):
        x, weight = made(rows, features), made(classes, features)
        targets = torch.empty(rows, dtype=torch.long, device="meta")
        given = (x, weight, None, targets, 0.0, -100, "mean", 0, [True, True, False], acc_dtype)
        names = "x weight bias targets smoothing ignore_index reduction chunk_size wanted acc_dtype"
        implementation = losses.OP.pieces if acc_dtype is None else losses.COMPACT
        with Counted() as counted:
            _, lse, dx, dweight, dbias = implementation.forward(*given)
            rest = dict(zip(names.split(), given, strict=True))
            gradients = implementation.backward(
                torch.empty((), dtype=F32, device="meta"), [True, True, False],
                lse=lse, dx=dx, dweight=dweight, dbias=dbias, **rest,
            )  # fmt: skip
        returned = sum(t.nbytes for t in gradients if t is not None)
        found.append(
            {
                "what": f"linear cross-entropy, {rows} x {features} x {classes}, bfloat16",
                "way": way,
                "products": len(counted.products),
                "multiplications": counted.multiplications,
                "bytes_beyond_gradients": counted.peak - returned,
                "of_the_logits": round((counted.peak - returned) / (rows * classes * 2), 3),
            }
        )
    return found


def errors_of_loss(rows: int, features: int, classes: int) -> list[Row]:
    """Relative rms errors of loss and gradients."""
    torch.manual_seed(0)
    x = torch.randn(rows, features, dtype=F32, device="cpu").to(BF16).requires_grad_()
    weight = torch.randn(classes, features, dtype=F32, device="cpu") / features**0.5
    weight = weight.to(BF16).requires_grad_()
    targets = torch.randint(classes, (rows,), device="cpu")
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*wide), targets), wide)
    found = []
    for way, options in (
        ("torch, all logits", None),
        ("balanced", {}),
        ("compact", {"acc_policy": "compact"}),
        ("compact, float32 sum", {"acc_policy": "compact", "acc_dtype": F32}),
    ):
        if options is None:
            loss = F.cross_entropy(F.linear(x, weight).float(), targets)
        else:
            loss = linear_cross_entropy(x, weight, targets, **options)
        gradients = torch.autograd.grad(loss, (x, weight))
        errors = [off(*pair) for pair in zip(gradients, exact, strict=True)]
        found.append(
            {
                "what": f"linear cross-entropy, {rows} x {features} x {classes}, bfloat16",
                "way": way,
                "error_of_dx": float(f"{errors[0]:.3g}"),
                "error_of_dweight": float(f"{errors[1]:.3g}"),
            }
        )
    return found


def products_of_muon(shape: tuple[int, int, int]) -> list[Row]:
    """Of five iterations."""
    found = []
    for form, numbers in FORMS.items():
        with Counted() as counted:
            newton_schulz(torch.empty(shape, dtype=BF16, device="meta"), numbers)
        found.append(
            {
                "what": f"Newton-Schulz, {shape[0]} of {shape[1]} x {shape[2]}",
                "way": form,
                "products": len(counted.products),
                "multiplications": counted.multiplications,
            }
        )
    return found


def errors_of_muon(rows: int, columns: int, dtype: torch.dtype) -> list[Row]:
    """How far singular values are from 1, and matrices from those of float64."""
    found = []
    for condition in (1.0, 10.0, 1e2, 1e3, 1e4, 1e6):
        generator = torch.Generator(device="cpu").manual_seed(0)
        draw = partial(torch.randn, generator=generator, dtype=F64, device="cpu")
        left, right = (torch.linalg.qr(draw(4, size, rows))[0] for size in (rows, columns))
        exponents = torch.linspace(0, 1, rows, dtype=F64, device="cpu")
        matrices = (left * condition**-exponents) @ right.mT
        exact = newton_schulz(matrices, FORMS["standard"])
        for form, numbers in FORMS.items():
            made = newton_schulz(matrices.to(dtype), numbers)
            squares = torch.linalg.svdvals(made.double()) ** 2
            found.append(
                {
                    "what": f"Newton-Schulz, {rows} x {columns}, {str(dtype)[6:]}",
                    "condition": condition,
                    "way": form,
                    "from_orthogonal": round(float((squares - 1).square().mean().sqrt()), 4),
                    "error": float(f"{off(made, exact):.3g}"),
                }
            )
    return found


def main() -> None:
    """Print the rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [*memory_of_loss(4096, 4096, 128256), *errors_of_loss(2048, 64, 4001)]
    for shape in ((24, 768, 768), (12, 3072, 768), (12, 768, 3072)):
        rows += products_of_muon(shape)
    for dtype in (BF16, torch.float16, F32):
        rows += errors_of_muon(64, 256, dtype)
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    if args.json:
        environment = {"torch": torch.__version__, "date": str(datetime.date.today())}
        how = "Products and bytes: counted on meta tensors. Errors: relative, rms, to float64."
        content = {"environment": environment, "how": how, "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    with quiet_without_reader():
        main()
