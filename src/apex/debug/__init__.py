"""Find the operation that made a training's first NaN, precision mistakes, and usable formats.

Three functions answer three questions about a training:

* :func:`watch`: which operation made the first inf or NaN, and why?
* :func:`check`: which lines of the program are precision mistakes?
* :func:`what_if`: in which number formats can each layer be trained?

To watch a training, put it into a block::

    from apex import debug

    with debug.watch(model, optimizer) as watch:
        ...  # the training, unchanged

If a step is not finite, apex skips its update and replays the step to find the cause.
"""

# Healthy steps only keep what a replay would need (by reference), and look at gradients once if the
# program does not. The parts of ``watch``:
#
# * ``entry`` checks the arguments; ``watch`` keeps the step, finds the fault, skips the update.
# * ``attaching`` keeps a watch out of what models and scalers save.
# * ``calls`` keeps a forward and runs it again. ``lines`` notes what is computed outside of the
#   model, ``tape`` runs it again, ``growth`` notes the size of weights (these for ``apex debug``).
# * ``undisturbed`` hides a replay from the program.
# * ``tracing`` looks at each operation of a replay, ``operations`` has the lists for that,
#   ``reasons`` reads from its arguments why it broke, and ``widening`` repeats a replay in float32.
# * ``explain`` chooses the replays and concludes the cause, ``update`` repeats an optimizer's
#   update, and ``ranks`` lets ranks explain together.
# * ``report`` is the result, ``reproduce`` the file with one operation that shows the fault.

from apex.debug import operations
from apex.debug.check.entry import check
from apex.debug.check.finding import Finding
from apex.debug.entry import watch
from apex.debug.report import CAUSES, Report
from apex.debug.reproduce import FileError
from apex.debug.watch import FaultWarning, NonFiniteError, Watch, watch_of
from apex.debug.what_if.result import WhatIf, what_if

__all__ = [
    "check",
    "watch",
    "watch_of",
    "what_if",
    "Finding",
    "Report",
    "Watch",
    "WhatIf",
    "CAUSES",
    "FaultWarning",
    "FileError",
    "NonFiniteError",
    "operations",
]
