"""The facts by which the judging process judges a backend."""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.operators.measure.wire import Job
from groupbench.operators.registry import get_backend, get_operator, home_of


@dataclass(frozen=True)
class HeldTo:
    """Backend facts for the judge.

    Attributes:
        row: Row of the tolerance table; None for that of its dtype.
        home: Plugins that the judge imports to get the operator.
    """

    row: str | None
    home: tuple[str, ...]


def held_to(job: Job) -> HeldTo:
    """Return the facts declared by the backend. Imports the plugins, in this process.

    The judge imports only the plugin defining the operator, if any.
    """
    operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
    return HeldTo(get_backend(operator, job.backend).tolerance, home_of(job.operator, job.plugins))
