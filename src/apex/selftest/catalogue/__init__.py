"""The ops and the optimizers of `apex`, each named once, with what checks and timings need of them.

An entry is data and small functions, written by hand. The self-test, `apex bench kernels`, `apex
bench --optimizer` and the tests go over `ops.OPS` and `optimizers.OPTIMIZERS`; none has a list of
its own. It is not in `apex.ops`, which may not import public classes.
"""

__all__: list[str] = []
