"""What is compiled when kernels are inspected: each kernel file lists its own cases.

A kernel file offers ``cases()``, an iterable of `Case`, which :mod:`.finding` calls.
For an optimizer's update that is one line, ``storage.optimizer_cases(update, states, scalars)``;
for another update over lists of tensors ``multi_tensor.case(update, columns, stores, scalars)``
for each combination of dtypes that matters; for any other kernel the `Case` itself, e.g. ::

    def cases():
        yield Case(
            kernel, "norm", "fp16",
            signature={"x_ptr": "*fp16", "y_ptr": "*fp16", "rstd_ptr": "*fp32", "columns": "i32"},
            constants={"BLOCK": 1024}, tile=1024, divisible=("columns",),
            reads=("x_ptr",), writes=("y_ptr",), narrow={"rstd_ptr": "one number a row"},
        )

Nothing here needs a GPU, or triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BITS = {
    "fp64": 64, "i64": 64, "u64": 64,
    "fp32": 32, "i32": 32, "u32": 32,
    "fp16": 16, "bf16": 16, "i16": 16, "u16": 16,
    "fp8e4nv": 8, "fp8e5": 8, "i8": 8, "u8": 8, "i1": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way in which a kernel is compiled, and what its machine code has to look like.

    Pointers go by the names of the kernel's parameters; the entries of a tuple are ``name.0``,
    ``name.1``, ..., and what lies behind a table of addresses is ``name.0[]``.

    Attributes:
        kernel: The jitted function.
        name: Of the operation.
        variant: What sets this case apart from the others of that name.
        signature: Triton types of the run-time parameters (``"*fp16"``, ``"i32"``, tuples of them).
        constants: Values of the compile-time parameters, and ``None`` for pointers that are absent.
        reads: Pointers through which tiles are read: with wide accesses only.
        writes: Pointers through which tiles are written: with wide accesses only.
        narrow: Pointers whose accesses may be narrow, each with the reason.
        tables: Tables of addresses: pointer -> type of what lies behind.
        tile: Elements of each of ``reads`` and ``writes`` that a program moves at a time.
        tail: Whether masked accesses belong to a tail and only unmasked ones need to be wide.
            Without it all must be.
        read: Part of what ``reads`` name that is read on the average: half of causal rows.
        computes: Why a kernel has more instructions than there is time for while memory moves its
            bytes; empty for one that has not.
        divisible: Integer parameters that are multiples of 16. Pointers are always taken to be.
        options: Of the compiler.
        amd: Options that are others on AMD, where a warp has 64 lanes and a program 16 warps.
    """

    kernel: Any
    name: str
    variant: str
    signature: Mapping[str, Any]
    constants: Mapping[str, Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    tile: int
    narrow: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    tail: bool = False
    read: float = 1.0
    computes: str = ""
    divisible: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=lambda: {"num_warps": 4})
    amd: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, path and type of each parameter of the machine code, in order."""
        for number, name in enumerate(self.kernel.arg_names):
            kind = self.signature[name] if name not in self.constants else ()
            if isinstance(kind, str):
                yield name, (number,), kind
            else:
                for entry, inner in enumerate(kind):
                    yield f"{name}.{entry}", (number, entry), inner

    def pointers(self) -> dict[str, int]:
        """Bits of an element behind each pointer."""
        found = {name: kind[1:] for name, _, kind in self.parameters() if kind.startswith("*")}
        found |= {f"{name}[]": kind for name, kind in self.tables.items()}
        return {name: BITS[kind] for name, kind in found.items()}
