"""The loops of clients under ``apex check``: as they should be, and with a mistake."""

from tests.debug.check.conftest import check
from tests.debug.check.planted import Planted

__all__ = ["TRUE", "Planted", "changed", "check"]

# In a plain run: the norm that is clipped, and that of the gradients.
TRUE = "#T true.extend([norm(net.parameters()), norm(net.parameters()) / 1024])"


def changed(loop, kind, measured, at, *pairs):
    """A healthy loop with a mistake.

    Args:
        loop: The text of a script without it.
        kind: What is to be found.
        measured: A part of what is to be measured.
        at: The line that is to be named.
        pairs: What is replaced, and by what.
    """
    for old, new in pairs:
        assert old in loop
        loop = loop.replace(old, new)
    assert loop.count(at) == 1
    return Planted(kind, loop.replace(at, f"{at} #!"), {}, measured)
