"""What a GPU is asked when there is one for half an hour: ``./dev gpu`` (docs/extending.md).

`__main__` runs the parts, each in a process of its own. `steps`, `graphs`, `layers`, `ranks` and
`large` are the checks, `suite` the tests, `times` the times. `stand_ins` lets all of them run on a
CPU; there `marked` runs the tests marked ``gpu``, and `selftest` the checks of `apex selftest`.
"""
