"""Launches that pass over Triton's JIT once it has compiled a kernel.

A launch through the JIT takes the host 30 to 50 us: it binds arguments by name, asks each for what
Triton specialises on, makes a string of it, reads knobs and checks globals. A `Family` keeps what
the JIT compiled, and calls ``CompiledKernel.run`` with addresses. Its parameters are the same from
Triton 3.5.1 to 3.9.

A plan must never be taken for arguments that Triton would compile another kernel for. So

* a family is one kernel with one set of constants and options, and launchers make one (by
  `functools.cache`) for each set of dtypes, of tensors that are absent, and of numbers that are the
  same in all launches of the family;
* integers that vary are named in each launch: whether each is 1 or a multiple of 16 is in the key;
  Triton does not specialise on floats;
* to the JIT go: an address that is no multiple of 16, but for launches over lists, where a key says
  which are; a varying number of 2**31 or more (a kernel for 32 bits would cut it off and say
  nothing); tensors of several devices (of one on the CPU Triton says so, an address says nothing);
  launches with hooks; the interpreter; a build with instrumentation; AMD, where Triton also
  specialises on the size of a storage.

tests/kernels/test_plans.py compares with what the JIT takes. Knobs are read when a plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.runtime import driver

__all__ = ["Family"]

# Of a launch over lists.
Argument = torch.Tensor | tuple[torch.Tensor | float, ...] | None

_LIMIT = 2**31
_enter, _leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


class Family:
    """Launches of one kernel with one set of constants, dtypes and options.

    Args:
        kernel: A jitted function whose parameters are tensors, numbers and constants, in this
            order.
        constants: For the parameters that are ``tl.constexpr``.
        num_warps: Of a program.
        fuse: Whether a product and a sum may be rounded once.
    """

    __slots__ = ("constants", "kernel", "options", "plans")

    def __init__(
        self, kernel: Any, constants: Sequence[Any], num_warps: int = 4, fuse: bool = True
    ) -> None:
        self.kernel, self.constants = kernel, tuple(constants)
        # Fusion is always named: Triton 3.10 changes its default, and bits depend on it.
        self.options = {"num_warps": num_warps, "enable_fp_fusion": fuse}
        self.plans: dict[Any, tuple[Any, ...]] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float],
        *varying: int,
    ) -> None:
        """Launch.

        Args:
            grid: Numbers of programs.
            tensors: On the device that is current; the first is one.
            numbers: Python's own integers and floats.
            varying: The integers among the numbers that are not the same in all launches.
        """
        key: int | None = tensors[0].get_device()  # type: ignore[union-attr]
        device, bits = key, 0
        addresses: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                continue
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
            if tensor.get_device() != device:
                bits = 1
        for number in varying:
            if number >= _LIMIT:
                bits = 1
            key = 4 * key + (number % 16 == 0) + 2 * (number == 1)  # type: ignore[operator]
        if bits & 15:
            key = None
        plan = self.plans.get(key)
        if plan is None or _enter.calls or _leave.calls:
            self._by_the_jit(grid, (*tensors, *numbers), key)
            return
        run, stream_of, index, function, metadata, _ = plan
        run(
            *grid, stream_of(index), function, metadata, None, None, None, *addresses, *numbers,
            *self.constants,
        )  # fmt: skip

    def launch_lists(self, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        """Launch where arguments are tensors and tuples of tensors and floats.

        Its end is that of :meth:`launch`, since a function in common is a frame of each launch.

        Args:
            grid: Numbers of programs.
            arguments: All that come before the constants; the first is a tensor.
        """
        device: int = arguments[0].get_device()  # type: ignore[union-attr]
        key: Any = device
        bits = 0
        addresses: list[Any] = []
        for argument in arguments:
            nested = type(argument) is tuple
            members: Any = argument if nested else (argument,)
            found: list[Any] = []
            for one in members:
                if one is None or type(one) is float:
                    found.append(one)
                    continue
                address = one.data_ptr()
                found.append(address)
                bits |= address
                if one.get_device() != device:
                    key = None
            addresses.append(tuple(found) if nested else found[0])
        if bits & 15 and key is not None:  # bias corrections are parts of a vector
            key = device, _aligned(addresses)
        plan = self.plans.get(key)
        if plan is None or _enter.calls or _leave.calls:
            self._by_the_jit(grid, (*arguments,), key)
            return
        run, stream_of, index, function, metadata, _ = plan
        run(
            *grid, stream_of(index), function, metadata, None, None, None, *addresses,
            *self.constants,
        )  # fmt: skip

    def _by_the_jit(self, grid: tuple[int, ...], arguments: tuple[Any, ...], key: Any) -> None:
        kernel = self.kernel
        compiled = kernel[grid](*arguments, *self.constants, **self.options)
        if key is None or compiled is None:  # a hook of Triton's may decline to compile
            return
        if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
            return
        if torch.version.hip or getattr(knobs.compilation, "instrumentation_mode", ""):
            return
        active = driver.active
        # Triton unloads a module together with its kernel: the plan keeps both.
        self.plans[key] = (
            compiled.run, active.get_current_stream, active.get_current_device(),
            compiled.function, compiled.packed_metadata, compiled,
        )  # fmt: skip


def _aligned(addresses: Sequence[Any]) -> tuple[Any, ...]:
    """Of addresses, in tuples too, whether each is a multiple of 16."""
    return tuple(
        [
            _aligned(one) if type(one) is tuple else type(one) is not int or one % 16 == 0
            for one in addresses
        ]
    )
