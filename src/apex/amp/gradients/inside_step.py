"""Code of the program inside of ``step()``: hooks, subclasses, wrappers, a ``step`` wrapped before.

It may read and write the model's weights and the groups, before the update and after it. When an
update ends cannot be told from outside: a hook of torch runs once or twice, a wrapper has none. So
each function of torch that such a step calls is looked at first, and what is given to it is brought
up to date: a weight is its rounded master, a master has what was written into its weight. The order
of calls says who wrote last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apex._compat import private
from apex.amp.gradients.parameters import Pairs, Row

_DATA: Any = torch.Tensor.data
# What gives the program memory that it may write to later, without a trace.
_HAND_OUT = {"data_ptr", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage"}
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def hook_tables(optimizers: Iterable[Any]) -> list[Any]:
    """Where torch keeps the hooks of these optimizers' steps, and those of all."""
    own = [vars(one)[name] for one in optimizers for name in _HOOKS if name in vars(one)]
    return [*own, private.global_optimizer_pre_hooks, private.global_optimizer_post_hooks]


def is_closed(wrappers: Sequence[Any], step: Any) -> bool:
    """Whether only code of torch and apex runs in a step, but for hooks.

    ``wrappers``: the optimizer, and those inside of it. ``step``: its own, before amp replaced it.
    """
    by_scheduler = getattr(step, "__globals__", None) is vars(torch.optim.lr_scheduler)
    wrapped = step.__wrapped__ if by_scheduler else step
    if getattr(wrapped, "__func__", wrapped) is not getattr(type(wrappers[0]), "step", None):
        return False  # wrapped by the program
    own = [type(one).__module__.startswith(("torch.optim.", "apex.")) for one in wrappers]
    return all(own) and not any(["step" in vars(one) for one in wrappers[1:]])


class InsideStep(TorchFunctionMode):
    """Watches the functions of torch that are called in a step."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self._is_paused = False
        self._pairs = pairs
        self._rows: dict[int, Row] = {}
        for row in pairs.rows:
            self._rows[id(row[0])] = self._rows[id(row[1])] = row
        # By id of a weight: which one of weight and master was used last and may have changed.
        self._used: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Bring weights and masters among the arguments up to date, and call ``func``."""
        name = getattr(func, "__name__", "")
        is_data = name == "__get__" and getattr(func, "__self__", None) is _DATA
        if not self._is_paused and (is_data or name not in ("__get__", "__set__")):
            given = list(_tensors((*args, *(kwargs or {}).values())))
            touched = [tensor for tensor in given if id(tensor) in self._rows]
            if touched:
                self._settle(touched)
                for one in touched:  # a master may be written without a trace by any function
                    weight = self._rows[id(one)][0]
                    if one is not weight or is_data or name in _HAND_OUT:
                        self._used[id(weight)] = one
        return func(*args, **(kwargs or {}))

    def _settle(self, touched: Sequence[torch.Tensor]) -> None:
        """Bring weights and masters that are about to be used up to date."""
        pairs = Pairs([(row[0], row[2]) for row in map(self._rows.__getitem__, map(id, touched))])
        written, rounded = [], []
        for one, row, changes in zip(touched, pairs.rows, pairs.changes(), strict=True):
            weight, tensor, master = row
            is_weight_written, is_written = changes
            used = self._used.get(id(weight))
            if one is tensor and (is_weight_written or used is weight):
                written.append((weight, master))
            elif one is weight and (is_written or used is tensor):
                rounded.append((weight, master))
        for weight, _ in (*written, *rounded):
            self._used.pop(id(weight), None)
        if rounded:
            Pairs(rounded).write()
        if written:
            Pairs(written).take()

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, which this watches."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return step(*args, **kwargs)

        return watched

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a closure of the program: watch nothing, after all was brought up to date."""
        self.finish()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def finish(self) -> None:
        """Bring all up to date."""
        written = [
            (weight, master)
            for (weight, _, master), changes in zip(
                self._pairs.rows, self._pairs.changes(), strict=True
            )
            if changes[0] or self._used.get(id(weight)) is weight
        ]
        self._used.clear()
        Pairs(written).take()
        self._pairs.without({id(weight) for weight, _ in written}).write()
        if self._pairs.exposed:
            self._pairs.expose()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
