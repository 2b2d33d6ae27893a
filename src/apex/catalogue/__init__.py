"""The ops and the optimizers of `apex`, each named once, with what checks and timings need of them.

An entry is data and small functions, written by hand. The self-test, `apex bench --optimizer`,
tools, benchmarks and the tests go over `ops.OPS` and `optimizers.OPTIMIZERS`;
what means all of them has no list of its own. Oracles have, and so has the layout of old files.
"""

__all__: list[str] = []
