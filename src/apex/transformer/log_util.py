"""Loggers of this package, to which no handler is added."""

import logging


def get_transformer_logger(name: str) -> logging.Logger:
    """Return the logger of a module's name, or of its file's, whose ending ``.py`` is dropped."""
    return logging.getLogger(name.removesuffix(".py"))


def set_logging_level(verbosity: int | str) -> None:
    """Set the level, ``logging.INFO`` or ``"INFO"``, of the logger ``apex`` and of those below."""
    logging.getLogger("apex").setLevel(verbosity)
