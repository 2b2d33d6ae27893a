"""`apex.ops.layers.swiglu` under the path that programs know."""

import sys

from apex.ops.layers import swiglu

sys.modules[__name__] = swiglu
