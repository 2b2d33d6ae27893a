"""Parts that stand alone; each package is imported by its own name."""

from apex._upstream.missing import explain_attributes

__all__: list[str] = []

explain_attributes(__name__)
