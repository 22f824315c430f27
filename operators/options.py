"""The options of `tritonbench`, in groups: what is measured, where, how, and what becomes of the results.

What `groupbench` calls --operator, --backend, --shape and --dtype, TritonBench calls --op, --only, --shapes and
--precision. Both programs take both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import click

from groupbench.tracker import completion
from groupbench.tracker.durations import Duration

F = TypeVar("F", bound=Callable[..., Any])

SHAPES = ("--shapes", "--shape")

COSTS = ("memory", "kernels", "energy", "cold")
"""operators/measure/costs.py, which is not imported for a help text."""

PATH = click.Path(path_type=Path)


def _commas(context: click.Context, parameter: click.Parameter, value: Any) -> tuple[str, ...]:
    """`a,b --only c` as (a, b, c)."""
    values = value if isinstance(value, tuple) else () if value is None else (value,)
    parts = tuple(part.strip() for text in values for part in text.split(",") if part.strip())
    if values and not parts:
        raise click.BadParameter("names nothing")
    return parts


class _Finite(click.FloatRange):
    """A number: float() reads nan and inf too, and no comparison catches nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is no finite number", param, ctx)


def _is_flag(arg: str) -> bool:
    """A shape may begin with a minus too, and its error says what is wrong with it."""
    return arg.startswith("-") and not arg[1:2].isdigit()


def _costs(context: click.Context, parameter: click.Parameter, value: Any) -> tuple[str, ...]:
    """`memory,energy` as (memory, energy)."""
    names = _commas(context, parameter, value)
    if names in (("all",), ("none",)):
        return COSTS if names == ("all",) else ()
    unknown = [name for name in names if name not in COSTS]
    if unknown:
        raise click.BadParameter(f"no cost {unknown[0]!r}; there are: {', '.join(COSTS)}, all, none")
    return names


class GreedyShapes(click.Command):
    """Lets `--shapes 4,1024,1024,1024 8,512,512,512` take several values, as TritonBench's argparse does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spelled: list[str] = []
        greedy = False
        for arg, after in pairwise([*args, "-"]):
            if _is_flag(arg):
                greedy = arg in SHAPES
                if greedy and _is_flag(after):
                    raise click.UsageError(f"{arg} takes at least one shape", ctx)
                if not greedy:
                    spelled.append(arg)
            elif greedy:
                spelled += [SHAPES[0], arg]
            else:
                spelled.append(arg)
        return super().parse_args(ctx, spelled)


def _group(*options: Callable[[F], F]) -> Callable[[F], F]:
    def apply(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def _names(*flags: str, help: str, type: click.ParamType | None = None) -> Callable[[F], F]:
    return click.option(*flags, type=type, multiple=True, callback=_commas, metavar="NAME,...", help=help)


def _catalog_operators(context: click.Context) -> list[str]:
    """Return the operators to propose besides those of the database: plugins would have to be imported for theirs."""
    from groupbench.operators.registry import CATALOG

    return list(CATALOG)


def _catalog_backends(context: click.Context) -> list[str]:
    """Return groupbench's own backends of the operators that the command line names."""
    from groupbench.operators.registry import CATALOG, catalog_operator

    named = [name for name in completion.operators_of(context) if name in CATALOG]
    return [backend.name for name in named for backend in catalog_operator(name).backends]


OPERATORS = completion.OperatorName(commas=True, further=_catalog_operators)
BACKENDS = completion.BackendName(commas=True, further=_catalog_backends)


cells = _group(
    _names("--op", "--operator", "ops", help="Operators to measure, by comma.", type=OPERATORS),
    _names("--only", "--backend", "only", help="Only these backends, by comma.", type=BACKENDS),
    _names("--skip", help="All backends but these.", type=BACKENDS),
    _names("--suite", "suites", help="Named suites of shapes."),
    click.option(
        *SHAPES,
        "shapes",
        multiple=True,
        metavar="SHAPE ...",
        help="G,M,N,K with M rows a group, or a shape's text or name.",
    ),
    click.option(
        "--routing-trace",
        type=PATH,
        help="Give shapes the rows of a routing dump's steps: topk_ids as .npy or .jsonl, or a .csv.",
    ),
    click.option(
        "--trace-steps",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        help="How many steps of the trace, evenly over time.",
    ),
    click.option(
        "--input-id", "input_id", callback=_commas, help="Which inputs: one to start from, or several by comma."
    ),
    click.option("--num-inputs", type=click.IntRange(min=1), help="How many inputs."),
    click.option("--mode", default="fwd", show_default=True, help="fwd; bwd, fwd_bwd where the operator has them."),
    click.option(
        "--precision",
        "--dtype",
        "precision",
        callback=_commas,
        metavar="NAME,...",
        help="bf16, fp16, fp32, fp8, by comma. [bf16; fp16 on a CPU]",
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the inputs."),
    click.option("--plan", type=PATH, help="Measure what this groupbench.toml says."),
    click.option(
        "--rivals",
        type=click.Choice(["installed", "all"]),
        is_flag=False,
        flag_value="installed",
        help="Measure other projects' kernels too; all: those that are not installed become unavailable.",
    ),
    click.option(
        "--plugin",
        "plugins",
        multiple=True,
        metavar="MODULE.NAME|FILE.py",
        help="Further operators and backends; may be repeated.",
    ),
)
"""Which cells are measured."""

places = _group(
    click.option("--host", type=click.Choice(["auto", "builtin", "tritonbench"]), default="auto", show_default=True),
    click.option("--device", "-d", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True),
    click.option(
        "--gpus", metavar="all|0,1,...", help="GPUs of this host, a queue each. [a plan: all; else the first]"
    ),
    click.option("--scheduler", metavar="tcp://HOST:PORT", help="Measure on the workers of a Dask scheduler."),
    click.option(
        "--slurm", metavar="NAME=VALUE,...", help="Measure by SLURM jobs, such as partition=gpu,constraint=h100."
    ),
    click.option("--hardware", metavar="PATTERN", help="Only cards of this model, such as 'NVIDIA H100*'."),
)
"""On which host, device and cards."""

timing = _group(
    click.option("--rtol", type=_Finite(min=0), help="Relative tolerance, in place of the table's."),
    click.option(
        "--atol", type=_Finite(min=0), help="Absolute tolerance in units of the output's RMS, in place of the table's."
    ),
    click.option("--protocol", type=click.Choice(["cooled", "sustained"]), default="cooled", show_default=True),
    click.option("--bursts", type=click.IntRange(1, 1000), default=4, show_default=True, help="Bursts a cell."),
    click.option("--samples", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Runs a burst."),
    click.option("--idle", type=Duration(most=3600), default="0.3s", show_default=True, help="Rest before a burst."),
    click.option("--cudagraph", is_flag=True, help="Time replays of a captured CUDA graph."),
    click.option(
        "--costs",
        callback=_costs,
        default="memory",
        show_default=True,
        metavar="NAME,...",
        help="What a call costs besides latency, on a GPU: memory, kernels, energy, cold (compiling with empty caches, "
        "at the first shape); all, none.",
    ),
    click.option(
        "--timeout",
        type=Duration(least=0.1, most=1e6),
        default="300s",
        show_default=True,
        help="How long a cell may stay silent.",
    ),
    click.option(
        "--budget",
        type=Duration("m", most=6e6, above=True),
        help="What has not begun by then is left out, and recorded as skipped. A plain number is minutes.",
    ),
)
"""By which protocol, and for how long."""

results = _group(
    click.option(
        "--metrics", callback=_commas, metavar="NAME,...", help="Columns, by comma; --list-metrics names them."
    ),
    click.option("--baseline", type=BACKENDS, metavar="NAME", help="Backend that speed-up is over."),
    click.option("--csv", is_flag=True, help="Print TritonBench's CSV in place of the table."),
    click.option("--output", type=PATH, help="Write TritonBench's CSV to this file."),
    click.option("--output-json", type=PATH, help="Write TritonBench's JSON to this file."),
    click.option(
        "--plot",
        is_flag=False,
        flag_value="",
        metavar="[FILE]",
        help="Draw the first metric in the terminal, or into FILE.png or FILE.svg.",
    ),
    click.option("--traces", type=PATH, help="Write results of FlashInfer-Bench's definitions as its traces."),
    click.option("--records", type=PATH, help="Append records (JSON lines) for `groupbench ingest`."),
    click.option(
        "--resume", is_flag=True, help="Go on with the run in --records: what it holds is not measured again."
    ),
    click.option(
        "--previous", type=PATH, metavar="FILE", help="Records of the run before: begin with what it left out."
    ),
    click.option("--commit", help="Hash of the code measured, where the tree has no .git."),
    click.option("--branch", help="Branch of the code measured."),
    click.option("--trigger", default="manual", show_default=True, help="Why this run: manual, nightly, ..."),
    click.option(
        "--logs",
        type=PATH,
        metavar="DIR",
        help="Keep what each cell prints here. [of those that fail: next to records]",
    ),
    click.option("--show-output", "-s", is_flag=True, help="Show what cells print, tracebacks included."),
    click.option("--unmeasured", metavar="REASON", hidden=True, help="Record every cell as failed, and measure none."),
    click.option("--quiet", "-q", is_flag=True, help="No progress."),
)
"""What becomes of what is measured."""

lists = _group(
    click.option("--list-operators", is_flag=True, help="List operators, their suites, what backends take and return."),
    click.option("--list-backends", is_flag=True, help="List the backends of --op, or of every operator."),
    click.option("--list-metrics", is_flag=True, help="List the metrics."),
)
"""Print a list in place of measuring."""
