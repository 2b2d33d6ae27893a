"""Loggers of this package, to which no handler is added."""

import logging
import os

__all__ = ["get_transformer_logger", "set_logging_level"]


def get_transformer_logger(name: str) -> logging.Logger:
    """Return the logger of a name.

    Args:
        name: Of a module, or of its file, whose ending is dropped.

    Example:
        >>> get_transformer_logger("schedules.py").name
        'schedules'
    """
    stem, ending = os.path.splitext(name)
    return logging.getLogger(stem if ending == ".py" else name)


def set_logging_level(verbosity: int | str) -> None:
    """Set the level of the logger ``apex``, and so of all below it that have none of their own.

    Args:
        verbosity: As ``logging`` has it: ``logging.INFO`` or ``"INFO"``.
    """
    logging.getLogger("apex").setLevel(verbosity)
