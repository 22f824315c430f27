"""Build the shell command that measures a cell again, to run in a checkout of the measured repository."""

from __future__ import annotations

import re
import shlex
from typing import Protocol

from groupbench.tracker.facts.metrics import Metric
from groupbench.tracker.facts.record import Environment


class Comparable(Protocol):
    """The fields that identify a cell to the commands that compare two commits."""

    @property
    def operator(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> str: ...


class Measurable(Comparable, Protocol):
    """The fields that identify a cell, as a series has them."""

    @property
    def host(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    @property
    def seed(self) -> int: ...


HOSTS = ("builtin", "tritonbench")
"""The hosts whose cells groupbench can measure again. Others are tests of pytest, and imports."""

_HASH = re.compile(r"[0-9a-f]{7,64}")


_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def measure(
    cell: Measurable, commit: str | None, environment: Environment | None, metric: Metric | None = None
) -> str | None:
    """Return the command that measures a cell at a commit: same shape, seed, protocol and device.

    Returns None for a cell of an import, which another program has measured.

    Args:
        commit: Full hash; left out if it is not a git hash, as in some imports.
        environment: Where the cell was measured; its device and its card are left out if it is unknown.
        metric: A metric to measure in addition to the latency.
    """
    switch = f"git switch --detach {commit} && " if commit and _HASH.fullmatch(commit) else ""
    if cell.host == "pytest":
        parameters = cell.shape.partition(" #")[0]
        test = cell.operator if parameters == "default" else f"{cell.operator}[{parameters}]"
        return switch + _visible(environment) + shlex.join(["pytest", "--groupbench", test])
    if cell.host not in HOSTS:
        return None
    words = ["tritonbench", "--host", cell.host, "--op", cell.operator, "--only", cell.backend]
    words += ["--shapes", cell.shape, "--precision", cell.dtype, "--mode", cell.mode, "--seed", str(cell.seed)]
    words += [*_protocol(cell.protocol), *_device(environment)]
    if metric is not None:
        words += ["--costs", metric.cost] if metric.cost else []
        words += ["--metrics", f"latency,{metric.name}"]
    return switch + _visible(environment) + shlex.join(words)


def compare(cell: Measurable, base: str, head: str, environment: Environment | None) -> str | None:
    """Return the command to measure a cell at two commits alternately, on the same device.

    Falls back to `measure` at `head` if the cell is of a host that cannot be compared so.
    """
    if cell.host not in HOSTS:
        return measure(cell, head, environment)
    words = ["groupbench", "ab", base, head, *_selected(cell)]
    words += ["--input-seed", str(cell.seed)] if cell.seed else []
    _, *timing = cell.protocol.split("+")  # an A/B has a protocol of its own, which takes these two
    words += [word for part in timing if part == "cudagraph" or part.startswith("idle=") for word in _option(part)]
    return _visible(environment) + shlex.join([*words, *_device(environment)])


SEARCHED = ("latency", "accuracy")
"""The metrics whose change `groupbench bisect` finds."""

SEARCH_OF = {"latency": "latency", "accuracy": "accuracy", "result": "accuracy"}
"""The metric whose search finds a change, by the metric that changed. A wrong result is worse than any correct one."""


def search(program: list[str], series: int, base: str, head: str, metric: str, environment: Environment) -> str:
    """Return the command that finds the commit in `base..head` that changed a stored series.

    Args:
        program: `groupbench` with its own options.
        metric: One of SEARCHED.
        environment: Where the series was measured.
    """
    words = [*program, "bisect", base, head, "--series", str(series)]
    words += ["--metric", metric] if metric != "latency" else []
    return _visible(environment) + shlex.join([*words, *_device(environment)])


def search_cell(program: list[str], cell: Comparable, base: str, head: str, metric: str, device: str) -> str:
    """Return the command that finds the commit in `base..head` that changed a cell, without a database.

    Args:
        program: `groupbench` with its own options.
        metric: One of SEARCHED.
    """
    words = [*program, "bisect", base, head, *_selected(cell)]
    words += ["--metric", metric] if metric != "latency" else []
    return shlex.join([*words, "--device", device])


def _selected(cell: Comparable) -> list[str]:
    words = ["--operator", cell.operator, "--backend", cell.backend]
    return [*words, "--shape", cell.shape, "--dtype", cell.dtype, "--mode", cell.mode]


def _protocol(label: str) -> list[str]:
    """Return the options for a protocol by name, such as `cooled+idle=0.5s+cudagraph`."""
    name, *rest = label.split("+")
    words = ["--protocol", name] if name != "cooled" else []
    return words + [word for part in rest for word in _option(part)]


def _option(part: str) -> list[str]:
    key, _, value = part.partition("=")
    return [f"--{key}", value] if value else [f"--{key}"]


def _device(environment: Environment | None) -> list[str]:
    return ["--device", environment.device] if environment is not None else []


def _visible(environment: Environment | None) -> str:
    """Return the assignment that selects the NVIDIA card, of which a machine may have several."""
    if environment is None or environment.cuda is None or not _UUID.fullmatch(environment.gpu_uuid or ""):
        return ""
    return f"CUDA_VISIBLE_DEVICES={environment.gpu_uuid} "
