"""`apex.amp.legacy.handle` under the path that programs know."""

import sys

from apex.amp.legacy import handle

sys.modules[__name__] = handle
