"""The command line: its commands, their options, tables and progress, and ``apex debug``.

A command is imported when it is chosen: `apex.bench` needs the ``bench`` extra, and ``apex debug``
runs scripts that set variables which torch reads when it is imported.
"""

__all__: list[str] = []
