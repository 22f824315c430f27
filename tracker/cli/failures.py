"""What an exception that no command foresaw says of the database: one line, or nothing where it is a bug.

Damage turns up wherever a value is used: a letter that flipped makes a number a text, a key a key of nothing. Such an
exception is explained by looking at the database itself, so that no command has to expect each of them.
"""

from __future__ import annotations

import sys
import time

from groupbench.tracker.errors import DamageError, TrackerError

SECONDS = 30
"""How long the database is searched for damage before the exception is taken for a bug."""


def explained(error: Exception, location: str) -> TrackerError | None:
    """Return what went wrong as an error of the command line, or None where the database is not the cause."""
    if "sqlalchemy" not in sys.modules:  # no database was opened
        return None
    from sqlalchemy.exc import DBAPIError

    from groupbench.tracker.store.engine import error_of, shown_name

    origin = error.orig if isinstance(error, DBAPIError) else error
    # Every driver's errors have a root of this name (PEP 249).
    if any(kind.__name__ == "Error" and kind.__module__ in _DRIVERS for kind in type(origin).__mro__):
        return error_of(shown_name(location), error)
    damage = _damage(location)
    return None if damage is None else DamageError(damage)


_DRIVERS = ("sqlite3", "psycopg")


def _damage(location: str) -> str | None:
    """Return the first damage that is found in a database within the time, as a line."""
    from groupbench.tracker.store.engine import ADVICE, open_store, shown_name
    from groupbench.tracker.store.verify import verify

    try:
        with open_store(location, create=False, read_only=True) as store, store.read() as session:
            found = verify(session, until=time.monotonic() + SECONDS)
            problem = next((problem for problem in found if problem.kind != "orphan"), None)
            return None if problem is None else f"{shown_name(location)}: is damaged: {problem}; {ADVICE}"
    except DamageError as error:
        return error.message
    except TrackerError:
        return None
