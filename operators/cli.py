"""The `tritonbench` command: TritonBench's flags, on TritonBench where it is installed, else on the built-in host."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from groupbench.operators import flags
from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.options import GreedyShapes, cells, lists, places, results, timing
from groupbench.tracker import project, shell

# Options that a plan file has a field for, or that its shapes leave no room for.
PLAN_SAYS = (
    *(
        "ops",
        "only",
        "skip",
        "rivals",
        "suites",
        "shapes",
        "routing_trace",
        "trace_steps",
        "input_id",
        "num_inputs",
        "mode",
        "precision",
    ),
    *("rtol", "atol", "protocol", "bursts", "samples", "idle", "cudagraph", "costs", "seed"),
)

# What TritonBench has nothing like.
BUILTIN_ALONE = (
    *("budget", "resume", "previous", "gpus", "scheduler", "slurm", "hardware", "logs", "traces", "routing_trace"),
)


@click.command(
    cls=GreedyShapes,
    context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True, "max_content_width": 110},
    epilog="Exit codes: 0 all measured, 1 a result is wrong, 2 usage, 3 something was not measured or not "
    "written, 4 --resume finds a run of other code or another machine, 130 interrupted.",
)
@cells
@places
@timing
@results
@lists
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.version_option(package_name="groupbench")
def command(**given: Any) -> None:
    """Measure operators: latency and accuracy of every backend over named suites of shapes.

    \b
    tritonbench --op grouped_gemm
    tritonbench --op grouped_gemm --suite ragged --only triton_pointer,torch_grouped_mm
    tritonbench --op grouped_gemm --shapes 4,1024,512,256 'G=3,M_g=0|1|129,N=96,K=64'

    Runs on TritonBench where it is installed, with its own flags and backends too, else on the built-in host.
    """
    click.get_current_context().exit(_run(given))


def _run(options: dict[str, Any]) -> int:
    asked = tuple(name for name in ("operators", "backends", "metrics") if options[f"list_{name}"])
    on_tritonbench = not asked and _checked(options)
    options = options | {"plugins": _plugins(options)}
    options = options | _rivals(options)
    if asked:
        _list(options, asked)
        return 0
    if on_tritonbench:
        return _run_tritonbench(options)
    options = options | flags.translated(options["rest"])
    session = _session(options)
    if any(options[name] for name in ("gpus", "scheduler", "slurm", "hardware")):
        code = _run_fleet(options, session)
    else:
        code = _run_builtin(options, session)
    if options["traces"] is not None:
        from groupbench.operators.problems import traces

        number = traces.write(options["traces"], session.records, options["plugins"])
        session.say(f"traces: {options['traces']}: {number}")
    return code


def _plugins(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the plugins of the plan, or of this folder's groupbench.toml, and those given; have Python find them."""
    try:
        found = project.load(options["plan"])
    except project.ProjectError as error:
        raise UsageError(f"plan {error.message}" if options["plan"] else error.message) from error
    folders = found.python_path() if found.settings.plugins else []
    os.environ |= project.add_to_path(folders, dict(os.environ))  # for the processes that measure
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
    return (found.plugins if options["plan"] else found.placed_plugins)(options["plugins"])


def _rivals(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the rivals among the plugins, where they are asked for; the missing ones are skipped."""
    from groupbench.operators.catalog import rivals

    named = set(options["only"]) | {options["baseline"]}
    if options["rivals"] is None and not named & rivals.names():
        return {}
    plugins = tuple(dict.fromkeys((*options["plugins"], rivals.PLUGIN)))
    if options["list_backends"] or options["rivals"] != "installed":
        return {"plugins": plugins}
    missing = {name: how for name, how in rivals.not_installed(options["ops"]).items() if name not in named}
    for how in dict.fromkeys(missing.values()):
        print(f"rivals: {how}", file=sys.stderr)
    return {"plugins": plugins, "skip": (*options["skip"], *missing)}


def _checked(options: dict[str, Any]) -> bool:
    """Return whether TritonBench measures. Raises UsageError for options that do not go together."""
    context = click.get_current_context()
    if options["plan"] is None and not options["ops"]:
        raise UsageError("say what to measure: --op NAME or --plan FILE; --list-operators names the operators")
    if options["resume"] and options["records"] is None:
        raise UsageError("--resume goes on with the run in a file: name it by --records FILE")
    if options["plan"] is not None:
        _check_plan_alone(context)
    on_tritonbench = _picks_tritonbench(options)
    own = next((name for name in BUILTIN_ALONE if options[name]), None)
    if own and on_tritonbench:
        raise UsageError(f"--{own.replace('_', '-')} is the built-in host's: add --host builtin")
    return on_tritonbench


def _run_tritonbench(options: dict[str, Any]) -> int:
    from groupbench.operators.hosts import tritonbench
    from groupbench.operators.measure.environment import resolve_device

    device = resolve_device(options["device"])
    return tritonbench.measure(options | {"given": _given(click.get_current_context())}, device, _session(options))


def _run_builtin(options: dict[str, Any], session: Any) -> int:
    """On the first GPU, or the processor; a plan on all GPUs of this host, where there are several."""
    from groupbench.operators.hosts import builtin
    from groupbench.operators.measure.environment import resolve_device

    device = resolve_device(options["device"])
    selections = _selections(options, device, session)
    if options["unmeasured"] is not None:
        return builtin.record_failure(selections, device, session, options["unmeasured"])
    if options["plan"] is not None and device == "cuda":
        from groupbench.operators.fleet import host

        if where := host.for_plan(device):
            return host.measure(selections, device, session, where)
    return builtin.measure(selections, device, session)


def _list(options: dict[str, Any], asked: tuple[str, ...]) -> None:
    """Print what there is to measure, on TritonBench for the operators that groupbench has not."""
    if options["rest"]:
        raise UsageError(f"unknown option or argument: {' '.join(options['rest'])}")
    from groupbench.operators import listing

    theirs = listing.theirs(options["ops"], options["plugins"]) if _picks_tritonbench(options) else ()
    if theirs:
        from groupbench.operators.hosts import tritonbench

        for op in theirs:
            tritonbench.show(op, asked, tuple(options["plugins"]))
    ours = tuple(op for op in options["ops"] if op not in theirs)
    if ours or not theirs:
        listing.show(options | {"ops": ours})


def _run_fleet(options: dict[str, Any], session: Any) -> int:
    """On the GPUs that were named, here or elsewhere; what is far away has a GPU unless --device says otherwise."""
    from groupbench.operators.fleet import host, slurm
    from groupbench.operators.measure.environment import resolve_device

    where = host.place(options)
    elsewhere = where.far and where.slurm != slurm.LOCAL and options["device"] == "auto"
    device = resolve_device("cuda" if elsewhere else options["device"])
    if where.gpus is not None and device == "cpu" and options["device"] == "auto":
        raise UsageError(f"--gpus {where.gpus}: torch sees no GPU here; --device cpu tries it out on the processor")
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
    if context.params["rest"]:
        raise UsageError(f"unknown option or argument: {' '.join(context.params['rest'])}")


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

    unknown = [name for name in options["metrics"] if name not in table.metrics_of_tables()]
    if unknown and not _picks_tritonbench(options):
        raise UsageError(f"no metric {unknown[0]!r}; there are: {', '.join(table.metrics_of_tables())}")
    if options["plot"] is not None:
        from groupbench.tracker import plots

        try:
            plots.check(options["plot"])
        except plots.DrawError as error:
            raise UsageError(str(error)) from error
    made = Session(
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
        budget_s=options["budget"] or math.inf,
        logs_path=options["logs"],
        show_output=options["show_output"],
    )
    _SESSIONS.append(made)
    return made


def _selections(options: dict[str, Any], device: str, session: Any) -> list[Any]:
    from groupbench.operators import plan, registry
    from groupbench.operators.measure.protocol import Protocol

    plugins = tuple(options["plugins"])
    if options["plan"] is not None:
        found = plan.read_plan(options["plan"], device, plugins)
        session.plan = found.name
        session.budget_s = options["budget"] or found.budget_s or math.inf
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
        test_only=options.get("test_only", False),
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
            costs=options["costs"],
            routing_trace=options["routing_trace"],
            trace_steps=options["trace_steps"],
        )
        for op in options["ops"]
    ]


_SESSIONS: list[Any] = []
"""The session of this process, once there is one."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _interrupt_aloud(owner: int) -> Callable[[int, FrameType | None], None]:
    """Return a handler that says at once what is kept, since ending the processes takes its time."""

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # and not a child that inherited the handler
            kept = _SESSIONS[-1].kept if _SESSIONS else "nothing is measured yet"
            os.write(2, f"\ntritonbench: interrupted: {kept}\n".encode("ascii", "replace"))
        raise KeyboardInterrupt

    return handle


def main() -> None:
    """Console entry point: every expected failure is one line and an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as `groupbench night` has it
        signal.signal(signal.SIGINT, _interrupt_aloud(os.getpid()))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    shell.run("tritonbench", command, GroupbenchError)
