"""Follow a series night by night, from level to level. Pure functions of arrays of logarithms.

The lowest level is the reference: the one that is accepted as good. A slowdown puts a level on top of it, and a further
slowdown another one. A level ends when the results are back on one below it. A new reference begins with an improvement
and with every level that a person accepts. These begin and end a level:

    marks    known facts: A/B comparisons, alerts, and levels that were accepted
    nights   `NIGHTS` results in a row, each beyond the least that counts, with a chance of at most `OUT`

So tonight's result is compared with the level that it should belong to, whatever happened before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from groupbench.tracker.stats.predict import ENOUGH, FIRST, LAST, LEFT_OUT, Predicted, lower_median, predict, settled
from groupbench.tracker.stats.student import rank_chance

OUT = 0.01
"""Chance of a result on a level at most which it is out."""
AT_ONCE = 0.001
"""Chance at most which one night is enough for history alone, and an error is worse."""
RARE = 0.005
"""The same with few results, or by ranks, which cannot show more; and the odds at which a level ends."""
TO_SUSPECT = 2
"""Number of nights in a row that make a suspect."""
NIGHTS = 3
"""Number of results in a row whose level is certain without an A/B."""
HOLDS = 14
"""Number of results for which the level that an A/B found to be the same code's remains a level to expect."""

Kind = Literal["slower", "faster", "same", "reference", "code"]


@dataclass(frozen=True)
class Mark:
    """A fact about the result at a place, from outside the series.

    Attributes:
        kind: `reference`: the level from here on is accepted. `code`: the code of `base` is back after other code.
            Otherwise the verdict of an A/B or an alert.
        base: Place of the result with which it was compared; None: the one before.
        effect: Distance from the level before, if known.
        level: The level that an A/B measured at the same time.
        before: The level before, if no result of it is left.
        tag: Key of the alert.
        half: Half of the effect's interval.
    """

    kind: Kind
    base: int | None = None
    effect: float | None = None
    level: float | None = None
    before: float | None = None
    tag: int | None = None
    half: float = 0.0


@dataclass
class Level:
    """Results between two changes.

    Attributes:
        start: Place of the first one.
        values: The results.
        places: Their places.
        known: The centre, as long as there are no results.
        by: Its beginning: a mark, or nights.
        was: The centre of the level before it.
        gradual: No single night shows the change, so the level drifted.
        moved: Place from which it continues nearer to the level below: a part of the change was taken back.
        tag: Key of the alert.
        after: Place of the newest result certainly before it, if that is not the one before.
        replaced: The reference before, if this is one.
    """

    start: int
    known: float | None = None
    by: Kind | Literal["nights"] | None = None
    was: float | None = None
    gradual: bool = False
    moved: int | None = None
    tag: int | None = None
    after: int | None = None
    replaced: Level | None = field(default=None, compare=False, repr=False)
    values: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def sure(self) -> int:
        """Place of the newest result that is on the level by definition: in the first half of those in its centre."""
        first = self.places[:FIRST]
        return first[(len(first) - 1) // 2] if first else self.start

    @property
    def centre(self) -> float:
        """The level by all results."""
        if not self.values:
            assert self.known is not None
            return self.known
        return lower_median(self.values)

    def centre_without(self, place: int) -> float:
        """Return the level of the results before a place."""
        values = [value for at, value in zip(self.places, self.values, strict=True) if at < place]
        return lower_median(values) if values else self.centre


@dataclass(frozen=True)
class Walked:
    """The level of a series tonight.

    Attributes:
        levels: Every level, oldest first.
        stack: Those in force: the reference, and the slowdowns on top of it.
        top: The distribution of tonight's result on the top level, by the results before; None without any.
        reference: The same on the reference.
        distance: Of tonight's result from the top level.
        p: Chance of such a distance on the top level, or on that of the newest A/B, by which history alone decides.
        ps: The chances of the newest nights, the newest first, as far as they are in the direction of tonight's.
        nights: How many nights in a row are out, tonight's included; negative if they are faster.
        beyond: Tonight's result is farther from all results of the level than they are from each other.
        far: How many nights in a row are so for the worse, by more than counts.
        rank: Chance of as many.
        back: Place of the first result that is back on a level below, if tonight's result continues there.
        inside: Places of an A/B's ends that may both be off the top level, as it found no difference.
        results: Number of earlier results of the level.
    """

    levels: tuple[Level, ...]
    stack: tuple[Level, ...]
    top: Predicted | None
    reference: Predicted | None
    distance: float = 0.0
    p: float = 1.0
    ps: tuple[float, ...] = ()
    nights: int = 0
    beyond: bool = False
    far: int = 0
    rank: float = 1.0
    back: int | None = None
    inside: tuple[int, int] | None = None
    results: int = 0

    @property
    def begins(self) -> int:
        """The place of the first of the nights that are out."""
        newest = self.stack[-1]
        return newest.places[-max(abs(self.nights), 1)]


def walk(
    y: Sequence[float],  # [n] of one machine, oldest first; tonight's is last
    least: float,  # smallest distance that counts
    prior: float,  # standard deviation to assume without results
    marks: Mapping[int, Sequence[Mark]] | None = None,  # by place
    errors: Sequence[float] | None = None,  # [n] standard errors of the results
    floor: float = 0.0,  # smallest standard deviation
    calm: Sequence[bool] | None = None,  # [n] results that `step` would only add, from `screen.calm_nights`
) -> Walked:
    """Follow a series to its newest result."""
    walker = _Walker(least, prior, floor, len(y))
    for place, value in enumerate(y):
        here = (marks or {}).get(place, ())
        if calm is not None and calm[place] and not here and len(walker.levels) == 1 and not walker.run | walker.far:
            top, walker.lost = walker.stack[-1], None  # it is neither out nor beyond the others
            walker.nights.append(_Night(value, results=len(top.values), level=top))
            top.values.append(value)
            top.places.append(place)
            continue
        error = errors[place] if errors is not None else 0.0
        walker.step(place, value, 0.0 if math.isnan(error) else error, here)
    return walker.walked()


@dataclass
class _Night:
    """A result with the distribution by the results before."""

    value: float
    top: Predicted | None = None
    p: float = 1.0
    alone: float = 1.0
    out: int = 0  # 1 slower, -1 faster, 0 neither
    beyond: bool = False
    results: int = 0
    level: Level | None = None


class _Walker:
    def __init__(self, least: float, prior: float, floor: float, n: int) -> None:
        self.least, self.prior, self.floor, self.n = least, prior, floor, n
        self.levels: list[Level] = []
        self.stack: list[Level] = []
        self.nights: list[_Night] = []
        self.run = 0  # results in a row that are out; negative if faster
        self.far = 0  # results in a row that are beyond all before, for the worse
        self.same: tuple[int, float] | None = None  # place and level of the newest A/B that found no difference
        self.back: int | None = None
        self.left: Level | None = None  # the level that the results seem to have left last
        self.inside: tuple[int, int] | None = None  # places of an A/B's base and head that may both be off the level
        self.lost: Level | None = None  # the suspected improvement that tonight's result has left

    # ---- one result

    def step(self, place: int, value: float, error: float, marks: Sequence[Mark]) -> None:
        """Add a result."""
        if not self.stack:
            before = next((mark.before for mark in marks if mark.before is not None), None)
            self._begin(Level(place if before is None else place - 1, known=before))
        night = self._seen(place, value, error)
        self.nights.append(night)
        self.lost = _lost(self, night)
        self.run = self.run + night.out if night.out and night.out * self.run >= 0 else night.out
        self.far = self.far + 1 if night.beyond and value > self._centre(self.stack[-1]) else 0
        accepted = [mark for mark in marks if mark.kind == "reference"]  # so an A/B at this place has nothing to add
        facts = accepted or [mark for mark in marks if mark.kind != "code"]
        decided = [self._mark(place, mark) for mark in facts]
        if any(decided):
            self.run = self.far = 0
        elif self.lost is not None and place == self.n - 1:  # only an A/B can tell whether it is lost
            self._begin_lost(self.lost, None)
            self.nights[-1] = self._seen(place, value, error)
            self.far = int(self.nights[-1].beyond)
        code = next((mark for mark in marks if mark.kind == "code"), None)
        if code is not None and _code_is_back(self, place, code.base or 0):
            self.nights[-1] = night = self._seen(place, value, error)
            self.run, self.far = night.out, int(night.beyond and night.out > 0)
        top = self.stack[-1]
        top.values.append(value)
        top.places.append(place)
        if not any(decided):
            self._by_nights(place)
        if len(self.stack) > 1 and self.stack[-1].start < place:
            self._return()

    def _seen(self, place: int, value: float, error: float) -> _Night:
        top = self.stack[-1]
        night = _Night(value, results=len(top.values), level=top)
        if not top.values and top.known is None:
            return night  # the first result
        centre = self._centre(top)
        distance = value - centre
        if abs(distance) <= self.least:
            return night
        night.top = predicted = self.predicted(top, abs(self.run))
        if place >= self.n - NIGHTS or abs(distance) >= predicted.reach(OUT):
            self._set_chance(night, place, distance, error, predicted)
        earlier = top.values[: len(top.values) - max(abs(self.run), self.far)]
        low, high = (min(earlier), max(earlier)) if earlier else (centre, centre)
        night.beyond = value > high + (high - low) if distance > 0 else value < low - (high - low)
        return night

    def _set_chance(self, night: _Night, place: int, distance: float, error: float, predicted: Predicted) -> None:
        value = night.value
        night.p = predicted.p(value, error)
        if self.same is not None and place - self.same[0] <= HOLDS:
            about = Predicted(self.same[1], predicted.deviation, predicted.freedom)
            near = abs(value - self.same[1]) <= self.least or (value - self.same[1]) * distance < 0
            night.p = max(night.p, 1.0 if near else about.p(value, error))
        night.alone = max(night.p, predicted.alone(value, error)) if night.p <= OUT else night.p
        if night.alone <= OUT:
            night.out = 1 if distance > 0 else -1

    def _begin_lost(self, lost: Level, by: Literal["nights"] | None) -> Level:
        top, self.lost = self.stack[-1], None  # it begins once, also if two A/Bs find the change after it
        lost = replace(lost, by=by)  # so that the level replaced by another is always the older one
        del top.values[-len(lost.values) :], top.places[-len(lost.places) :]
        self._begin(lost, replaces=0)
        return lost

    def _centre(self, level: Level) -> float:
        return lower_median(_certain(level.values, abs(self.run))[:FIRST]) if level.values else level.centre

    def predicted(self, level: Level, out: int = 0) -> Predicted:
        """Return the distribution of a level's next result. `out` is the number of newest results that are out."""
        others: list[float] = []
        if len(level.values) < LAST + LEFT_OUT:
            for other in reversed(self.levels):
                if other is not level and other.values and len(others) < LAST:
                    centre = lower_median(other.values[-LAST:])
                    others = [*(value - centre for value in other.values[-LAST:]), *others]
        return predict(
            _certain(level.values, out), others if len(others) > 1 else (), self.prior, self.floor, level.known
        )

    # ---- changes of the level

    def _begin(self, level: Level, *, replaces: int | None = None) -> None:
        """Put a level on the stack, in the place of those from `replaces` on."""
        if replaces is not None:
            level.replaced = self.stack[0] if replaces == 0 else None
            del self.stack[replaces:]
        self.stack.append(level)
        self.levels.append(level)
        self.run, self.far, self.same, self.left, self.inside = 0, 0, None, None, None

    def _mark(self, place: int, mark: Mark) -> bool:
        """Apply a fact. Return whether it decides about this result."""
        belongs = self._is_on_top(mark)
        while not belongs and len(self.stack) > 1 and (mark.kind == "same" or (mark.base or 0) >= self.stack[-1].start):
            self._end(place)
            belongs = self._is_on_top(mark)
        top = self.stack[-1]
        if mark.kind == "reference":
            was = self._centre(top) if top.values or top.known is not None else None
            self._begin(Level(place, by="reference", was=was, tag=mark.tag), replaces=0)
        elif mark.kind == "slower":
            if self.lost is not None and mark.base in self.lost.places:  # so it was an improvement
                top = self._begin_lost(self.lost, "nights")
            new = self._centre(top) + (mark.effect or 0.0) if mark.level is None else mark.level
            if belongs and self._never_left(mark, new):
                return True
            if not belongs or top.start == place:  # known already
                top.tag = mark.tag if top.tag is None else top.tag
                return True
            centre = self._centre(top) if mark.before is None else mark.before
            slower = _slower(self, place, centre, mark)
            slower.after = None if self.inside is None else mark.base
            self._begin_with_run(slower, top, mark.base)
        elif mark.kind == "same":
            level = self.nights[-1].value if mark.level is None else mark.level
            if belongs and self._never_left(mark, level):
                return True
            if belongs and mark.base is not None and _may_be_off(self, mark.base, level):
                self.inside = (mark.base if self.inside is None else min(mark.base, self.inside[0]), place)
                return False
            self.same, self.inside = (place, level), None
        elif self.nights[-1].out > 0:
            return False  # the results and the A/B contradict each other
        else:
            self._faster(place, mark, belongs)
        return True

    def _is_on_top(self, mark: Mark) -> bool:
        """Return whether the base of a mark is on the top level: nearer to it than to the one below, as far as known.

        The first night of a slowdown may have been too near to the old level to begin the new one, and the results may
        be back on the old level before they show it. So the level that an A/B measured comes before the place.
        """
        top, base = self.stack[-1], mark.base
        if base is None or len(self.stack) == 1 or (mark.level is None and base >= top.start):
            return base is None or base >= top.start
        value = self.nights[base].value if mark.level is None else mark.level - (mark.effect or 0.0)
        return abs(value - self._centre(top)) < abs(value - self._centre(self.stack[-2]))

    def _together(self, centre: float) -> int:
        """Return how many of the newest results that are out are on one level, by the sign of `run`.

        A result nearer to the old level than to tonight's value was out by chance: the change is after it.
        """
        newest = self.nights[len(self.nights) - abs(self.run) :]
        half = abs(self.nights[-1].value - centre) / 2
        number = next((at for at, each in enumerate(reversed(newest)) if abs(each.value - centre) < half), len(newest))
        return int(math.copysign(number, self.run)) if number else 0

    def _begin_with_run(self, level: Level, top: Level, base: int | None) -> None:
        """Begin a level with the newest results that are out, as far as they are after the base of its A/B."""
        number = self._together(self._centre(top)) - 1 if self.nights[-1].out > 0 and self.run else 0
        while number > 0 and base is not None and top.places[-number] <= base:
            number -= 1
        self._begin(level)
        if number > 0 and level.tag is None:
            level.start = top.places[-number]
            level.places, level.values = top.places[-number:], top.values[-number:]
            del top.places[-number:], top.values[-number:]

    def _never_left(self, mark: Mark, level: float) -> bool:
        """Return to the level that the results seemed to leave, if an A/B measured a level nearer to that one.

        It compared tonight's commit with one that seemed to be back, and found both slow; or with one from before the
        slowdown, and found it again.
        """
        left, base = self.left, mark.base
        if left is None or self.back is None or base is None or left in self.stack:
            return False
        if base < self.back if mark.kind == "same" else base >= left.start:
            return False
        if abs(level - left.centre) >= abs(level - self._centre(self.stack[-1])):
            return False
        self.stack.append(left)
        self.run, self.back, self.left = 0, None, None
        return True

    def _faster(self, place: int, mark: Mark, belongs: bool) -> None:
        top = self.stack[-1]
        if top.start == place:  # another A/B of this result has shown it
            return
        if not belongs:  # faster than the reference
            self._begin(Level(place, by="faster", was=self._centre(self.stack[0])), replaces=0)
            return
        error = math.hypot(mark.half, self.predicted(top).of_mean(math.inf).reach(OUT))
        self._lower(place, self._centre(top) + (mark.effect or 0.0), error)

    def _lower(self, place: int, centre: float, error: float = 0.0, count: int = 0) -> None:
        """Leave the top level for the better: for one below if results may be on it, and else for a new one.

        Args:
            place: Place of the first result that has left it.
            centre: Where the results are now.
            error: Error of an A/B's `centre`.
            count: Number of results that show it, without an A/B.
        """
        below, reference = self.stack[:-1], self._centre(self.stack[0])
        depth = _nearest(self, centre, below)
        if below and _may_be_on(self, below[depth], centre, count or math.inf, error):
            shown = count or abs(centre - self._centre(below[depth])) <= self.least
            if shown or _may_be_on(self, below[depth], self.nights[-1].value):
                self._end(place, depth, by_results=count > 0)
                return
        if below and centre > reference:
            self._partly(place, centre)
        else:
            level = Level(place, None if count else centre, "nights" if count else "faster", reference)
            self._begin(level, replaces=0)

    def _partly(self, place: int, centre: float) -> None:
        """Continue the top level nearer to the reference."""
        old, by, gradual = self.stack[-1], self.stack[-1].by, self.stack[-1].gradual
        while len(self.stack) > 2 and centre <= self._centre(self.stack[-2]):
            by, gradual = self.stack.pop().by, False
            old = self.stack[-1]
        level = Level(old.start, known=centre, by=by, was=old.was, gradual=gradual, moved=place, tag=old.tag)
        self._begin(level, replaces=len(self.stack) - 1)

    def _end(self, place: int, depth: int | None = None, by_results: bool = False) -> None:
        """Go back to a level below, by default the next one. What only results show, an A/B may refute."""
        depth = len(self.stack) - 2 if depth is None else depth
        self.left, below = self.stack[depth + 1] if by_results else None, self.stack[depth]
        again = replace(below, known=self._centre(below))
        self.run, self.far, self.back, self.same, self.inside = 0, 0, place, None, None
        self.stack[depth:] = [again]
        self.levels[self.levels.index(below)] = again

    def _by_nights(self, place: int) -> None:
        """Begin or end a level after enough results in a row that are out."""
        if abs(self.run) < NIGHTS or place + 1 < NIGHTS + ENOUGH:
            return
        top, slower, number = self.stack[-1], self.run > 0, abs(self._together(self._centre(self.stack[-1])))
        if number < NIGHTS:
            return
        places, values = top.places[-number:], top.values[-number:]
        del top.places[-number:], top.values[-number:]
        self.run = 0
        centre, now = self._centre(top), lower_median(values)
        if slower:
            jump = values[0] - (top.values[-1] if top.values else centre)
            level = Level(places[0], by="nights", was=centre, gradual=jump < (now - centre) / 2)
            replaces: int | None = None
            if level.gradual and top.by == "nights" and len(self.stack) > 1:  # it drifts on: one row shows the sum
                level, replaces = replace(level, start=top.start, was=top.was, tag=top.tag), len(self.stack) - 1
            self._begin(level, replaces=replaces)
        else:
            self._lower(places[0], now, count=number)
        self.stack[-1].values += values
        self.stack[-1].places += places

    def _return(self) -> None:
        """End the top level if the newest results are far more likely on one below it."""
        top = self.stack[-1]
        depth = _nearest(self, top.values[-1], self.stack[:-1])
        below = self.stack[depth]
        measured = [] if top.known is None else [top.known]
        middle = (self._centre(below) + (measured or [self._centre(top)])[0]) / 2
        count = next((at for at, each in enumerate(reversed(top.values)) if each >= middle), len(top.values))
        places, values, earlier = top.places[-count:], top.values[-count:], top.values[:-count][:FIRST]
        levels = [*measured, *([lower_median(earlier)] if earlier else [])]  # an A/B shows more than the first result
        if not count or not levels:
            return
        mean = math.fsum(values) / count
        # a young level needs an A/B
        chance = 0.0 if len(below.values) < NIGHTS else self.predicted(below).of_mean(count).p(mean)
        chance = 1.0 if mean - self._centre(below) <= self.least else chance
        on_top = replace(self.predicted(top, count).of_mean(count), centre=min(levels))
        if chance <= OUT or on_top.p(mean) > RARE * chance:  # on neither level, or not certainly on the lower one
            return
        del top.places[-count:], top.values[-count:]
        self._end(places[0], depth, by_results=True)
        top = self.stack[-1]
        top.values += values
        top.places += places  # its first result may be out there, for the better
        if len(top.values) > 1 and self._centre(top) - values[-1] > self.least:
            self.run = -1 if self.predicted(top, 1).p(values[-1]) <= OUT else 0

    # ---- tonight

    def walked(self) -> Walked:
        night, top = self.nights[-1], self.stack[-1]
        if not night.results and top.known is None:
            return Walked(tuple(self.levels), tuple(self.stack), None, None)
        new = night.level is not top  # tonight's result began or ended a level
        predicted = _without_newest(self, top) if new or night.top is None else night.top
        centre = predicted.centre if predicted else top.centre
        side = 1 if night.value >= centre else -1

        def continues(each: _Night) -> bool:
            return (each.value - centre) * side > 0 and each.top is not None and each.level is top

        newest = () if new else takewhile(continues, self.nights[: -NIGHTS - 1 : -1])
        return Walked(
            tuple(self.levels),
            tuple(self.stack),
            predicted,
            _without_newest(self, self.stack[0]),
            distance=night.value - centre,
            p=1.0 if new else night.alone,
            ps=tuple(each.p for each in newest),
            nights=self._together(centre),
            beyond=night.beyond and not new,
            far=0 if new else self.far,
            rank=1.0 if new else rank_chance(len(top.values) - self.far, self.far),
            back=self.back,
            inside=self.inside if self.inside and len(self.nights) - 1 - self.inside[1] <= HOLDS else None,
            results=night.results,
        )


def _nearest(walker: _Walker, value: float, levels: Sequence[Level]) -> int:
    """Return the depth of the level nearest to a value."""
    return min(range(len(levels)), key=lambda depth: abs(value - walker._centre(levels[depth])), default=-1)


def _may_be_on(walker: _Walker, level: Level, mean: float, count: float = 1, error: float = 0.0) -> bool:
    """Return whether new results' mean, or an A/B's with its error, may be a level's. A young one is exact."""
    reach = 0.0 if len(level.values) < NIGHTS else walker.predicted(level).of_mean(count).reach(OUT)
    return abs(mean - walker._centre(level)) <= max(walker.least, math.hypot(error, reach))


def _slower(walker: _Walker, place: int, centre: float, mark: Mark) -> Level:
    """Return the level that begins with a known slowdown."""
    effect, newest = mark.effect or 0.0, walker.stack[-1].values[-NIGHTS:]
    step = walker.nights[-1].value - lower_median(newest) if newest else effect
    gradual = mark.tag is None and step < effect / 2
    return Level(place, centre + effect, "slower", centre, gradual, tag=mark.tag)


def _without_newest(walker: _Walker, level: Level) -> Predicted | None:
    """Return the distribution of tonight's result on a level."""
    newest = bool(level.places) and level.places[-1] == len(walker.nights) - 1
    value = level.values.pop() if newest else None
    try:
        return walker.predicted(level, abs(walker.run)) if level.values or level.known is not None else None
    finally:
        if value is not None:
            level.values.append(value)


def _lost(walker: _Walker, night: _Night) -> Level | None:
    """Return the level of a suspected improvement which a result has left, if that was not yet certain."""
    number, top = -walker.run, walker.stack[-1]
    if len(walker.stack) > 1 or number < TO_SUSPECT or number >= len(top.values) or night.out < 0:
        return None
    lost = Level(top.places[-number], was=walker._centre(top))
    lost.values, lost.places = top.values[-number:], top.places[-number:]
    return lost if night.value - lost.centre > walker.least else None


def _code_is_back(walker: _Walker, place: int, base: int) -> bool:
    """End the levels above the one with a result of the same code, whatever the latency is now.

    Equal code cannot be slower than itself. If the latency has stayed, something else has made it slow.
    """
    depth = next((depth for depth, level in enumerate(walker.stack[:-1]) if base in level.places), None)
    if depth is not None:
        walker._end(place, depth)
    return depth is not None


def _may_be_off(walker: _Walker, base: int, level: float) -> bool:
    """Return whether the base of an A/B without a difference may be off the top level already.

    A step before it may be hidden in the scatter, unless the results since then rule out the level that the A/B
    measured.
    """
    top = walker.stack[-1]
    number = sum(place < base for place in top.places)
    since, before = top.values[number:], top.values[:number]
    if not since or base <= top.sure or level - walker._centre(top) <= walker.least:
        return False
    middle = math.fsum(since) / len(since)
    predicted = predict(before, (), walker.prior, walker.floor)
    about = Predicted(level, predicted.deviation / math.sqrt(len(since)), predicted.freedom)
    return middle >= level or about.p(middle) > OUT


def _certain(values: Sequence[float], out: int) -> Sequence[float]:
    """Return the results of a level without the newest ones, which may belong to the next level."""
    kept = settled(values)
    return values[:-out] if out > len(values) - len(kept) and out < len(values) else kept
