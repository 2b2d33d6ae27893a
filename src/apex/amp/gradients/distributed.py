"""`apex.amp.gradients.forwards` under the path that models pickled in 2026 know."""

import sys

from apex.amp.gradients import forwards

sys.modules[__name__] = forwards
