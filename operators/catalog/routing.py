"""Rows per expert: a mixture-of-experts router's loads, as a function of a text.

A routing is text, so that a shape can contain it: `balanced`, `uniform(0.7,1.3)`, `zipf(1.2)` or `multinomial`.
`+empty(0.1)` may follow each of these: then a tenth of the experts get no rows. `loads(5|0|3)` gives the loads
themselves. `interleaved(128)` deals blocks of 128 rows to the experts in turn. The same text, G and M always give the
same rows: NEP 19 promises that the stream of numpy's legacy generator does not change, unlike that of the newer one.
"""

from __future__ import annotations

import re
import zlib

from groupbench.operators.deferred import np
from groupbench.tracker.text.wording import counted

_TEXT = re.compile(
    r"(?P<name>balanced|multinomial|uniform|zipf)"
    r"(?:\((?P<args>[0-9.]+(?:,[0-9.]+)?)\))?"
    r"(?:\+empty\((?P<empty>0?\.[0-9]+|0)\))?"
)
_LOADS = re.compile(r"loads\((?P<loads>[0-9]{1,15}(?:\|[0-9]{1,15})*)\)")
_INTERLEAVED = re.compile(r"interleaved\(([1-9][0-9]{0,8})\)")
_ARGS = {"balanced": 0, "multinomial": 0, "uniform": 2, "zipf": 1}
MAX_ARGUMENT = 1000
HELP = "balanced, uniform(LOW,HIGH), zipf(S), multinomial; optionally +empty(SHARE); or loads(5|0|3), interleaved(ROWS)"


def interleaved(text: str) -> int:
    """Return the rows of the blocks that a routing deals to the experts in turn; 0 for another routing."""
    match = _INTERLEAVED.fullmatch(text)
    return int(match[1]) if match else 0


def check(text: str, groups: int | None = None) -> None:
    """Check that `text` is a routing, and its loads, if any, are those of `groups` experts. Raises ValueError."""
    if interleaved(text):
        return
    name, args, _ = _parse(text)
    if name == "loads" and groups not in (None, len(args)):
        raise ValueError(f"routing loads(...) has {counted(len(args), 'expert')}, and the shape {groups}")


def rows(text: str, groups: int, total: int) -> tuple[int, ...]:
    """Return the rows for each of `groups` experts; they sum to `total`. Raises ValueError.

    balanced       total / groups, the remainder over the first experts
    uniform(a,b)   loads drawn from U(a, b) times the mean
    zipf(s)        each row goes to the expert of rank r with probability ~ r^-s; ranks are shuffled over experts
    multinomial    each row goes to any expert with the same probability
    loads(a|b|c)   in proportion to a, b and c
    interleaved(b) blocks of b rows, of which expert g gets those with number % groups == g
    +empty(share)  that share of the experts, chosen at random, get no row
    """
    if block := interleaved(text):
        ends = [min(total, start + block) for start in range(0, total, block)]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return tuple(sum(sizes[g::groups]) for g in range(groups))
    name, args, empty = _parse(text)
    if name == "loads":
        check(text, groups)
        return tuple(int(count) for count in _apportion(np.array(args), total))
    random = np.random.RandomState(zlib.crc32(f"{text} {groups} {total}".encode()))
    order = random.permutation(groups)
    active = order[: max(1, groups - round(groups * empty))]
    counts = np.zeros(groups, dtype=np.int64)
    n = len(active)
    if name == "balanced":
        counts[np.sort(active)] = total // n + (np.arange(n) < total % n)
    elif name == "uniform":
        counts[active] = _apportion(random.uniform(args[0], args[1], n), total)
    else:
        weights = np.arange(1, n + 1) ** -args[0] if name == "zipf" else np.ones(n)
        counts[active] = random.multinomial(total, weights / weights.sum())
    return tuple(int(count) for count in counts)


def _parse(text: str) -> tuple[str, tuple[float, ...], float]:
    if listed := _LOADS.fullmatch(text):
        loads = tuple(float(load) for load in listed["loads"].split("|"))
        if not any(loads):
            raise ValueError(f"routing {text!r}: all loads are 0")
        return "loads", loads, 0.0
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"routing {text!r} is not one of: {HELP}")
    args = tuple(float(value) for value in match["args"].split(",")) if match["args"] else ()
    if len(args) != _ARGS[match["name"]]:
        takes = counted(_ARGS[match["name"]], "number")
        raise ValueError(f"routing {text!r}: {match['name']} takes {takes}; one of: {HELP}")
    if match["name"] == "uniform" and not 0 <= args[0] <= args[1] > 0:
        raise ValueError(f"routing {text!r}: uniform takes LOW <= HIGH, HIGH above 0")
    if any(value > MAX_ARGUMENT for value in args):
        raise ValueError(f"routing {text!r}: numbers must be at most {MAX_ARGUMENT}")
    return match["name"], args, float(match["empty"] or 0)


def _apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers in proportion to the weights, summing to `total`: the largest remainders are rounded up."""
    exact = weights / weights.sum() * total
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts
