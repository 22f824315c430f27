"""The options of `tritonbench`, in groups: cells, place, timing and results.

TritonBench's names for --operator, --backend, --shape and --dtype are --op, --only, --shapes and --precision. Both
programs accept both.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import click

from groupbench.tracker.facts import vocabulary
from groupbench.tracker.facts.metrics import NCU
from groupbench.tracker.text.wording import no_such
from groupbench.tracker.tools.parameters import Duration, Number, Real

F = TypeVar("F", bound=Callable[..., Any])

SHAPES = vocabulary.SHAPE

COSTS = ("memory", "kernels", "eager", "energy", "cold", "invariance")
"""The costs in operators/measure/costs.py, which would be slow to import for a help text."""

PATH = click.Path(path_type=Path)


def _commas(context: click.Context, parameter: click.Parameter, value: Any) -> tuple[str, ...]:
    """Split `a,b --only c` into (a, b, c)."""
    values = value if isinstance(value, tuple) else () if value is None else (value,)
    parts = tuple(part.strip() for text in values for part in text.split(",") if part.strip())
    if values and not parts:
        raise click.BadParameter("no name given")
    return parts


def _is_flag(arg: str) -> bool:
    """Return whether `arg` is a flag; a shape with a negative number is not, so it gets a more specific error."""
    return arg.startswith("-") and not arg[1:2].isdigit()


def _costs(context: click.Context, parameter: click.Parameter, value: Any) -> tuple[str, ...]:
    """Split `memory,energy` into (memory, energy). Raises BadParameter for an unknown cost."""
    names = _commas(context, parameter, value)
    if names in (("all",), ("none",)):
        return COSTS if names == ("all",) else ()
    known = (*COSTS, NCU)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(no_such("no cost", unknown[0], (*known, "all", "none")))
    return names


class GreedyShapes(click.Command):
    """A command whose `--shapes` takes several values separated by blanks, as in TritonBench's argparse.

    `--resume` takes none, which the command says as soon as it reads one.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spelled: list[str] = []
        greedy = False
        for arg, after in pairwise([*args, "-"]):
            if arg == "--resume" and not _is_flag(after):
                raise click.UsageError(f"--resume takes no value: write --records {shlex.quote(after)} --resume", ctx)
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


def _names(*flags: str, help: str) -> Callable[[F], F]:
    return click.option(*flags, multiple=True, callback=_commas, metavar="NAME,...", help=help)


cells = _group(
    _names(*reversed(vocabulary.OPERATOR), "ops", help="Measure these operators."),
    _names(*reversed(vocabulary.BACKEND), "only", help="Measure only these backends."),
    _names("--skip", help="Do not measure these backends."),
    _names("--suite", "suites", help="Measure the shapes of these suites."),
    click.option(
        *reversed(SHAPES),
        "shapes",
        multiple=True,
        metavar="SHAPE ...",
        help="Measure these shapes: G,M,N,K with M rows per group, or the text or name of a shape.",
    ),
    click.option(
        "--routing-trace",
        type=PATH,
        help="Take the rows per group from the steps of a routing dump: topk_ids as .npy or .jsonl.",
    ),
    click.option(
        "--trace-steps",
        type=Number(1),
        default=16,
        help="Number of steps to take from --routing-trace, evenly spaced in time.",
    ),
    click.option(
        "--input-id",
        "input_id",
        callback=_commas,
        help="Measure the inputs from this number on, or only those in a list: 0,3,7. The first input is 0.",
    ),
    click.option("--num-inputs", type=Number(1), help="Measure at most this many inputs."),
    click.option("--mode", default="fwd", help=vocabulary.MODE_HELP),
    click.option(
        *reversed(vocabulary.DTYPE),
        "precision",
        callback=_commas,
        metavar="NAME,...",
        help=f"Measure these dtypes: bf16, fp16, fp32, fp8. {vocabulary.DTYPE_DEFAULT}",
    ),
    click.option("--seed", type=Number(0, 2**63 - 1), default=0, help=vocabulary.SEED_HELP),
    click.option("--plan", type=PATH, help="Measure the cells listed in this groupbench.toml."),
    click.option("--plan-name", metavar="NAME", help="Name of the plan in the records. Default: `name` of the file."),
    click.option(
        "--rivals",
        type=click.Choice(["installed", "all"]),
        is_flag=False,
        flag_value="installed",
        help="Also measure other projects' kernels. With all, also list those that are not installed.",
    ),
    click.option("--plugin", "plugins", multiple=True, metavar="MODULE.NAME|FILE.py", help=vocabulary.PLUGIN_HELP),
)
"""Options that select the cells to measure."""

places = _group(
    click.option(
        "--host",
        type=click.Choice(["auto", "builtin", "tritonbench"]),
        default="auto",
        help="Benchmark harness to measure with; auto: TritonBench if it is installed, which detects fewer cheats.",
    ),
    click.option("--device", "-d", type=click.Choice(vocabulary.DEVICES), default="auto", help=vocabulary.DEVICE_HELP),
    click.option(
        "--gpus",
        metavar="all|0,1,...",
        help="Measure on these GPUs of this machine, in parallel. Default: all with --plan, otherwise the first.",
    ),
    click.option("--scheduler", metavar="tcp://HOST:PORT", help="Measure on the workers of a Dask scheduler."),
    click.option(
        "--slurm",
        metavar="NAME=VALUE,...",
        help="Measure on Dask workers in SLURM jobs, such as partition=gpu,constraint=h100.",
    ),
    click.option("--hardware", metavar="PATTERN", help="Use only GPUs of this model, such as 'NVIDIA H100*'."),
)
"""Options for the benchmark harness, the device and the GPUs."""

timing = _group(
    click.option("--rtol", type=Real(min=0), help="Relative tolerance. Default: by dtype."),
    click.option(
        "--atol",
        type=Real(min=0),
        help="Absolute tolerance, in units of the larger RMS of row and output. Default: by dtype.",
    ),
    click.option(
        "--protocol",
        type=click.Choice(["cooled", "sustained"]),
        default="cooled",
        help="cooled: let the GPU rest before each burst. sustained: keep the GPU busy.",
    ),
    click.option("--bursts", type=Number(1, 1000), default=4, help="Number of bursts per cell."),
    click.option("--samples", type=Number(1, 10_000), default=10, help="Number of timed calls in a burst."),
    click.option("--idle", type=Duration(most=3600), default="0.3s", help="Rest this long before a burst."),
    click.option("--cudagraph", is_flag=True, help="Time replays of a captured CUDA graph."),
    click.option(
        "--costs",
        callback=_costs,
        default="memory",
        metavar="NAME,...",
        help="Also measure these costs of a call on a GPU: memory, kernels, eager (a loop without waits), energy, "
        "cold (compile time with empty caches, at the first shape), invariance (whether a row's bits depend on its "
        "batch; on a CPU too), or ncu (counters of Nsight Compute). all: every cost but ncu.",
    ),
    click.option(
        "--timeout",
        type=Duration(least=0.1, most=1e6),
        default="300s",
        help="Fail a cell that makes no progress within this time.",
    ),
    click.option(
        "--budget",
        type=Duration(most=6e6, above=True),
        help="Start no further cell after this time; record the rest as skipped.",
    ),
)
"""Options for the timing protocol and its limits."""

results = _group(
    click.option(
        "--metrics",
        callback=_commas,
        metavar="NAME,...",
        help="Show these metrics in the table, with the costs that they need; see --list-metrics.",
    ),
    click.option("--baseline", metavar="NAME", help="Compute the speed-up over this backend."),
    click.option("--csv", is_flag=True, help="Print TritonBench's CSV instead of the table."),
    click.option("--output", type=PATH, help="Write TritonBench's CSV to this file."),
    click.option("--output-json", type=PATH, help="Write TritonBench's JSON to this file."),
    click.option("--plot", is_flag=True, help="Plot the first metric in the terminal."),
    click.option("--records", type=PATH, help="Append records (JSON lines) for `groupbench ingest`."),
    click.option(
        "--resume", is_flag=True, help="Continue the interrupted run in --records without measuring its cells again."
    ),
    click.option(
        "--previous", type=PATH, metavar="FILE", help="Start with the cells that the run in these records skipped."
    ),
    click.option("--commit", help="Hash of the measured commit, if the source tree has no .git."),
    click.option("--branch", help="Branch of the measured commit."),
    click.option("--trigger", default="manual", help="Reason for this run: manual, nightly, ..."),
    click.option(
        "--logs",
        type=PATH,
        metavar="DIR",
        help="Write the output of each cell to this folder. Default: only failed cells, next to --records.",
    ),
    click.option("--show-output", "-s", is_flag=True, help="Show the output of cells, including tracebacks."),
    click.option(
        "--unmeasured",
        metavar="REASON",
        hidden=True,
        help="Measure nothing; record every cell as failed, for this reason.",
    ),
    click.option("--quiet", "-q", is_flag=True, help="Do not show progress."),
    click.option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Show what processes start and wait for. -vv: also every request.",
    ),
)
"""Options for the results: the table, the records and the logs."""

lists = _group(
    click.option("--list-operators", is_flag=True, help="List operators, their suites and their backends' arguments."),
    click.option("--list-backends", is_flag=True, help="List the backends of --op, or of every operator."),
    click.option("--list-metrics", is_flag=True, help="List the metrics."),
)
"""Options that print a list instead of measuring."""
