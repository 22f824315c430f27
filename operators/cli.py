"""The `tritonbench` command: TritonBench's flags, on TritonBench where it is installed, else on the built-in host."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.tracker.exits import ExitCode

# Options that a plan file has a field for, or that its shapes leave no room for.
PLAN_SAYS = (
    *("ops", "only", "skip", "suites", "shapes", "input_id", "num_inputs", "mode", "precision"),
    *("rtol", "atol", "protocol", "bursts", "samples", "idle", "cudagraph", "seed"),
)

# What TritonBench has nothing like.
BUILTIN_ALONE = ("budget", "resume", "previous", "gpus", "scheduler", "slurm", "hardware")


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
    """A shape may begin with a minus too, and is told what is wrong with it."""
    return arg.startswith("-") and not arg[1:2].isdigit()


class _GreedyShapes(click.Command):
    """Lets `--shapes 4,1024,1024,1024 8,512,512,512` take several values, as TritonBench's argparse does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spelled: list[str] = []
        greedy = False
        for arg, after in pairwise([*args, "-"]):
            if _is_flag(arg):
                greedy = arg == "--shapes"
                if greedy and _is_flag(after):
                    raise click.UsageError("--shapes takes at least one shape", ctx)
                if not greedy:
                    spelled.append(arg)
            elif greedy:
                spelled += ["--shapes", arg]
            else:
                spelled.append(arg)
        return super().parse_args(ctx, spelled)


@click.command(
    cls=_GreedyShapes,
    context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True, "max_content_width": 110},
    epilog="Exit codes: 0 all measured, 1 a result is wrong, 2 usage, 3 something was not measured or not "
    "written, 4 --resume finds a run of other code or another machine, 130 interrupted.",
)
@click.option("--op", "ops", multiple=True, callback=_commas, help="Operators to measure, by comma.")
@click.option("--only", multiple=True, callback=_commas, help="Only these backends, by comma.")
@click.option("--skip", multiple=True, callback=_commas, help="All backends but these.")
@click.option("--suite", "suites", multiple=True, callback=_commas, help="Named suites of shapes.")
@click.option(
    "--shapes", multiple=True, metavar="SHAPE ...", help="G,M,N,K with M rows a group, or a shape's text or name."
)
@click.option("--input-id", "input_id", callback=_commas, help="Which inputs: one to start from, or several by comma.")
@click.option("--num-inputs", type=click.IntRange(min=1), help="How many inputs.")
@click.option("--mode", default="fwd", show_default=True, help="fwd; bwd, fwd_bwd where the operator has them.")
@click.option(
    "--precision",
    "--dtype",
    "precision",
    callback=_commas,
    help="bf16, fp16, fp32, fp8, by comma. [bf16; fp16 on a CPU]",
)
@click.option("--device", "-d", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--gpus", metavar="all|0,1,...", help="GPUs of this host, a queue each. [a plan: all; else the first]")
@click.option("--scheduler", metavar="tcp://HOST:PORT", help="Measure on the workers of a Dask scheduler.")
@click.option("--slurm", metavar="NAME=VALUE,...", help="Measure by SLURM jobs, such as partition=gpu,constraint=h100.")
@click.option("--hardware", metavar="PATTERN", help="Only cards of this model, such as 'NVIDIA H100*'.")
@click.option("--metrics", callback=_commas, help="Columns, by comma; --list-metrics names them.")
@click.option("--baseline", help="Backend that speed-up is over.")
@click.option("--rtol", type=_Finite(min=0), help="Relative tolerance, in place of the table's.")
@click.option(
    "--atol", type=_Finite(min=0), help="Absolute tolerance in units of the output's RMS, in place of the table's."
)
@click.option("--protocol", type=click.Choice(["cooled", "sustained"]), default="cooled", show_default=True)
@click.option("--bursts", type=click.IntRange(1, 1000), default=4, show_default=True, help="Bursts a cell.")
@click.option("--samples", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Runs a burst.")
@click.option(
    "--idle", type=click.FloatRange(0, 3600), default=0.3, show_default=True, help="Seconds of rest before a burst."
)
@click.option("--cudagraph", is_flag=True, help="Time replays of a captured CUDA graph.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the inputs.")
@click.option("--csv", is_flag=True, help="Print TritonBench's CSV in place of the table.")
@click.option("--output", type=click.Path(path_type=Path), help="Write TritonBench's CSV to this file.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Write TritonBench's JSON to this file.")
@click.option("--plot", is_flag=False, flag_value="", metavar="[FILE]",
              help="Draw the first metric in the terminal, or into FILE.png or FILE.svg.")  # fmt: skip
@click.option("--records", type=click.Path(path_type=Path), help="Append records (JSON lines) for `groupbench ingest`.")
@click.option("--plan", type=click.Path(path_type=Path), help="Measure what this file says (see ci/nightly.toml).")
@click.option(
    "--budget",
    type=_Finite(min=0, min_open=True, max=100_000),
    metavar="MINUTES",
    help="What has not begun by then is left out, said, and recorded as skipped.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --records: what it holds is not measured again.")
@click.option("--previous", type=click.Path(path_type=Path), metavar="FILE",
              help="Records of the run before: begin with what it left out.")  # fmt: skip
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE.NAME", help="Further backends; may be repeated.")
@click.option("--host", type=click.Choice(["auto", "builtin", "tritonbench"]), default="auto", show_default=True)
@click.option("--commit", help="Hash of the code measured, where the tree has no .git.")
@click.option("--branch", help="Branch of the code measured.")
@click.option("--trigger", default="manual", show_default=True, help="Why this run: manual, nightly, ...")
@click.option(
    "--timeout", type=_Finite(min=0.1, max=1e6), default=300, show_default=True, help="Seconds a cell may stay silent."
)
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.option("--list-operators", is_flag=True, help="List operators, their suites, what backends take and return.")
@click.option("--list-backends", is_flag=True, help="List the backends of --op, or of every operator.")
@click.option("--list-metrics", is_flag=True, help="List the metrics.")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.version_option(package_name="groupbench")
def command(**options: Any) -> None:
    """Measure operators: latency and accuracy of every backend over named suites of shapes.

    \b
    tritonbench --op grouped_gemm
    tritonbench --op grouped_gemm --suite ragged --only triton_pointer,torch_grouped_mm
    tritonbench --op grouped_gemm --shapes 4,1024,512,256 'G=3,M_g=0|1|129,N=96,K=64'

    Runs on TritonBench where it is installed, with its own flags and backends too, else on the built-in host.
    """
    try:
        code = _run(options)
        sys.stdout.flush()
    except OSError as error:  # click would end with 1, which means a wrong result here
        with suppress(OSError):  # or the interpreter complains when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(ExitCode.BROKEN_PIPE)
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        print(f"tritonbench: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(ExitCode.INCOMPLETE)
    sys.exit(code)


def _run(options: dict[str, Any]) -> int:
    lists = tuple(name for name in ("operators", "backends", "metrics") if options[f"list_{name}"])
    if lists:
        if options["rest"]:
            raise UsageError(f"unknown option or argument: {' '.join(options['rest'])}")
        _list(options, lists)
        return 0
    from groupbench.operators.hosts import builtin, tritonbench
    from groupbench.operators.measure.environment import resolve_device

    if options["plan"] is None and not options["ops"]:
        raise UsageError("say what to measure: --op NAME or --plan FILE; --list-operators names the operators")
    if options["resume"] and options["records"] is None:
        raise UsageError("--resume goes on with the run in a file: name it by --records FILE")
    if options["plan"] is not None:
        _check_plan_alone(click.get_current_context())
    on_tritonbench = _picks_tritonbench(options)
    if options["rest"] and not on_tritonbench:
        raise UsageError(
            f"unknown option or argument: {' '.join(options['rest'])} (TritonBench's own flags need its host)"
        )
    own = next((name for name in BUILTIN_ALONE if options[name]), None)
    if own and on_tritonbench:
        raise UsageError(f"--{own} is the built-in host's: add --host builtin")
    if not on_tritonbench and any(options[name] for name in ("gpus", "scheduler", "slurm", "hardware")):
        return _run_fleet(options)
    device = resolve_device(options["device"])
    session = _session(options)
    if on_tritonbench:
        return tritonbench.measure(options | {"given": _given(click.get_current_context())}, device, session)
    selections = _selections(options, device, session)
    if options["plan"] is not None and device == "cuda":
        from groupbench.operators.fleet import host

        if where := host.for_plan(device):
            return host.measure(selections, device, session, where)
    return builtin.measure(selections, device, session)


def _list(options: dict[str, Any], lists: tuple[str, ...]) -> None:
    """Print what there is to measure, on TritonBench for the operators that groupbench has not."""
    from groupbench.operators import listing

    theirs = listing.theirs(options["ops"]) if _picks_tritonbench(options) else ()
    if theirs:
        from groupbench.operators.hosts import tritonbench

        for op in theirs:
            tritonbench.show(op, lists, tuple(options["plugins"]))
    ours = tuple(op for op in options["ops"] if op not in theirs)
    if ours or not theirs:
        listing.show(options | {"ops": ours})


def _run_fleet(options: dict[str, Any]) -> int:
    """On the GPUs that were named, here or elsewhere; what is far away has a GPU unless --device says otherwise."""
    from groupbench.operators.fleet import host, slurm
    from groupbench.operators.measure.environment import resolve_device

    where = host.place(options)
    elsewhere = where.far and where.slurm != slurm.LOCAL and options["device"] == "auto"
    device = resolve_device("cuda" if elsewhere else options["device"])
    if where.gpus is not None and device == "cpu" and options["device"] == "auto":
        raise UsageError(f"--gpus {where.gpus}: torch sees no GPU here; --device cpu tries it out on the processor")
    session = _session(options)
    return host.measure(_selections(options, device, session), device, session, where)


def _given(context: click.Context) -> list[str]:
    """Names of the parameters that the command line says."""
    names = [parameter.name or "" for parameter in context.command.params]
    return [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def _check_plan_alone(context: click.Context) -> None:
    """Raises UsageError for a flag that a plan would pass over in silence."""
    given = _given(context)
    for parameter in context.command.params:
        if parameter.name in given and parameter.name in PLAN_SAYS:
            raise UsageError(f"--plan says what is measured; it does not go with {parameter.opts[0]}")


def _picks_tritonbench(options: dict[str, Any]) -> bool:
    """Plans are the built-in host's: it isolates and interleaves cells, which a night wants."""
    if options["host"] == "tritonbench":
        if options["plan"] is not None:
            raise UsageError("--plan runs on the built-in host")
        if not _is_installed():
            raise UsageError("TritonBench is not installed: pip install 'groupbench[tritonbench]', or --host builtin")
        return True
    return options["host"] == "auto" and options["plan"] is None and _is_installed()


def _is_installed() -> bool:
    return importlib.util.find_spec("tritonbench") is not None


def _session(options: dict[str, Any]) -> Any:
    from groupbench.operators import table
    from groupbench.operators.session import Session

    unknown = [name for name in options["metrics"] if name not in table.METRICS]
    if unknown and not _picks_tritonbench(options):
        raise UsageError(f"no metric {unknown[0]!r}; there are: {', '.join(table.METRICS)}")
    if options["plot"] is not None:
        from groupbench.tracker import plots

        try:
            plots.check(options["plot"])
        except plots.DrawError as error:
            raise UsageError(str(error)) from error
    return Session(
        records_path=options["records"],
        csv=options["csv"],
        output=options["output"],
        output_json=options["output_json"],
        metrics=options["metrics"] or table.DEFAULT_METRICS,
        baseline=options["baseline"],
        commit=options["commit"],
        branch=options["branch"],
        trigger=options["trigger"],
        timeout_s=options["timeout"],
        quiet=options["quiet"],
        plot=options["plot"],
        resume=options["resume"],
        previous=options["previous"],
        budget_s=60 * (options["budget"] or math.inf),
    )


def _selections(options: dict[str, Any], device: str, session: Any) -> list[Any]:
    from groupbench.operators import plan, registry
    from groupbench.operators.measure.protocol import Protocol

    plugins = tuple(options["plugins"])
    if options["plan"] is not None:
        found = plan.read_plan(options["plan"], device, plugins)
        session.plan = found.name
        session.budget_s = 60 * (options["budget"] or found.budget_minutes or math.inf)
        return found.selections
    if options["baseline"]:
        for op in options["ops"]:
            registry.get_backend(registry.get_operator(op, plugins), options["baseline"])
    if options["cudagraph"] and device == "cpu":
        raise UsageError("--cudagraph: there are no CUDA graphs on a CPU")
    protocol = Protocol(
        options["protocol"],
        options["bursts"],
        options["samples"],
        idle_s=options["idle"],
        cudagraph=options["cudagraph"],
    )
    named = plan.named(options["ops"], options["only"], options["skip"], plugins)
    return [
        plan.Selection(
            operator=op,
            suites=options["suites"],
            shapes=tuple(options["shapes"]),
            dtypes=tuple(name for name in options["precision"] if name != "bypass"),
            only=named[op][0],
            skip=named[op][1],
            mode=options["mode"],
            protocol=protocol,
            seed=options["seed"],
            input_ids=tuple(plan.integer(text) for text in options["input_id"]),
            num_inputs=options["num_inputs"],
            rtol=options["rtol"],
            atol=options["atol"],
            plugins=plugins,
        )
        for op in options["ops"]
    ]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    """Console entry point: every expected failure is one line and an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    for stream in (sys.stdout, sys.stderr):  # a terminal without ± shows ?, and does not fail
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        command(prog_name="tritonbench", standalone_mode=False)
    except click.ClickException as error:
        print(f"tritonbench: {_one_line(error.format_message())}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    except GroupbenchError as error:
        print(f"tritonbench: {_one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(ExitCode.INTERRUPTED)
