"""Drive a cell while it is measured: send requests to the process and check the replies.

Another process checks the outputs, and this process's clock bounds the times. The executor drives one cell through all
steps; one comparison side drives two.
"""

from __future__ import annotations

import math
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from groupbench.operators.measure import witness
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.fingerprint import fingerprints
from groupbench.operators.measure.judge import PRECISION, At, OutputJudgement
from groupbench.operators.measure.keeper import room_for
from groupbench.operators.measure.moves import Copied
from groupbench.operators.measure.protocol import QUEUE, timing_of
from groupbench.operators.measure.rest import Rest
from groupbench.operators.measure.wire import Burst, Failure, HeldTo, Job, Prepared, Request
from groupbench.operators.measure.worker import Judge, Worker
from groupbench.tracker.facts.record import Accuracy, Kernel, Loaded

T = TypeVar("T")


@dataclass(frozen=True)
class Checks:
    """The tuned numbers of this module, and where each comes from.

    A number without a reason is a choice between the length of a run and what the self-test's cheats need to be found.
    """

    looks: int = 3  # timed calls of a burst that are judged: half of the calls must lie to move a median
    look_s: float = 0.2  # time of one judgement above which only one call is judged
    break_s: float = 0.2  # a break that is made to find out whether a cell disturbs others
    settle_s: float = 5.0  # longest wait for processes that preparation has started: torch.compile's import torch
    settled_s: float = 0.1  # time of a look at them
    repeats: int = 2  # further measurements of a cell, if other work on the device kept its times from being checked
    accused: int = 2  # measurements whose processor times must be implausible before the backend is to blame
    check_s: float = 4.0  # from the first check of the times: none is repeated later, so a cell takes 10 s more at most
    cold: float = 0.1  # how much longer than the second a first burst takes at least that is not counted
    most_cold: int = 3


CHECKS = Checks()

FIRST = At()
"""The inputs as made from the seed. A record's accuracy is measured on them, since histories compare it."""


def new_secret() -> int:
    """Draw the secret for moving a round's inputs, after all backends are prepared."""
    return drawn(63)


drawn = secrets.randbits
"""Returns a number with so many random bits, unforeseeable for any code."""


@dataclass
class Live:
    """A cell and the results so far. `judge` returns the judging process, restarted if it has died."""

    job: Job
    worker: Worker
    judge: Callable[[], Judge]
    held_to: HeldTo
    started: float = field(default_factory=time.monotonic)
    prepared: Prepared | None = None
    failure: Failure | None = None
    bursts: list[Burst] = field(default_factory=list)
    accuracy: Accuracy | None = None
    problem: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # its costs, by metric
    launched: tuple[str, ...] | None = None  # kernels, copies and fills of one call, in order
    properties: dict[str, bool] = field(default_factory=dict)  # of the callable, by metric, as far as tried

    analysis: Future[tuple[Kernel, ...]] | None = None  # the kernels with the facts about their machine code

    inaccurate: str | None = None  # the fault in the output of the first calls, as text

    def __post_init__(self) -> None:
        self.worker.begin_log()
        self.rest = Rest(self.worker, self.job.device)
        self._looks = CHECKS.looks
        self.samples = self.job.protocol.samples
        self.output_bytes: int | None = None  # by the judge
        self._timing: str | None = None
        self._first_rms: float | None = None  # relative error of the first output
        self._until = math.inf
        self._doubted = False  # whether other work on the machine may be to blame for the problem
        self.copies: tuple[Copied, ...] = ()  # the backend's copies of inputs

    def learn(self, checked: Live | None) -> None:
        """Take the callable's facts as shown by another process for this backend."""
        if checked is not None:
            self.copies, self.output_bytes, self._timing = checked.copies, checked.output_bytes, checked._timing
            self._first_rms = checked._first_rms

    @property
    def suspicious(self) -> bool:
        """Return whether the verdict comes from tampering with the measurement, not only from a wrong result."""
        return self.problem is not None and self.problem != self.inaccurate

    @property
    def going(self) -> bool:
        """Return whether the cell is prepared and nothing has failed."""
        return self.failure is None and self.prepared is not None

    @property
    def interpreted(self) -> bool:
        return self._timing == "interpreted"

    @property
    def sound(self) -> bool:
        """Return whether the cell is right so far and the times have a meaning."""
        return self.going and not self.interpreted and self.problem is None

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Return the reply, or a Failure, which is also stored."""
        return self.take(self.worker.ask(Request(verb, arguments)))

    def take(self, reply: T) -> T:
        """Return the reply; a failure is also stored."""
        if isinstance(reply, Failure):
            self.failure = reply
        return reply

    def prepare(self) -> None:
        """Prepare the backend, and have the first calls' output judged."""
        prepared = self.ask("prepare")
        if isinstance(prepared, Failure):
            return
        kinds = {timing_of(self.job.device, interpreted) for interpreted in (False, self.job.interpreted)}
        if prepared.timing not in kinds:
            self.failure = Failure("error", f"its answer to prepare names a time of another kind: {prepared.timing}")
            return
        self._timing = prepared.timing
        self.prepared, self.problem, self.copies = prepared, prepared.problem, prepared.copies
        self.metrics |= prepared.metrics
        self.properties["fresh_output"] = prepared.fresh
        sent = prepared.sent
        half = len(sent.parts) if prepared.repeatable else len(sent.parts) // 2
        second = self._judged(Sent(sent.form, sent.parts[:half]), FIRST)
        if second is not None:
            self.accuracy = msgspec.structs.replace(second.accuracy, repeatable=prepared.repeatable)
            self._first_rms = second.accuracy.rms
            self.problem = self.problem or second.problem
            if self.problem is None and not prepared.repeatable:
                first = self._judged(Sent(sent.form, sent.parts[half:]), FIRST)
                if first is not None and first.problem:
                    self.problem = f"another run of the same call: {first.problem}"
            self.inaccurate = second.problem or (self.problem if not prepared.problem else None)
        self._forget()

    def burst(self, secret: int, chosen: int | None) -> Burst | Failure:
        """Measure a burst on inputs moved by the secret, and check the outputs from some timed calls.

        Args:
            chosen: Seed for the choice of calls; None to check none.
        """
        fault = self.rest.end()
        timed = self._timed(secret)
        if isinstance(timed, Failure):
            return timed
        burst = timed.burst
        self.bursts.append(burst)
        fault = fault or burst.problem or witness.too_long(burst.samples_ms, 1e-3 * timed.wall_ms)
        if fault is None and self.problem is None and chosen is not None:
            fault = self._look(secret, burst, _draw(chosen, len(burst.steps), self._looks))
        fault = fault or _incomplete(self, burst, self.samples, self.job.protocol.samples)
        self._blame(fault)
        self._forget()
        self.rest.begin()
        return self.failure or burst

    def _timed(self, secret: int, calls: int | None = None) -> witness.Timed | Failure:
        """Measure a burst by this process's clocks. Returns a Failure if it names impossible steps."""
        self.worker.keep_on_processors()
        before = (*self.rest.clocks(), *self.worker.thread_s())
        burst: Burst | Failure = self.ask("burst", secret, calls)
        if isinstance(burst, Failure):
            return burst
        after = (*self.rest.clocks(), *self.worker.thread_s())
        wall_ms, processor_ms, run_ms, queued_ms = (1e3 * (b - a) for a, b in zip(before, after, strict=True))
        if not burst.steps or len({*burst.steps}) < len(burst.steps) or len(burst.sums) != len(burst.steps):
            return self.take(Failure("error", "its answer to burst names a timed call twice, or none"))
        most = self.job.protocol.warmups + 1 + QUEUE.attempts * (calls or self.samples)
        if min(burst.steps) < 1 or max(burst.steps) > most:
            return self.take(Failure("error", "its answer to burst names a timed call that it was not asked for"))
        return witness.Timed(burst, wall_ms, processor_ms, run_ms, queued_ms)

    def _intruding(self) -> str | None:
        """Return why the cell disturbs other measurements, or None. Makes further breaks if the last was busy."""
        fault, self.rest.excused = self.rest.end(), False
        while self.rest.undecided and self.failure is None:
            if isinstance(self._timed(new_secret()), Failure):
                return None
            self._forget()
            self.rest.begin()
            witness.rest(CHECKS.break_s)
            fault = self.rest.end()
        return fault

    def audit(self) -> str | Failure | None:
        """Return why the burst times are implausible by this process's clocks, or None. Only on a CPU."""

        def ask(calls: int) -> witness.Timed | Failure | str:
            if isinstance(moved := self.ask("move", None), Failure):
                return moved
            secret = new_secret()
            timed = self._timed(secret, calls)
            if isinstance(timed, Failure):
                return timed
            burst = timed.burst
            fault = burst.problem or self._look(secret, burst, _draw(secret, len(burst.steps), 1))
            return self.failure or fault or _incomplete(self, burst, calls, calls) or timed

        def pace(calls: int) -> Any:
            arguments = (new_secret(), calls, self.copies, self.worker.processor)
            return ask_judge(self, "pace", *arguments)

        return witness.audit(ask, pace, median_ms(self.bursts), partial(ask_judge, self, "gauge"))

    def _look(self, secret: int, burst: Burst, numbers: Sequence[int]) -> str | None:
        """Have some outputs kept in a burst checked. Returns the first wrong output's fault, or None."""
        for number in numbers:
            shown = self.ask("show", number)
            if isinstance(shown, Failure):
                return None
            begun = witness.now()
            named = burst.sums[number]
            judged = self._judged(shown, At(secret, burst.steps[number]), named)
            self._looks = CHECKS.looks if witness.now() - begun < CHECKS.look_s else 1
            if judged is None:
                return None
            if judged.problem:
                self.accuracy = msgspec.structs.replace(judged.accuracy, repeatable=False)
                return f"in a timed call: {judged.problem}"
        return None

    def finish(self, secret: int) -> None:
        """Make the checks after the bursts. Calls in a row are made on inputs moved by the secret."""
        if not self.going:
            return
        self._until = min(self._until, witness.now() + CHECKS.check_s)
        self._blame(self._intruding())
        if self.failure is not None:
            return
        restored = self.ask("restore")
        if isinstance(restored, str) and self.prepared and not self.prepared.problem:
            self.problem, self._doubted = restored, False
        if self.interpreted or self.problem is not None or self.failure is not None:
            return
        fault = self.audit() if self.job.device == "cpu" else self._watch(secret)
        if isinstance(fault, Failure):
            self.failure = fault
        else:
            self._blame(fault)
        self._forget()

    def _blame(self, fault: str | None) -> None:
        """Keep the backend's fault, if it is the first."""
        if fault is not None and self.problem is None:
            self.problem, self._doubted = str(fault), isinstance(fault, witness.Implausible)

    def repeat(self, bursts: int) -> None:
        """Measure again if other work may have disturbed the cell, and may be over by now.

        It has if the times could not be checked, and may have if they were implausible for the first time.
        """
        accused = 0
        for _ in range(CHECKS.repeats):
            accused += self._doubted
            is_late = witness.now() >= self._until and not self._doubted
            is_over = not (self._doubted or isinstance(self.failure, witness.Disturbed))
            if accused == CHECKS.accused or is_late or is_over:
                return
            if self._doubted:
                self.problem, self._doubted = None, False
            self.failure = None
            self.rest.forget()
            self.bursts.clear()
            for _ in range(bursts):
                if self.going:
                    cool(self.job)
                    self.burst(new_secret(), drawn(31))
            self.finish(new_secret())

    def _watch(self, secret: int) -> str | Failure | None:
        """Return why the burst times differ from consecutive calls on a GPU, or None."""
        assert self.prepared is not None

        gauge = partial(ask_judge, self, "gauge")
        replies: list[Any] = []  # each after one move more

        def calls(number: int) -> Any:
            replies.append(self.worker.ask(Request("witness", (number,))))
            return replies[-1]

        if isinstance(moved := self.ask("move", secret), Failure):
            return moved
        fault = witness.watch(calls, median_ms(self.bursts), self.prepared.enqueue_ms, gauge)
        if fault is not None:
            return fault
        if len(replies[-1].sums) != 1:
            return Failure("error", "its answer to witness names no output")
        return self._look(secret, Burst((), steps=(len(replies),), sums=replies[-1].sums), [0])

    def _judged(self, sent: Sent, at: At, named: int | None = None) -> OutputJudgement | None:
        """Return the judge's verdict on an output; None if it cannot judge it, which fails the cell.

        Args:
            named: The sum that was named for the output with its burst.
        """
        reply = self.take(compare(self, sent, at, named))
        if isinstance(reply, Failure):
            return None
        self.output_bytes = reply.size
        return reply

    def _forget(self) -> None:
        """Free the GPU memory behind shown outputs."""
        if self.failure is None and self.job.device == "cuda":
            self.ask("forget")


def ask_judge(cell: Live, verb: str, *arguments: Any) -> Any:
    """Return the judging process's answer about the cell's problem, or a Failure."""
    judge = cell.judge()
    loaded = judge.ask(Request("load", (replace(cell.job, plugins=cell.held_to.home),)))
    return loaded if isinstance(loaded, Failure) else judge.ask(Request(verb, arguments))


def compare(cell: Live, sent: Sent, at: At, named: int | None = None) -> OutputJudgement | Failure:
    """Return the judging process's verdict on an output.

    Args:
        named: The sum that was named for the output with its burst.
    """
    # The inputs of a record's accuracy are the same every night. Those of other calls are drawn, and a result that
    # is close to a tolerance would be beyond it now and then.
    drawn = PRECISION.slack if at.rerouted is None and at.special is None else PRECISION.rerouted_slack
    slack, row = 1.0 if at == FIRST else drawn, cell.held_to.row
    first_rms = cell._first_rms if named is not None else None
    arguments = (sent, cell.worker.path, at, row, cell.job.rtol, cell.job.atol, slack, named, first_rms)
    judged: OutputJudgement | Failure = ask_judge(cell, "compare", *arguments)
    return judged


def _incomplete(cell: Live, burst: Burst, calls: int, most: int) -> str | None:
    """Return how many calls or outputs are missing from a burst, or None.

    If a backend could choose the kept calls, it would choose the judged ones.

    Args:
        calls: Number of timed calls that were asked for.
        most: Number of outputs that are kept at most.
    """
    timed, kept, device = len(burst.samples_ms), len(burst.steps), cell.job.device
    due = 1 if cell.interpreted else calls
    over = device == "cpu" and sum(burst.samples_ms) >= 1e3 * QUEUE.cpu_s
    if timed != due and not (over and timed < due):
        return f"implausible: {timed} times are reported for {due} calls"
    if cell.output_bytes is None:
        return None
    room = room_for(cell.output_bytes, most, device)
    least = min(room, timed)
    # A GPU's late calls are made again, and their outputs are kept too.
    if not least <= kept <= (room if device == "cuda" else least):
        return f"the outputs of {kept} timed calls were kept, and not of {least}"
    return None


def fingerprint_of(worker: Worker) -> Loaded | None:
    """Return the fingerprint of a cell's process, or None if it does not answer."""
    seen = worker.ask(Request("loaded"))
    return None if isinstance(seen, Failure) else fingerprints().of(*seen)


def cool(job: Job) -> None:
    """Let a GPU rest before a burst, as the protocol says."""
    if job.device == "cuda":
        time.sleep(job.protocol.idle_s)


def settle(cells: Sequence[Live]) -> None:
    """Wait until the processes started by preparation are at rest, up to CHECKS.settle_s.

    torch.compile starts processes for later compilations, which import torch for seconds. They would lengthen all
    cells' times. A cell without rest is measured all the same, and not accused before it has rested or is finished.
    """
    working = [cell for cell in cells if cell.failure is None and cell.worker.has_started_others()]
    end_s = witness.now() + CHECKS.settle_s
    while working and witness.now() < end_s:
        clocks = [cell.rest.clocks() for cell in working]
        witness.rest(CHECKS.settled_s)
        pairs = zip(working, clocks, strict=True)
        working = [cell for cell, before in pairs if cell.rest.busy_since(before, is_first=False)]
    for cell in working:
        cell.rest.excused = True


def _draw(seed: int, among: int, most: int) -> list[int]:
    """Draw distinct numbers below `among`, the same for all the round's backends, so they share references."""
    return random.Random(seed).sample(range(among), min(most, among))


def warm_up(cells: Sequence[Live]) -> None:
    """Measure again for each first burst that a process on a CPU began cold: the times of both would scatter."""
    for cell in cells:
        for _ in range(CHECKS.most_cold):
            if not cell.going or cell.job.device != "cpu" or cell.interpreted or not begins_cold(cell.bursts):
                break
            del cell.bursts[0]
            cell.burst(new_secret(), drawn(31))


def begins_cold(bursts: Sequence[Burst]) -> bool:
    """Return whether the first burst took longer than the second, as in a process that is still cold."""
    first, second = (statistics.median(burst.samples_ms) for burst in bursts[:2]) if len(bursts) > 1 else (0.0, 0.0)
    return first > (1 + CHECKS.cold) * second


def median_ms(bursts: Sequence[Burst]) -> float:
    """Return the median over the bursts' medians."""
    return statistics.median(statistics.median(burst.samples_ms) for burst in bursts)
