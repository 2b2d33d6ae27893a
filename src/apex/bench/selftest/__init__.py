"""``apex selftest``: is what is installed here right on this machine?

A check is a function that measures something and says how much is allowed; `check` has the form.
The checks are in `tensor_ops`, `list_ops`, `optimizers`, `training` and, for what only a GPU has,
`gpu`. `run` carries them out and keeps what came of them, `report` shows it, `command` is the
command line.
"""

__all__: list[str] = []
