"""`apex.amp.legacy.opt` under the path that programs know."""

import sys

from apex.amp.legacy import opt

sys.modules[__name__] = opt
