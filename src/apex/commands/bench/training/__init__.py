"""`apex bench`: time, memory and accuracy of each precision level in training."""

__all__: list[str] = []
