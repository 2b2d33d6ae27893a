"""Programs that time or count against plain torch: ``python -m benchmarks.NAME --help``."""
