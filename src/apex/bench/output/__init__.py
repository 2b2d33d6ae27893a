"""What commands share to show results: tables, pages, progress."""

__all__: list[str] = []
