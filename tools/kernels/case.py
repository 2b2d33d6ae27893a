"""What is compiled when kernels are inspected: a file of ``cases/`` for each kernel file.

It offers ``cases()``, an iterator of `CompiledCase`, which :mod:`.finding` calls. A case is made
from a launch, so that what is inspected is what runs: `launched` calls a launcher with tensors on
the ``meta`` device, and notes what would have been launched ::

    def cases() -> Iterator[CompiledCase]:
        x = meta("fp16", 4096, 1024)
        yield from launched(
            lambda: forward(x, 1e-5), "norm", "fp16",
            writes=("y_ptr",), narrow={"rstd_ptr": "one number a row"},
        )

For an optimizer's update it is one line, ``list_case.optimizer_cases(update, states, scalars)``;
for another update over lists of tensors ``list_case.case(update, columns, stores, scalars)`` for
each combination of dtypes that matters. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from apex.kernels import _settings

DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "u8": torch.uint8,
}  # fmt: skip
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
BITS = {
    "fp64": 64, "i64": 64, "u64": 64,
    "fp32": 32, "i32": 32, "u32": 32,
    "fp16": 16, "bf16": 16, "i16": 16, "u16": 16,
    "fp8e4nv": 8, "fp8e5": 8, "i8": 8, "u8": 8, "i1": 8,
}  # fmt: skip


@dataclass(frozen=True)
class CompiledCase:
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
        single: Of ``reads`` and ``writes`` those that are moved by an element at a time and never
            wider, as rows whose length is no multiple of 8 begin anywhere.
        read: Part of what ``reads`` name that is read on the average: half of causal rows.
        computes: Why a kernel has more instructions than there is time for while memory moves its
            bytes; empty for one that has not.
        repeated: Whether accesses of a tile stand in the code more than once: on two paths, or in
            front of a loop and in it.
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
    single: tuple[str, ...] = ()
    read: float = 1.0
    computes: str = ""
    repeated: bool = False
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


def meta(kind: str, *shape: int) -> torch.Tensor:
    """A tensor without memory; ``kind`` is Triton's name of the dtype."""
    return torch.empty(shape, dtype=DTYPES[kind], device="meta")


def launches(call: Callable[[], object]) -> list[tuple[Any, dict[str, Any]]]:
    """What ``call`` launches, which is not run: kernels and their arguments and options by name."""
    found = []

    def note(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **more: Any) -> None:
            found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | more))

        return run

    kind: Any = type(_nothing)  # a function to compile, or in the interpreter one to interpret
    original = kind.__getitem__
    kind.__getitem__ = note
    try:
        with _settings.use():  # the formulas: what was measured on this machine is not inspected
            call()
    finally:
        kind.__getitem__ = original
    return found


@triton.jit
def _nothing() -> None:
    pass


def launched(
    call: Callable[[], object],
    name: str,
    words: str,
    *,
    prefix: str = "",
    reads: Sequence[str] | None = None,
    writes: Sequence[str] = (),
    narrow: Mapping[str, str] | None = None,
    shared: Sequence[str] = (),
    aligned: bool = True,
    tile: int | None = None,
    **more: Any,
) -> Iterator[CompiledCase]:
    """Yield a case for each launch of ``call``.

    Args:
        call: Calls launchers with tensors of `meta`.
        name: Of the operation.
        words: The end of the variant, behind what of the kernel's name ``prefix`` leaves.
        prefix: What the kernels' names begin with; ``name`` if it is empty.
        reads: As in `CompiledCase`; by default all pointers neither in ``writes`` nor narrow.
        writes: As in `CompiledCase`; a kernel need not have all of them.
        narrow: As in `CompiledCase`.
        shared: Pointers to one row, narrow for a tile of several.
        aligned: Whether rows begin at multiples of 8 elements. Else all tiles are ``single``, no
            number of instructions is too large, and the variant is ``odd``.
        tile: By default ``ROWS * BLOCK``, of what the kernel has of them.
        more: Other fields of the cases.
    """
    for kernel, given in launches(call):
        signature: dict[str, Any] = {}
        constants, divisible = {}, []
        for key in kernel.arg_names:
            value = given.pop(key)
            if key.isupper() or value is None or (isinstance(value, int) and value == 1):
                constants[key] = value
            else:
                signature[key] = _kind(value)
                if isinstance(value, int) and value % 16 == 0:
                    divisible.append(key)
        pointers = [key for key, kind in signature.items() if "*" in kind[:1]]
        reasons = dict(narrow or {})
        if constants.get("ROWS", 1) > 1:
            reasons |= dict.fromkeys(shared, "one row for several of the tile")
        tiles = [key for key in pointers if key not in reasons]
        part = kernel.__name__.strip("_").removeprefix(prefix or name).replace("_", " ").strip()
        fields: dict[str, Any] = {
            "reads": tuple(key for key in tiles if key not in writes) if reads is None else reads,
            "writes": tuple(key for key in writes if reads is not None or key in tiles),
            "tile": tile or constants.get("ROWS", 1) * constants["BLOCK"],
            "narrow": reasons,
            "single": () if aligned else tuple(tiles),
            "computes": "" if aligned else "an access for each element",
            "divisible": tuple(divisible),
            "options": given,
            "amd": {"num_warps": min(16, given["num_warps"])},
        }
        variant = f"{part} {'' if aligned else 'odd '}{words}".strip()
        yield CompiledCase(kernel, name, variant, signature, constants, **{**fields, **more})


def _kind(value: Any) -> Any:
    """Triton's name of the type of an argument."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, torch.Tensor):
        return f"*{KINDS[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"
