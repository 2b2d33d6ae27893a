"""`apex.amp.casting.kept_modules` under the path that models pickled in 2026 know."""

import sys

from apex.amp.casting import kept_modules

sys.modules[__name__] = kept_modules
