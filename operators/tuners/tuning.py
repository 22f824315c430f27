"""Parts that all tuners share: the timing of candidates, the loop over problems, the file that ships, and options.

All configs of a problem are timed in turns, one burst each after a pause, so a drift of the clocks affects them alike.
After every round, configs that are clearly slower than the fastest one drop out. The time of a config is the median of
its bursts. A difference of less than half a percent is noise, and then either config is a good choice.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import click

from groupbench.operators.dtypes import BYTES
from groupbench.operators.measure.faults import describe
from groupbench.operators.measure.protocol import GpuTimer, Protocol
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools.parameters import Duration

Problem = TypeVar("Problem")
Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Search:
    """The configs to try for a problem.

    key         key of the problem in files of tuned configs
    default     config used without tuning; the margin is over this one
    candidates  configs that are legal on this GPU
    prepares    config -> callable; the time of a config is the sum over these callables
    """

    key: str
    default: Any
    candidates: list[Any]
    prepares: tuple[Callable[[Any], Callable[[], object]], ...]

    def times(self) -> list[tuple[float, Any]]:
        """Return (ms, config) for every candidate that runs."""
        return time_each(self.candidates, *self.prepares)

    def keyed_times(self) -> tuple[str, list[tuple[float, Any]]]:
        """Return (key, times), as `tune` takes them."""
        return self.key, self.times()


PROTOCOL = Protocol(samples=8, warmups=2, idle_s=0.12)
SLOWEST = (1.10, 1.03, 1.015)
"""After each round but the last: the largest time relative to the fastest with which a config is timed again."""


def burst_of(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that pauses, times a burst and returns its median in ms. Raises errors of the first call."""
    timer = GpuTimer(run, PROTOCOL)

    def burst() -> float:
        time.sleep(PROTOCOL.idle_s)
        return statistics.median(timer.burst())

    return burst


def fastest_burst(run: Callable[[], object]) -> float:
    """Return the milliseconds of a call: the smaller median of two bursts. Errors of the first call are raised."""
    burst = burst_of(run)
    return min(burst(), burst())


def time_each(
    configs: Iterable[Config], *prepares: Callable[[Config], Callable[[], object]]
) -> list[tuple[float, Config]]:
    """Return (ms, config) for each config that runs; the ms are a sum over `prepares`. Print the configs that fail."""
    candidates = []
    for config in configs:
        try:
            bursts = [burst_of(prepare(config)) for prepare in prepares]
            candidates.append((config, bursts, [_sum(bursts)]))
        except Exception as error:
            click.echo(f"  {config} does not run: {describe(error)}", err=True)
    for slowest in SLOWEST:
        fastest = min((min(times) for _, _, times in candidates), default=0.0)
        for _, bursts, times in candidates:
            if min(times) <= slowest * fastest:
                times.append(_sum(bursts))
    return [(statistics.median(times), config) for config, _, times in candidates]


def _sum(bursts: Iterable[Callable[[], float]]) -> float:
    return sum(burst() for burst in bursts)


def tune(
    output: Path,
    about: str,
    problems: Mapping[str, Problem],
    times_of: Callable[[Problem], tuple[str, list[tuple[float, Any]]]],
    *packages: str,
    limit_s: float = math.inf,
    rate: Callable[[Problem, float], str] = lambda problem, ms: "",
    keep: bool = True,
    sort: bool = False,
) -> None:
    """Write the fastest config of each problem, after every problem, until the time is up.

    about, packages  as in write_tuned
    problems         problems by the name to print
    times_of         problem -> its key in the file, and (ms, config) per candidate that runs; configs are dataclasses
    limit_s          seconds after which no further problem is started
    rate             (problem, ms) -> text to print after a time
    keep             keep the file's configs of problems that are not tuned now
    sort             write configs sorted by key, not in the order of problems

    Raises click.UsageError without a GPU; click.ClickException, at the end, if no config ran for a problem.
    """
    import torch

    require_gpu()
    configs = read_tuned(output) if keep else {}
    without = []
    end = time.monotonic() + limit_s
    for number, (name, problem) in enumerate(problems.items()):
        if time.monotonic() > end:
            click.echo(f"time is up: {counted(len(problems) - number, 'problem')} left", err=True)
            break
        key, times = times_of(problem)
        by_time = [(ms, dataclasses.asdict(config)) for ms, config in sorted(times, key=itemgetter(0))]
        click.echo(name)
        for ms, config in by_time:
            fields = " ".join(f"{field}={value}" for field, value in config.items())
            click.echo(f"  {ms:.4f} ms{rate(problem, ms)} {fields}")
        if by_time:
            configs[key] = by_time[0][1]
            write_tuned(output, about, dict(sorted(configs.items())) if sort else configs, *packages)
        else:
            without.append(name)
        torch.cuda.empty_cache()
    if without:
        raise click.ClickException(f"no config runs for {'; '.join(without)}")


def require_gpu() -> None:
    """Check that torch sees a GPU. Raises click.UsageError."""
    import torch

    if not torch.cuda.is_available():
        raise click.UsageError("tuning needs the GPU to tune for; torch does not see one")


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    """Return the fields of each config by problem; an empty dict if the file does not exist."""
    if not path.exists():
        return {}
    configs: dict[str, dict[str, Any]] = json.loads(path.read_text())["configs"]
    return configs


def measured_on(*packages: str) -> str:
    """Return the GPU's name, and the versions of torch, Triton and `packages`."""
    from importlib.metadata import version

    import torch
    import triton

    versions = [f"torch {torch.__version__}", f"triton {triton.__version__}", *(f"{p} {version(p)}" for p in packages)]
    return ", ".join([torch.cuda.get_device_name(), *versions])


def write_tuned(path: Path, about: str, configs: dict[str, dict[str, Any]], *packages: str) -> None:
    """Write the file, one config per line, with the GPU and the versions of torch, Triton and `packages`.

    about  description, stored in the file
    """
    measured = measured_on(*packages)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(config)}" for key, config in configs.items())
    text = (
        f'{{\n "about": {json.dumps(about)},\n "measured": {json.dumps(measured)},\n "configs": {{\n{lines}\n }}\n}}\n'
    )
    with whole_file(path, click.ClickException) as file:
        file.write(text.encode())


# --- options ----------------------------------------------------------------------------------------------------------


def output_option(required: bool = True) -> Callable[[Any], Any]:
    """Return the option of `output`, the file to write."""
    kind = click.Path(path_type=Path)
    return click.option("-o", "--output", "--out", type=kind, required=required, help="File to write or update.")


def suite_option(names: Iterable[str], *default: str) -> Callable[[Any], Any]:
    """Return the option of `suites`, whose problems are tuned."""
    return click.option(
        "--suite", "suites", multiple=True, type=click.Choice(list(names)), default=default, show_default=True
    )


def limit_option(seconds: float) -> Callable[[Any], Any]:
    """Return the option of `limit`, the seconds after which no further problem is started."""
    help = "Start no further problem after this time."
    return click.option(
        "--limit", "--budget", "limit", type=Duration(), default=f"{seconds:g}s", show_default=True, help=help
    )


shape_option = click.option("--shape", "--shapes", "texts", multiple=True, help="Shapes to tune instead of suites.")
dtype_option = click.option(
    "--dtype", "--precision", "dtype", type=click.Choice(list(BYTES)), default="bf16", show_default=True
)


def chosen(parse: Callable[[str], Problem], texts: Iterable[str], others: Iterable[Problem]) -> dict[str, Problem]:
    """Return shapes by their text, each once: those of `texts`, or `others` if `texts` is empty.

    Raises click.BadParameter for a text that is not a shape.
    """
    try:
        shapes = [parse(text) for text in texts] or list(others)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shape") from error
    return {str(shape): shape for shape in shapes}
