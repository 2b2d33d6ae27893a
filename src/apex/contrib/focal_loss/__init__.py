"""Focal loss of a detector's class logits.

In Apex ``from apex.contrib.focal_loss import focal_loss`` was the sub-module. Here it is the
function of that name, with the module's names as attributes: ``focal_loss.focal_loss`` works too.
"""

from apex.contrib.focal_loss.focal_loss import focal_loss

__all__ = ["focal_loss"]
