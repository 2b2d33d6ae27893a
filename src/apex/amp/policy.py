"""`apex.amp.levels` under the path that options pickled in 2026 know."""

import sys

from apex.amp import levels

sys.modules[__name__] = levels
