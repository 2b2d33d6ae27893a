"""``amp.capture``: a whole training step in one CUDA graph."""

__all__: list[str] = []
