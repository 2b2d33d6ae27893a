"""`apex.amp.casting.switches` under the path that models pickled in 2026 know."""

import sys

from apex.amp.casting import switches

sys.modules[__name__] = switches
