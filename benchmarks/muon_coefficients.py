"""How near to orthogonal Muon's iterations bring a matrix, by coefficients; on a CPU.

Of 256 x 512 matrices: random ones, as gradients of noise are, and ones whose singular values are
spread evenly over their logarithms, down to 1 / condition of the largest. Printed is the relative
distance from the orthogonal factor, ``|X - U V^T| / |U V^T|``, which counts all singular values,
and the largest one.

    python -m benchmarks.muon_coefficients
"""

import torch

from apex.ops.updates.newton_schulz import NAMED, Iteration, newton_schulz
from tools import quiet_without_reader

ROWS, COLUMNS, STEPS = 256, 512, 5


def matrix(condition: float | None) -> torch.Tensor:
    """A random matrix; of a condition if that is given."""
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    if condition is None:
        return x
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), ROWS, dtype=torch.float64)
    return left * values @ right


def main() -> None:
    """Print a row for each kind of matrix and dtype."""
    torch.manual_seed(0)
    print(f"after {STEPS} iterations: distance from U V^T, largest singular value")
    for name, condition in (("random", None), *((f"1e{n}", 10.0**n) for n in (1, 2, 3, 5))):
        x = matrix(condition)
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        exact = left @ right
        for dtype in (torch.float32, torch.bfloat16):
            row = f"{name:8} {str(dtype).removeprefix('torch.'):9}"
            for which, coefficients in NAMED.items():
                numbers = Iteration(coefficients, 1e-7, STEPS)
                done = newton_schulz(x.to(dtype), numbers).double()
                apart = float((done - exact).norm() / exact.norm())
                row += f"  {which} {apart:.3f}, {float(torch.linalg.matrix_norm(done, 2)):.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
