"""The path of :mod:`apex.patching._layers` in pickles that 1.0.0 made."""

import sys

from apex.patching import _layers as layers

sys.modules[__name__] = layers
