"""Updates of lists of tensors: columns, one launch for each list, norms, scaling, storage."""

__all__: list[str] = []
