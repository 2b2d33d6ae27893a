"""`apex.ops.lists.pointer_tables` under the path that programs know."""

import sys

from apex.ops.lists import pointer_tables

sys.modules[__name__] = pointer_tables
