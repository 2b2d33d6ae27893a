"""The ``apex`` script: what has to be done before torch is imported, which takes seconds."""

import sys
import warnings

__all__ = ["main"]


def main() -> int:
    """Run the command line; Ctrl-C during the imports is one line, too."""
    # torch's own, in an environment without NumPy, whatever the command
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    try:
        from apex.cli.command_line import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("apex: interrupted\n")
        return 130
    return command_line()
