"""Read machine code: registers, spills, and through which pointer each access goes, how wide.

The main path and the masked tail are told apart by the predicate: a masked access has one in the
PTX (``@%p4 ld.global.b32``), an access without a mask has none. Through which pointer an access
goes is found by following its address register back to the kernel's parameters, through a table of
addresses where there is one. PTX is where widths are decided: ptxas neither splits nor joins
accesses, and its own disassembler takes longer than the compiler. Accesses by tensor descriptors
are not looked at.

In AMD's assembler masks are branches and registers are reused, so accesses have no pointers and no
paths.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.kernels.case import CompiledCase
from tools.kernels.compiler import assembler, gpu, run
from tools.kernels.compiler import compiled as _compiled


@dataclass(frozen=True)
class Access:
    """One instruction that reads or writes global memory.

    Attributes:
        store: Whether it writes.
        bits: Its width for one thread.
        masked: Whether a predicate guards it; ``None`` where that cannot be told.
        pointer: Through which pointer it goes; empty where that cannot be told.
    """

    store: bool
    bits: int
    masked: bool | None
    pointer: str


@dataclass(frozen=True)
class MachineCode:
    """What the compiler made of a case.

    Attributes:
        registers: Of a thread.
        spilled: Bytes of a thread's registers that are written to local memory and read back.
        shared: Bytes of shared memory of a block.
        threads: Of a block.
        accesses: All accesses to global memory.
        attributed: Whether it is known through which pointers and on which path they go.
        binary: NVIDIA's, an ELF file.
    """

    registers: int
    spilled: int
    shared: int
    threads: int
    accesses: tuple[Access, ...]
    attributed: bool
    binary: bytes = b""


def compiled(case: CompiledCase, target: str) -> MachineCode:
    """Compile a case for a target and read the result; raises as :mod:`.compiler` does."""
    made = _compiled(case, target)
    here = gpu(target)
    threads = made.metadata.num_warps * here.warp_size
    return (_from_ptx if here.backend == "cuda" else _from_amdgcn)(case, made, threads)


# -- NVIDIA --------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"(?P<predicate>@!?%\w+\s+)?(?P<name>[a-z][\w.:]*)\s+(?P<operands>.*);")
_GLOBAL = re.compile(r"(ld|st|atom|red)\.[\w.:]*global[\w.:]*?(?:\.v(\d))?\.[a-z]+(\d+)(?:x(\d))?")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global")
_REGISTER = re.compile(r"%\w+")
_ADDRESS = re.compile(r"\[\s*([%\w]+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def _from_ptx(case: CompiledCase, made: Any, threads: int) -> MachineCode:
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        with open(cubin, "wb") as file:
            file.write(made.asm["cubin"])
        usage = _USAGE.search(run("cuobjdump", "--dump-resource-usage", cubin))
        assert usage is not None
        registers, stack, _, local = map(int, usage.groups())
        spilled = _spilled(case, made.asm["ptx"], folder) if stack + local else 0
    accesses = tuple(_accesses(case, made.asm["ptx"]))
    shared = made.metadata.shared
    return MachineCode(registers, spilled, shared, threads, accesses, True, made.asm["cubin"])


def _spilled(case: CompiledCase, ptx: str, folder: str) -> int:
    """Ask ptxas what a stack frame is for.

    It has one too where the subroutine of a correctly rounded division saves registers; that runs
    for operands next to the ends of the range only, and ptxas does not count it as spilling.
    """
    source, output = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "again.cubin")
    with open(source, "w", encoding="utf-8") as file:
        file.write(ptx)
    arch = re.findall(r"\.target (\w+)", ptx)[0]
    tool = assembler(int(re.findall(r"\d+", arch)[0]))
    fused = [] if case.options.get("enable_fp_fusion", True) else ["--fmad=false"]
    said = run(tool, "-v", *fused, f"--gpu-name={arch}", source, "-o", output)
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", said)]
    arrays = [int(number) for number in re.findall(r"\.local .*\[(\d+)\];", ptx)]
    return sum(spilled) + sum(arrays)


def _accesses(case: CompiledCase, ptx: str) -> Iterator[Access]:
    flow = _Flow(case)
    found = []
    for line in ptx.splitlines():
        instruction = _INSTRUCTION.match(line.partition("//")[0].strip())
        if instruction is None:
            continue
        name, operands = instruction["name"], instruction["operands"]
        flow.add(name, operands)
        bits = _bits(name, operands)
        if bits is not None:
            masked = instruction["predicate"] is not None
            address = _ADDRESS.findall(operands)[-1 if _COPY.match(name) else 0]
            found.append((name.startswith(("st", "red")), bits, masked, address))
    for store, bits, masked, address in found:
        yield Access(store, bits, masked, flow.pointer(address))


def _bits(name: str, operands: str) -> int | None:
    """Width of an access to global memory; ``None`` for another instruction."""
    if _COPY.match(name):
        return 8 * int(operands.split(",")[2], 0)
    access = _GLOBAL.fullmatch(name)
    return None if access is None else int(access[2] or 1) * int(access[3]) * int(access[4] or 1)


class _Flow:
    """From which registers each register of a PTX program was computed."""

    def __init__(self, case: CompiledCase) -> None:
        self._case = case
        self._parameters = list(case.parameters())
        self._sources: dict[str, set[str]] = {}

    def add(self, name: str, operands: str) -> None:
        """Take up one instruction."""
        if name.startswith(("st.", "red.", "bra", "bar")):
            return
        if operands.startswith("{"):
            made, _, used = operands.partition("}")
        else:
            made, _, used = operands.partition(",")
        if name.startswith("ld.param"):
            sources = {f"parameter {number}" for number in re.findall(r"_param_(\d+)", used)}
        elif ".global" in name:
            sources = {f"behind {_ADDRESS.findall(used)[0]}"}
        else:
            sources = set(_REGISTER.findall(used))
        for register in _REGISTER.findall(made):
            self._sources.setdefault(register, set()).update(sources - {register})

    def pointer(self, address: str) -> str:
        """Name the pointer that an address was computed from."""
        direct, behind = self._roots(address)
        if not direct:
            direct = {f"{name}[]" for register in behind for name in self._tables_at(register)}
        return " or ".join(sorted(direct)) or "unknown"

    def _tables_at(self, register: str) -> Iterable[str]:
        return self._roots(register)[0] & set(self._case.tables)

    def _roots(self, address: str) -> tuple[set[str], set[str]]:
        """Pointers among the parameters, and registers behind which a value was read."""
        direct: set[str] = set()
        behind: set[str] = set()
        seen: set[str] = set()
        left = [address]
        while left:
            here = left.pop()
            if here in seen:
                continue
            seen.add(here)
            word, _, rest = here.partition(" ")
            if word == "parameter":
                direct |= self._name(int(rest))
            elif word == "behind":
                behind.add(rest)
            else:
                left += self._sources.get(here, ())
        return direct, behind

    def _name(self, number: int) -> set[str]:
        """Name of a parameter if it is a pointer; the compiler adds two of its own at the end."""
        if number >= len(self._parameters):
            return set()
        name, _, kind = self._parameters[number]
        return {name} if kind.startswith("*") else set()


# -- AMD -----------------------------------------------------------------------------------------

# dwordx4, ushort, short_d16; from gfx11 on b128, u16, d16_b16
_VECTOR = re.compile(
    r"^\s+(?:global|buffer|flat)_(load|store)_(?:d16_(?:hi_)?)?[usib]?(dword|short|byte|\d+)"
    r"(?:x(\d))?",
    re.MULTILINE,
)
_WORDS = {"dword": 32, "short": 16, "byte": 8}


def _from_amdgcn(case: CompiledCase, made: Any, threads: int) -> MachineCode:
    text = made.asm["amdgcn"]
    accesses = tuple(
        Access(kind == "store", (_WORDS.get(word) or int(word)) * int(count or 1), None, "")
        for kind, word, count in _VECTOR.findall(text)
    )
    number = {
        key: int(value) for key, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)
    }
    # Spilled registers live in scratch memory, or in spare registers of the matrix units.
    spilled = max(number["private_segment_fixed_size"], 4 * number["vgpr_spill_count"])
    return MachineCode(
        number["vgpr_count"], spilled, made.metadata.shared, threads, accesses, False
    )
