"""What the tuners share: their options, how a candidate is timed, the loop over problems, and the file that ships.

What is compared is a cooled burst of each config, the faster of two, so that a difference below half a percent is luck;
it costs nothing to choose either then.
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
from groupbench.operators.sizes import counted
from groupbench.tracker.durations import Duration
from groupbench.tracker.text.files import whole_file

Problem = TypeVar("Problem")
Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Search:
    """What is tried for a problem.

    key         of the problem in files of tuned configs
    default     the config without tuning, which the margin is over
    candidates  configs that are legal on this GPU
    prepares    what is timed of a config: a callable of each, all together
    """

    key: str
    default: Any
    candidates: list[Any]
    prepares: tuple[Callable[[Any], Callable[[], object]], ...]

    def times(self) -> list[tuple[float, Any]]:
        """(ms, config) of every candidate that runs."""
        return time_each(self.candidates, *self.prepares)


PROTOCOL = Protocol(bursts=2, samples=6, warmups=2, idle_s=0.12)


def fastest_burst(run: Callable[[], object]) -> float:
    """Milliseconds of a call: the median of a burst, the faster of two bursts. Raises what the first call raises."""
    timer = GpuTimer(run, PROTOCOL)

    def burst() -> float:
        time.sleep(PROTOCOL.idle_s)
        return statistics.median(timer.burst())

    return min(burst() for _ in range(PROTOCOL.bursts))


def time_each(
    configs: Iterable[Config], *prepares: Callable[[Config], Callable[[], object]]
) -> list[tuple[float, Config]]:
    """(ms of all that is prepared, config) of each that runs. What another Triton cannot compile is said."""
    times = []
    for config in configs:
        try:
            times.append((sum(fastest_burst(prepare(config)) for prepare in prepares), config))
        except Exception as error:
            click.echo(f"  {config} does not run: {describe(error)}", err=True)
    return times


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
    """Write the fastest config of each problem, after every problem, until the time is up; one begun is ended.

    about, packages  as in write_tuned
    problems         by the name that is printed
    times_of         a problem's key in the file, and (ms, config, a dataclass) of what of its candidates runs
    rate             what is printed behind a time
    keep             what the file holds already stays where it is not tuned now
    sort             configs are written in the order of their keys, else as they came

    Raises click.UsageError without a GPU; click.ClickException, at the end, for problems of which nothing ran.
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
        found = [(ms, dataclasses.asdict(config)) for ms, config in sorted(times, key=itemgetter(0))]
        click.echo(name)
        for ms, config in found:
            fields = " ".join(f"{field}={value}" for field, value in config.items())
            click.echo(f"  {ms:.4f} ms{rate(problem, ms)} {fields}")
        if found:
            configs[key] = found[0][1]
            write_tuned(output, about, dict(sorted(configs.items())) if sort else configs, *packages)
        else:
            without.append(name)
        torch.cuda.empty_cache()
    if without:
        raise click.ClickException(f"no config runs for {'; '.join(without)}")


def require_gpu() -> None:
    """Raises click.UsageError without one."""
    import torch

    if not torch.cuda.is_available():
        raise click.UsageError("tuning needs the GPU that it is for; torch sees none here")


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    """Fields of the config by problem; none if there is no file yet."""
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
    """Write the file, a config a line, and on what it was tuned: the GPU, torch, Triton and `packages`."""
    measured = measured_on(*packages)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(config)}" for key, config in configs.items())
    text = (
        f'{{\n "about": {json.dumps(about)},\n "measured": {json.dumps(measured)},\n "configs": {{\n{lines}\n }}\n}}\n'
    )
    with whole_file(path, click.ClickException) as file:
        file.write(text.encode())


# --- options ----------------------------------------------------------------------------------------------------------


def output_option(required: bool = True) -> Callable[[Any], Any]:
    """`output`, the file."""
    kind = click.Path(path_type=Path)
    return click.option("-o", "--output", "--out", type=kind, required=required, help="File to write, or to add to.")


def suite_option(names: Iterable[str], *default: str) -> Callable[[Any], Any]:
    """`suites`, of which every problem is tuned."""
    return click.option(
        "--suite", "suites", multiple=True, type=click.Choice(list(names)), default=default, show_default=True
    )


def limit_option(seconds: float) -> Callable[[Any], Any]:
    """`limit`, after which no problem is begun."""
    help = "A problem that has begun is finished."
    return click.option(
        "--limit", "--budget", "limit", type=Duration(), default=f"{seconds:g}s", show_default=True, help=help
    )


shape_option = click.option("--shape", "--shapes", "texts", multiple=True, help="Shapes in place of suites.")
dtype_option = click.option(
    "--dtype", "--precision", "dtype", type=click.Choice(list(BYTES)), default="bf16", show_default=True
)


def chosen(parse: Callable[[str], Problem], texts: Iterable[str], others: Iterable[Problem]) -> dict[str, Problem]:
    """Shapes by their text, each once: those that `texts` name, or the others where there are none.

    Raises click.BadParameter for a text that names none.
    """
    try:
        shapes = [parse(text) for text in texts] or list(others)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shape") from error
    return {str(shape): shape for shape in shapes}
