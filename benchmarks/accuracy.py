"""How far layer norm is off on a CPU, in roundings: the rms error over that of one rounding.

The result by the mean of the rows, in their standard deviations, of 256 x 1024 numbers in float32
and bfloat16; then the gradient of the weight by the number of rows, of 64 columns. Ours and
torch's; the definition in float64 is what both are compared with.

    python -m benchmarks.accuracy
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from apex.catalogue.tolerance import roundings
from apex.normalization import fused_layer_norm as norms
from tools import quiet_without_reader

MEANS = (0, 1, 3, 10, 30, 100, 1000)
ROWS = (500, 2000, 2048, 4000)
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Apex's function."""
    return norms.fused_layer_norm_affine(x, weight, bias, x.shape[-1:], eps=1e-5)


def torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """PyTorch's function."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def made(shape: tuple[int, int], mean: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows, weight and bias."""
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64) + mean).to(dtype)
    return [x, torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)]


def of_the_result(norm: Norm, mean: float, dtype: torch.dtype) -> float:
    """Roundings of 256 x 1024 results."""
    given = made((256, 1024), mean, dtype)
    return roundings(norm(*given), torchs(*[x.double() for x in given]))


def of_the_gradient(norm: Norm, rows: int, dtype: torch.dtype) -> float:
    """Roundings of the gradient of the weight."""

    def gradient(of: Norm, given: list[torch.Tensor]) -> torch.Tensor:
        leaves = [x.requires_grad_() for x in given]
        y = of(*leaves)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return torch.autograd.grad(y, leaves[1], grad.to(y.dtype))[0]

    given = made((rows, 64), 0, dtype)
    exact = gradient(torchs, [x.double() for x in given])
    return roundings(gradient(norm, given), exact)


def main() -> None:
    """Print a row for each mean, and for each number of rows."""
    torch.set_num_threads(1)
    print(f"{'roundings of':32}{'ours':>8}{'torch':>8}")
    for dtype, short in SHORT.items():
        for mean in MEANS:
            found = [of_the_result(norm, mean, dtype) for norm in (ours, torchs)]
            print(f"{f'result, {short}, mean {mean}':32}{found[0]:8.2f}{found[1]:8.2f}")
    for dtype, short in SHORT.items():
        for rows in ROWS:
            found = [of_the_gradient(norm, rows, dtype) for norm in (ours, torchs)]
            print(f"{f'weight gradient, {short}, {rows} rows':32}{found[0]:8.2f}{found[1]:8.2f}")


if __name__ == "__main__":
    with quiet_without_reader():
        main()
