"""Mixed precision for models that are split over ranks."""

from apex._upstream.missing import explain_attributes
from apex.transformer.amp.grad_scaler import GradScaler

__all__ = ["GradScaler"]

explain_attributes(__name__)
