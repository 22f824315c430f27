"""Explain an unexpected exception as a database fault, or report a bug.

Damage can appear wherever a value is used: one flipped bit turns a number into text, or a key into a dangling one.
Checking the database afterwards spares every command from expecting each kind of damage.
"""

from __future__ import annotations

import sys
import time

from groupbench.tracker.facts.errors import DamageError, TrackerError

SECONDS = 30
"""Longest search of the database for damage, before the exception is treated as a bug."""


def explained(error: Exception, location: str) -> TrackerError | None:
    """Return the database fault behind an exception, or None."""
    if "sqlalchemy" not in sys.modules:  # no database was opened
        return None
    from sqlalchemy.exc import DBAPIError

    from groupbench.tracker.store.engine import error_of, shown_name

    origin = error.orig if isinstance(error, DBAPIError) else error
    # Every driver's errors have a root of this name (PEP 249).
    if any(kind.__name__ == "Error" and kind.__module__ in _DRIVERS for kind in type(origin).__mro__):
        return error_of(shown_name(location), error)
    damage = damage_of(location)
    return None if damage is None else DamageError(damage)


_DRIVERS = ("sqlite3", "psycopg")


def damage_of(location: str) -> str | None:
    """Return the first damage found in a database within SECONDS, as one line, or None."""
    from groupbench.tracker.store.engine import ADVICE, open_store, shown_name
    from groupbench.tracker.store.verify import verify

    try:
        with open_store(location, create=False, read_only=True) as store, store.read() as session:
            problems = verify(session, until=time.monotonic() + SECONDS)
            damage = next((problem for problem in problems if problem.kind != "orphan"), None)
            return None if damage is None else f"{shown_name(location)}: damaged database: {damage}; {ADVICE}"
    except DamageError as error:
        return error.message
    except TrackerError:
        return None
