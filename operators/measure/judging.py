"""Ask the judging process about one cell: whether the outputs are right, and how fast the device is now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.judge import PRECISION, At, OutputJudgement, Told
from groupbench.operators.measure.wire import Failure, Job, Request
from groupbench.operators.measure.worker import Judge, Worker
from groupbench.operators.registry import get_backend, get_operator, home_of

FIRST = At()
"""The inputs as made from the seed. A record's accuracy is measured on them, since histories compare it."""


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


class Judging:
    """Questions about a cell. `judge` returns the judging process, restarted if it has died."""

    def __init__(self, job: Job, worker: Worker, judge: Callable[[], Judge], facts: HeldTo) -> None:
        self._job, self._worker, self._judge, self._row = job, worker, judge, facts.row
        self._judged_job = replace(job, plugins=facts.home)

    def ask(self, request: Request) -> Any:
        """Return the judge's answer, or a Failure."""
        judge = self._judge()
        loaded = judge.ask(Request("load", (self._judged_job,)))
        return loaded if isinstance(loaded, Failure) else judge.ask(request)

    def compare(
        self, sent: Sent, at: At, named: int | None = None, first_rms: float | None = None
    ) -> OutputJudgement | Failure:
        """Return the verdict on an output.

        Args:
            named: The sum that was named for the output with its burst.
            first_rms: Relative RMS error of the backend's first output.
        """
        # The inputs of a record's accuracy are the same every night. Those of other calls are drawn, and a result that
        # is close to a tolerance would be beyond it now and then.
        drawn = PRECISION.slack if at.rerouted is None and at.special is None else PRECISION.rerouted_slack
        slack = 1.0 if at == FIRST else drawn
        arguments = (sent, self._worker.path, at, self._row, self._job.rtol, self._job.atol, slack, named, first_rms)
        judged: OutputJudgement | Failure = self.ask(Request("compare", arguments))
        return judged

    def value_of(self, verb: str, *arguments: Any) -> Any:
        """Return the value in the judging process's reply, or a Failure."""
        reply = self.ask(Request(verb, arguments))
        return reply.value if isinstance(reply, Told) else reply

    def gauge(self) -> float | Failure:
        """Return how many times as long known work takes on the device, by the judging process."""
        gauged: float | Failure = self.value_of("gauge")
        return gauged
