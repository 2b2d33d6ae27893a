"""What ``apex WORD`` does: ``info``, ``selftest``, ``bench``, ``check``, ``debug``, ``what-if``.

``command_line`` finds the command; ``options``, ``tables``, ``progress``, ``streams`` and
``processes`` are what commands share. A command is imported when it is chosen: ``apex bench`` needs
the ``bench`` extra, and ``apex debug`` runs scripts that set variables which torch reads when it is
imported. Nothing outside of this package imports it.
"""

__all__: list[str] = []
