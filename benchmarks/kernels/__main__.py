"""``python -m benchmarks.kernels``; the options are those of `command`."""

from collections.abc import Sequence

from apex.commands.command_line import Parser, UsageError
from benchmarks.kernels import command

__all__: list[str] = []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``; what cannot be done is one line, and the exit code 2."""
    parser = Parser(prog=command.NAME, description=command.HELP)
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(argv))
    except UsageError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
