"""A block after which amp is what it was, for who looks at a copy of a model at a level.

`apex.debug.what_if` initialises copies of a model that is to stay plain torch. What ``initialize``
changes apart from them is this thread's autocast state, what ``_amp_state`` shows, and functions
and kernels of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apex.amp.casting import cpu_float16, dispatcher, rules, switches
from apex.amp.newest import newest


@contextmanager
def preserved() -> Iterator[None]:
    """Give back at the end what ``initialize`` changes apart from models and optimizers.

    Inside, no casts are on before the first ``initialize``. Kernels and wrapped functions stay if
    there were any before, because another training may use them.
    """
    thread, shown = {**vars(switches.thread)}, {**vars(newest)}
    had_kernels, had_wrappers = dispatcher.installed(), rules.wraps()
    vars(switches.thread).clear()
    switches.thread.__init__()  # type: ignore[misc]  # as in a new thread
    try:
        with cpu_float16.left_out():  # its kernels would stay
            yield
    finally:
        switches.disable_for_thread()
        vars(switches.thread).clear()
        vars(switches.thread).update(thread)
        vars(newest).clear()
        vars(newest).update(shown)
        if not had_kernels:
            dispatcher.uninstall()
        if not had_wrappers:
            rules.restore()
