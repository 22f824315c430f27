"""Logging of both programs: steps and waits, on standard error."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

VARIABLE = "GROUPBENCH_LOG"
"""Environment variable with the level: debug, info or warning."""

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s"


class _Standard(logging.StreamHandler[TextIO]):
    """Write to the `sys.stderr` of the moment, which progress bars and tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override] # an attribute there
        return sys.stderr


def configure(verbosity: int) -> None:
    """Log to standard error, and set `GROUPBENCH_LOG` so that processes of this one do so too.

    Args:
        verbosity: The number of `-v` on the command line: 0 keeps the level of `GROUPBENCH_LOG`, by default warnings;
            1 shows each step, such as the start of a worker; 2 also shows every wait.
    """
    named = os.environ.get(VARIABLE, "").strip().lower()
    level = [LEVELS.get(named, logging.WARNING), logging.INFO, logging.DEBUG][min(verbosity, 2)]
    if verbosity:
        os.environ[VARIABLE] = logging.getLevelName(level).lower()
    logger = logging.getLogger("groupbench")
    logger.setLevel(level)
    if not any(isinstance(handler, _Standard) for handler in logger.handlers):
        handler = _Standard()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    if named and named not in LEVELS:
        logger.warning("%s=%s is not one of %s", VARIABLE, named, ", ".join(LEVELS))
