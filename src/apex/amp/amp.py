"""`apex.amp.legacy.amp` under the path that programs know."""

import sys

from apex.amp.legacy import amp

sys.modules[__name__] = amp
