"""`apex.ops.lists.storage` under the path that programs know."""

import sys

from apex.ops.lists import storage

sys.modules[__name__] = storage
