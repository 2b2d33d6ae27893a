"""Tests of the command line."""

import signal

# A Ctrl-C that hits code in a string (a dataclass that is made, say): CPython forgets that it was
# caught, and ends `python -m` with the signal itself. A shell shows 130 for both.
ENDED_BY_CTRL_C = {130, -signal.SIGINT}
