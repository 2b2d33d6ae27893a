"""`apex.amp.legacy.initialize` under the path that programs know."""

import sys

from apex.amp.legacy import initialize

sys.modules[__name__] = initialize
