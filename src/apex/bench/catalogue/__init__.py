"""The ops and the optimizers of `apex`, each named once, with what checks and timings need of them.

An entry is data and small functions: inputs at a size, our call, torch's expression of the same,
dtypes, tolerances and sizes. The self-test, `apex bench kernels`, `apex bench --optimizer` and the
tests go over `ops.OPS` and `optimizers.OPTIMIZERS`; none of them has a list of its own. Entries are
written by hand.

It is part of `apex.bench` because it imports public classes, which `apex.ops` and `apex.optimizers`
may not do, and because a program that trains has no use for it.
"""

__all__: list[str] = []
