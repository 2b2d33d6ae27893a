"""`apex info`: what is installed here, and which code path runs it."""

__all__: list[str] = []
