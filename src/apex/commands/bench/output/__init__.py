"""What the report's figures and pages are drawn with."""

__all__: list[str] = []
