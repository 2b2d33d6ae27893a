"""Which operation made the first NaN of a training, why, and a file that shows it again.

    from apex import debug

    with debug.watch(model, optimizer) as watch:
        ...                           # the training as it is

Healthy steps only keep what a replay would need (by reference) and look at gradients once, where
the program does not. When a step is not finite, its update is skipped and the step is replayed:

* ``entry`` checks the arguments, ``watch`` keeps the step, finds the fault, skips the update;
* ``attaching`` says where a watch sits in models and scalers, so that it is not saved with them;
* ``calls`` is what is kept of a forward, and how it runs again;
* ``lines`` notes what is computed outside of the model and ``tape`` runs it again, ``growth`` notes
  the size of weights (these for ``apex debug``), ``undisturbed`` hides a replay from the program;
* ``tracing`` looks at each operation of a replay, ``operations`` has the lists for that,
  ``reasons`` reads from its arguments why it broke, and ``widening`` repeats a replay in float32;
* ``explain`` chooses the replays and concludes the cause, ``update`` repeats an optimizer's update,
  ``ranks`` lets ranks explain together;
* ``report`` is what comes out, ``reproduce`` the file with one operation that shows the fault.

``check`` is another question: which lines of a training are mistakes of precision. ``what_if`` is a
third one: which number formats a model can be trained in.
"""

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
