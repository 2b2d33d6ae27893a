"""The cast log of ``verbosity=2`` and ``init(verbose=True)``: a line for each tensor that is cast.

The casts happen in torch's dispatcher, where Python sees nothing. So a ``TorchFunctionMode``
watches the calls (a few microseconds each) and says which casts the lists call for:
``Float->Half (conv2d)``. A weight cast that is cached is logged once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apex._compat import private
from apex.amp import _speech
from apex.amp.casting.dispatcher import tensors_in
from apex.amp.lists import LISTS, listed

_WORDS = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}


def _watched() -> dict[Any, tuple[str, str]]:
    """Map each listed function object to its name and the list it is on."""
    watched: dict[Any, tuple[str, str]] = {}
    for module in LISTS:
        for name, kind in listed(module).items():
            function = getattr(module.MODULE, name, None)
            if function is not None:
                watched[function] = (name, kind)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        watched[getattr(torch, name)] = (name, "half")
        watched[getattr(torch, f"{name}_cell")] = (f"{name}_cell", "half")
    return watched


class CastLog(TorchFunctionMode):
    """Watches the thread's calls and logs the casts they bring about."""

    def __init__(self) -> None:
        private.need("amp.init(verbose=True)")
        super().__init__()
        self._watched = _watched()
        self._cached: set[int] = set()
        self._running = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        entry = self._watched.get(func)
        if entry is not None:
            self._watch(*entry, [*args, *kwargs.values()], result)
        return result

    def start(self) -> None:
        """Begin to watch this thread."""
        self._running = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop watching, wherever in the thread's stack of modes this one is."""
        if not self._running:
            return
        self._running = False
        above = []
        while (mode := private.pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            private.push_mode(mode)

    def forget(self) -> None:
        """Note that cached weight casts are gone."""
        self._cached.clear()

    def note(self, name: str, tensors: Iterable[torch.Tensor], target: torch.dtype) -> None:
        """Log the casts of a call."""
        for tensor in tensors:
            if tensor.dtype != target:
                _speech.say(f"{_WORDS[tensor.dtype]}->{_WORDS[target]} ({name})")

    def _watch(self, name: str, kind: str, values: list[Any], result: Any) -> None:
        tensors = [x for x in tensors_in(values) if torch.is_autocast_enabled(x.device.type)]
        if not tensors:
            return
        half = torch.get_autocast_dtype(tensors[0].device.type)
        if isinstance(result, torch.Tensor) and (result.dtype == half) != (kind == "half"):
            return  # on Apex's list, and not cast: with bfloat16 what torch.autocast leaves alone
        if kind == "half":
            target = half
            tensors = [tensor for tensor in tensors if self._is_first_use(tensor, half)]
        elif kind == "float" or any(tensor.dtype == torch.float32 for tensor in tensors):
            target = torch.float32
        else:
            return
        self.note(name, tensors, target)

    def _is_first_use(self, tensor: torch.Tensor, target: torch.dtype) -> bool:
        cacheable = tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()
        if not cacheable or tensor.dtype == target:
            return True
        if id(tensor) in self._cached:
            return False
        self._cached.add(id(tensor))
        return True
