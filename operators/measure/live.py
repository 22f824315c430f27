"""A cell in the making: what is asked of its process, and what of the answers is believed.

Its outputs are judged by another process, and its times bounded by this one's clock. The executor drives a cell through
all of it; one side of a comparison drives two.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from groupbench.operators import registry
from groupbench.operators.measure import seal, witness
from groupbench.operators.measure.cell import Burst, Done, Failure, Job, Prepared, Request, Restored, Shown
from groupbench.operators.measure.costs import COLD, Costs
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.judge import At, Gauged, Judged, Rerouted
from groupbench.operators.measure.worker import Judge, Worker
from groupbench.operators.registry import get_backend, get_operator
from groupbench.tracker.record import Accuracy
from groupbench.tracker.text.scratch import Scratch

FIRST = At()
"""Inputs as a seed alone makes them: those of a record's accuracy, which histories compare."""


ANSWERS: dict[str, Any] = {"prepare": Prepared, "burst": Burst, "show": Shown, "restore": Restored}
"""What else than Done a verb is answered by."""

LOOKS, LOOK_S = 3, 0.2
"""Timed calls of a burst that are judged; one where that takes longer. Half of the calls must lie to move a median."""


SLACK, REROUTED_SLACK = 4.0, 10.0
"""Times its tolerance that a result may be off for inputs that are drawn. What was not computed is off by far more."""


def new_secret() -> int:
    """What the inputs of a round are moved by: drawn when every backend of it has been prepared."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class HeldTo:
    """What the judge must know of a backend.

    row   of the tolerance table, None for that of its dtype
    home  plugins that the judge imports, to have the operator
    """

    row: str | None
    home: tuple[str, ...]


def held_to(job: Job) -> HeldTo:
    """By what the backend itself says. Imports the plugins, in this process.

    Where the operator is known without a plugin, or with one of several, the judge imports no other.
    """
    operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
    home = getattr(registry, "home_of", None)  # a tree from before operators were plugins
    return HeldTo(
        get_backend(operator, job.backend).tolerance, home(job.operator, job.plugins) if home else job.plugins
    )


@dataclass
class Live:
    """A cell and what is known of it so far. `judge` gives the process that judges, a new one where it has died."""

    job: Job
    worker: Worker
    judge: Callable[[], Judge]
    started: float = field(default_factory=time.monotonic)
    prepared: Prepared | None = None
    failure: Failure | None = None
    bursts: list[Burst] = field(default_factory=list)
    accuracy: Accuracy | None = None
    problem: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # what it costs, by name
    launched: tuple[str, ...] | None = None  # kernels, copies and fills of one call, in order
    dynamic: bool | None = None  # whether the callable follows another routing; None where that was not tried

    held_to: HeldTo | None = None
    inaccurate: str | None = None  # what the first calls' output has against it

    def __post_init__(self) -> None:
        self.held_to = self.held_to or held_to(self.job)
        self._row = self.held_to.row
        self.worker.begin_log()
        self._judged_job = replace(self.job, plugins=self.held_to.home)
        self._looks = LOOKS

    @property
    def suspicious(self) -> bool:
        """Whether it is wrong by what it does to the measurement, and not by its result alone."""
        return self.problem is not None and self.problem != self.inaccurate

    @property
    def going(self) -> bool:
        return self.failure is None and self.prepared is not None

    @property
    def interpreted(self) -> bool:
        return self.prepared is not None and self.prepared.timing == "interpreted"

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The answer of the verb's type, or a Failure, which is noted too."""
        answer = self.worker.ask(Request(verb, arguments=arguments))
        if not isinstance(answer, (Failure, ANSWERS.get(verb, Done))):
            self.worker.kill()
            answer = Failure("error", f"its answer to {verb} could not be read: it is of another kind")
        return self.take(answer)

    def take(self, answer: Any) -> Any:
        """The answer; a failure is noted too."""
        if isinstance(answer, Failure):
            self.failure = answer
        return answer

    def prepare(self) -> None:
        """Prepare the backend, and have the output of its first calls judged."""
        prepared = self.ask("prepare")
        if not isinstance(prepared, Prepared):
            return
        self.prepared, self.problem = prepared, prepared.problem
        self.metrics |= prepared.metrics
        sent = prepared.sent
        half = len(sent.parts) if prepared.repeatable else len(sent.parts) // 2
        second = self._judged(Sent(sent.form, sent.parts[:half]), FIRST)
        if second is not None:
            self.accuracy = msgspec.structs.replace(second.accuracy, repeatable=prepared.repeatable)
            self.problem = self.problem or second.problem
            if self.problem is None and not prepared.repeatable:
                first = self._judged(Sent(sent.form, sent.parts[half:]), FIRST)
                if first is not None and first.problem:
                    self.problem = f"another run of the same call: {first.problem}"
            self.inaccurate = second.problem or (self.problem if not prepared.problem else None)
        self._forget()

    def burst(self, secret: int, chosen: int | None) -> Burst | Failure:
        """A burst on inputs moved by the secret, and the judgement of some of its timed calls.

        chosen  seed that says which calls; None: none is judged
        """
        begun = witness.now()
        burst = self.ask("burst", secret)
        took_s = witness.now() - begun
        if not isinstance(burst, Burst):
            return burst
        self.bursts.append(burst)
        found = burst.problem or witness.too_long(burst.samples_ms, took_s)
        if found is None and self.problem is None and chosen is not None:
            found = self._look(secret, _draw(chosen, burst.kept, self._looks))
        if burst.kept < 1 and found is None:
            found = "no output of a timed call was kept"
        self.problem = self.problem or found
        self._forget()
        return self.failure or burst

    def _look(self, secret: int, numbers: Sequence[int]) -> str | None:
        """Have these of the kept outputs judged. Returns what is wrong with the first that is."""
        for number in numbers:
            shown = self.ask("show", number)
            if not isinstance(shown, Shown):
                return None
            begun = witness.now()
            judged = self._judged(shown.sent, At(secret, shown.step))
            self._looks = LOOKS if witness.now() - begun < LOOK_S else 1
            if judged is None:
                return None
            if judged.problem:
                self.accuracy = msgspec.structs.replace(judged.accuracy, repeatable=False)
                return f"in a timed call: {judged.problem}"
        return None

    def finish(self) -> None:
        """Find out what is left when the bursts are over."""
        if not self.going:
            return
        if self.job.plugins and (name := seal.broken()) is not None:
            self.problem = f"a plugin replaced {name} in the process that times it"
            return
        restored = self.ask("restore")
        if isinstance(restored, Restored) and restored.problem and self.prepared and not self.prepared.problem:
            self.problem = restored.problem
        if self.interpreted or self.problem is not None or self.failure is not None:
            return
        assert self.prepared is not None

        def calls(number: int) -> Any:
            return self.worker.ask(Request("witness", arguments=(number,)))

        found = witness.watch(calls, median_ms(self.bursts), self.prepared.enqueue_ms, self._gauge)
        if isinstance(found, Failure):
            self.failure = found
        else:
            self.problem = found

    def _gauge(self) -> float | Failure:
        """How many times as long known work takes on the device, by the process that judges."""
        gauged = self._ask_judge(Request("gauge"))
        return gauged.stretch if isinstance(gauged, Gauged) else gauged

    def find_costs(self) -> bool:
        """Measure what a call costs besides its latency. False where the process is no good afterwards.

        A cost that cannot be measured is no failure of the cell, whose latency and accuracy are known by now.
        """
        if not self.going or self.interpreted or self.problem is not None or not self.bursts:
            return True
        wanted = tuple(name for name in self.job.costs if name != COLD)
        answer = self.worker.ask(Request("costs", arguments=(wanted, median_ms(self.bursts)))) if wanted else None
        if isinstance(answer, Costs):
            self.metrics |= answer.metrics
            self.launched = answer.launched
            self._lower_enqueue(answer.enqueue_ms)
        return not isinstance(answer, Failure)

    def _lower_enqueue(self, enqueue_ms: float | None) -> None:
        """Take the lower of two times of the host, seconds apart: in one process of four the first was up to 3.5 x."""
        assert self.prepared is not None
        if enqueue_ms is not None and self.prepared.enqueue_ms is not None and enqueue_ms < self.prepared.enqueue_ms:
            self.prepared = msgspec.structs.replace(self.prepared, enqueue_ms=enqueue_ms)

    def find_cold(self) -> None:
        """Time the first result of a fresh process with empty caches: what is compiled and tuned on the first day."""
        if not self.going or self.interpreted or self.problem is not None or COLD not in self.job.costs:
            return
        fresh = Worker(self.job.device, self.worker.timeout_s)
        try:
            with Scratch("cache") as folder:
                begun = witness.now()
                requests = (Request("adopt", self.job), Request("load"), Request("first", arguments=(str(folder),)))
                answers = [answer for request in requests if not isinstance(answer := fresh.ask(request), Failure)]
                took_ms = 1e3 * (witness.now() - begun)
        finally:
            fresh.close()
        if len(answers) == len(requests) and isinstance(answers[-1], Costs):
            self.metrics |= answers[-1].metrics | {"first_result_ms": took_ms}

    def find_routing(self) -> bool:
        """Whether the callable follows another routing, in the same buffers, or has its own built in.

        The last question to its process, which what is built in may crash when it does not fit: that is no failure of
        the cell. False then.
        """
        if not self.going or self.interpreted or self.problem is not None:
            return True
        seed, secret = random.SystemRandom().getrandbits(31), new_secret()
        possible = self._ask_judge(Request("can_reroute", arguments=(seed,)))
        if not isinstance(possible, Rerouted) or not possible.possible:
            return True
        shown = self.worker.ask(Request("reroute", arguments=(seed, secret)))
        self.dynamic = False
        if not isinstance(shown, Shown):
            return False
        judged = self._ask_judge(self._comparison(shown.sent, At(secret, 0, seed)))
        self.dynamic = isinstance(judged, Judged) and judged.problem is None
        return True

    def _judged(self, sent: Sent, at: At) -> Judged | None:
        """What the judge says of an output; None where it cannot, which is the cell's failure."""
        answer = self._ask_judge(self._comparison(sent, at))
        if isinstance(answer, Judged):
            return answer
        self.failure = answer
        return None

    def _comparison(self, sent: Sent, at: At) -> Request:
        # The inputs of a record's accuracy are the same every night. Those of other calls are drawn, and a result that
        # is close to a tolerance would be beyond it now and then.
        slack = 1.0 if at == FIRST else SLACK if at.rerouted is None else REROUTED_SLACK
        arguments = (sent, self.worker.path, at, self._row, self.job.rtol, self.job.atol, slack)
        return Request("compare", arguments=arguments)

    def _ask_judge(self, request: Request) -> Any:
        judge = self.judge()
        loaded = judge.ask(Request("load", arguments=(self._judged_job,)))
        return loaded if isinstance(loaded, Failure) else judge.ask(request)

    def _forget(self) -> None:
        """On a GPU the outputs that were shown are memory that others want."""
        if self.failure is None and self.job.device == "cuda":
            self.ask("forget")


def _draw(seed: int, among: int, most: int) -> list[int]:
    """Numbers below `among`, each once: the same for all backends of a round, whose references then are the same."""
    return random.Random(seed).sample(range(among), min(most, among))


def median_ms(bursts: Sequence[Burst]) -> float:
    """Median over bursts of each burst's median."""
    return statistics.median(statistics.median(burst.samples_ms) for burst in bursts)
