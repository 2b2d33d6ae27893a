"""`apex.ops.losses.linear_cross_entropy` under the path that programs know."""

import sys

from apex.ops.losses import linear_cross_entropy

sys.modules[__name__] = linear_cross_entropy
