"""The ``apex`` script: what has to be done before torch is imported, which takes seconds."""

import sys
import warnings

__all__ = ["main"]

# torch's own, in an environment without NumPy, whatever the command. Here and not in a function:
# processes that a command starts import the script again. (Those of `apex selftest` do not.)
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)


def main() -> int:
    """Run the command line; Ctrl-C during the imports is one line, too."""
    try:
        from apex.commands.command_line import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("apex: interrupted\n")
        return 130
    return command_line()
