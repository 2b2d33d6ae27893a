"""`apex.amp.legacy.scaler` under the path that programs know."""

import sys

from apex.amp.legacy import scaler

sys.modules[__name__] = scaler
