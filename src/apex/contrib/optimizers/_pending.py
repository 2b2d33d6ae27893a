"""Parameters whose new values are on their way: whoever reads one waits for them.

While a bucket is gathered its parameters have a subclass of their class. Its ``__torch_function__``
is called by whatever takes a parameter as an argument: operators, methods, ``torch._foreach_*``,
collectives, copies. It waits for the bucket, gives parameters their class back, and calls again.
Only ``grad`` and ``requires_grad`` are read without waiting: each step reads these of all.

What does not call it has to be waited for in another way; :mod:`._sharded_parameters` says how.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from apex._compat import private
from apex.ops.lists.shards import ShardBucket

_GRAD: Any = torch.Tensor.grad  # a property
_FLAG: Any = torch.Tensor.requires_grad
_UNREAD = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__, _FLAG.__get__)


class PendingParameter:
    """Mixed into the class of a parameter while its new value is on its way."""

    _gather: ClassVar[Gather]
    _plain: ClassVar[type]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._plain(*args, **kwargs)  # copies are others

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _UNREAD:
            with private.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, PendingParameter):
                kind._gather.finish()
        return func(*args, **(kwargs or {}))


class Gather:
    """The new values of a bucket's parameters, from when they are sent for until they are there.

    Args:
        bucket: The parameters.
        user: Who gathers, for messages.
        lock: Against two threads that read.
        pending: The gathers of the optimizer that have not finished; this one adds itself.
    """

    def __init__(self, bucket: ShardBucket, user: str, lock: Any, pending: list[Gather]) -> None:
        self.bucket, self._user, self._lock, self._pending = bucket, user, lock, pending
        self._sent: tuple[Any, torch.Tensor] | None = None
        self._kinds = {kind: self._made(kind) for kind in (torch.Tensor, torch.nn.Parameter)}

    def _made(self, plain: type) -> type:
        return type(plain.__name__, (PendingParameter, plain), {"_gather": self, "_plain": plain})

    def begin(self, group: Any) -> None:
        """Send for the values of the last step."""
        self._sent = self.bucket.gather(group)
        self._pending.append(self)

    def watch(self) -> None:
        """Let readers of the parameters wait, or wait now if one has a class of its own."""
        params = self.bucket.params
        if not self._kinds.keys() >= {*map(type, params)}:
            return self.finish()
        for param in params:
            param.__class__ = self._kinds[type(param)]
        return None

    def finish(self) -> None:
        """Wait for the values and write the parameters; nothing if that was done.

        Raises:
            RuntimeError: A collective failed, or a parameter was written; then it stays pending.
        """
        with self._lock:
            if self._sent is None:
                return
            with _undisturbed():
                self.bucket.close(*self._sent, self._user)
            self._sent = None
            self._pending.remove(self)
            for param in self.bucket.params:
                if isinstance(param, PendingParameter):
                    param.__class__ = param._plain

    @contextlib.contextmanager
    def unwatched(self, param: torch.Tensor) -> Iterator[None]:
        """Let a parameter be read as it is, old or new, inside a ``with`` block."""
        watched, param.__class__ = type(param), type(param)._plain  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if self._sent is not None:
                param.__class__ = watched


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Outside of what surrounds a reader: modes of torch, functorch's transforms, a trace."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(private.DisableTorchFunction())
        if private.len_torch_dispatch_stack():
            stack.enter_context(private.disable_current_modes())
        if private.maybe_current_level() is not None:
            stack.enter_context(private.temporarily_clear_interpreter_stack())
        if (trace := private.get_tracing_state()) is not None:
            private.set_tracing_state(None)
            stack.callback(private.set_tracing_state, trace)
        yield
