"""Focal loss of a detector's class logits.

In Apex ``from apex.contrib.focal_loss import focal_loss`` imports a sub-module. Here it imports the
function of that name. ``focal_loss.focal_loss`` works too, because the function has the module's
names as attributes.
"""

from apex.contrib.focal_loss.focal_loss import focal_loss

__all__ = ["focal_loss"]
