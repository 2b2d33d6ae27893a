"""Compile kernels for GPUs that are not here, with the compilers and tools that Triton brings."""

from __future__ import annotations

import functools
import re
import subprocess
from typing import Any

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tools.kernels.case import CompiledCase

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")  # kernels are made for these
AMD = ("gfx90a", "gfx942", "gfx950")  # that triton compiles for and that have 64 lanes in a wave


class UnavailableError(RuntimeError):
    """This machine cannot compile for that target; the message says what is missing."""


def compiled(case: CompiledCase, target: str) -> Any:
    """Compile a case for a target.

    Args:
        case: What to compile.
        target: ``sm_80`` and the like, or ``gfx942`` and the like.

    Returns:
        What Triton made: ``asm`` and ``metadata``.

    Raises:
        UnavailableError: The compiler for that target is not here.
    """
    if not isinstance(case.kernel, triton.JITFunction):
        raise UnavailableError(
            "kernels were imported with TRITON_INTERPRET set, which leaves nothing to compile: "
            "unset it and start again"
        )
    constants = {(case.kernel.arg_names.index(k),): v for k, v in case.constants.items()}
    signature = {
        name: "constexpr" if name in case.constants else case.signature[name]
        for name in case.kernel.arg_names
    }
    attributes = {
        path: [["tt.divisibility", 16]]
        for name, path, kind in case.parameters()
        if kind.startswith("*") or name in case.divisible
    }
    source = ASTSource(case.kernel, signature, constants, attributes)
    here = gpu(target)
    options = {**case.options, **(case.amd if here.backend == "hip" else {})}
    return triton.compile(source, target=here, options=options)


@functools.cache
def gpu(target: str) -> Any:
    """Find the compiler for a target.

    Raises:
        UnavailableError: There is none here, or it does not know the target; nothing is printed,
            whereas a failing compiler prints the whole program.
    """
    cuda = re.fullmatch(r"sm_(\d+)", target)
    backend = "nvidia" if cuda else "amd"
    if not cuda and not re.fullmatch(r"gfx[0-9a-f]+", target):
        raise UnavailableError(f"{target}: unknown target; use {', '.join(TARGETS)} or the like")
    if backend not in backends:
        raise UnavailableError(
            f"this triton ({triton.__version__}) has no {backend} compiler for {target}: "
            "pip install triton"
        )
    if cuda is None:
        if target not in AMD:
            raise UnavailableError(f"{target}: unknown target; of AMD there are {', '.join(AMD)}")
        return GPUTarget("hip", target, 64)
    if f"'{target}'" not in run(assembler(int(cuda[1])), "--help"):
        raise UnavailableError(f"{target}: this triton ({triton.__version__}) does not know it")
    tool("cuobjdump")
    return GPUTarget("cuda", int(cuda[1]), 32)


def assembler(architecture: int) -> str:
    """Name of the program with which this Triton assembles for ``sm_<architecture>``.

    3.5 has one program for all; of two, 3.9 takes the other one from sm_90 on, and 3.6 to 3.8 from
    sm_100 on.
    """
    known = triton.knobs.nvidia
    if not hasattr(known, "ptxas_blackwell"):
        return "ptxas"
    from triton.backends.nvidia.compiler import get_ptxas

    chosen = get_ptxas(architecture).path
    return "ptxas-blackwell" if chosen == known.ptxas_blackwell.path else "ptxas"


def tool(name: str) -> str:
    """Path of one of the programs that come with triton."""
    try:
        return str(getattr(triton.knobs.nvidia, name.replace("-", "_")).path)
    except RuntimeError as error:
        raise UnavailableError(
            f"this triton ({triton.__version__}) comes without {name}: pip install triton"
        ) from error


def run(name: str, *words: str) -> str:
    """What one of these programs prints."""
    done = subprocess.run([tool(name), *words], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
