"""``python -m apex``: the same command line as the ``apex`` script."""

from apex.commands.command_line import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
