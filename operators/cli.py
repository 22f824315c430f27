"""The `tritonbench` command: TritonBench's flags, on TritonBench if it is installed, otherwise on the built-in host."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from groupbench.operators import flags
from groupbench.operators.errors import GroupbenchError, PlanError, UsageError
from groupbench.operators.hosts import has_tritonbench
from groupbench.operators.options import GreedyShapes, cells, lists, places, results, timing
from groupbench.tracker import project
from groupbench.tracker.facts.measured_tree import with_folders
from groupbench.tracker.facts.metrics import NCU
from groupbench.tracker.text.wording import no_such
from groupbench.tracker.tools import shell, signals

# Options that the plan file sets, or that would change its shapes.
SET_BY_PLAN = (
    *("ops", "only", "skip", "rivals", "suites", "shapes", "routing_trace", "trace_steps", "input_id", "num_inputs"),
    *("mode", "precision", "rtol", "atol", "protocol", "bursts", "samples", "idle", "cudagraph", "costs", "seed"),
)

# Options without an equivalent in TritonBench.
BUILTIN_ONLY = ("budget", "resume", "previous", "gpus", "scheduler", "slurm", "hardware", "logs", "routing_trace")

# Options that choose GPUs or machines.
FLEET = ("gpus", "scheduler", "slurm", "hardware")


@click.command(
    cls=GreedyShapes,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": True,
        "max_content_width": 110,
        "show_default": True,
    },
    epilog="Exit codes: 0 all cells measured, 1 a result is wrong, 2 usage error, 3 a cell was not measured or a file "
    "not written, 4 --resume found a run of other code, of other cells or of another machine, 130 interrupted.",
)
@cells
@places
@timing
@results
@lists
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.version_option(package_name="groupbench")
def command(**options: Any) -> None:
    """Measure every backend's latency and accuracy on an operator, over suites of shapes.

    \b
    tritonbench --op grouped_gemm
    tritonbench --op grouped_gemm --suite ragged --only triton_pointer,torch_grouped_mm
    tritonbench --op grouped_gemm --shapes 4,1024,512,256 'G=3,M_g=0|1|129,N=96,K=64'

    Uses TritonBench as the host if it is installed, and then also accepts TritonBench's flags and measures
    TritonBench's backends. Otherwise uses the built-in host.
    """
    if options["verbose"] or "GROUPBENCH_LOG" in os.environ:
        from groupbench.tracker.tools import logs

        logs.configure(options["verbose"])
    with (
        _advising(options["plan"]),
        signals.keeping(lambda: _SESSIONS[-1].kept if _SESSIONS else "nothing was measured yet"),
    ):
        code = _run(options)
    click.get_current_context().exit(code)


@contextmanager
def _advising(plan: Path | None) -> Iterator[None]:
    """Raise plugin errors with the plan's name and, if a library does not load, with advice about the build.

    Raises UsageError.
    """
    try:
        yield
    except UsageError as error:
        text = str(error)
        if not text.startswith("plugin "):
            raise
        from groupbench.operators import libraries

        loaded = project.load(plan)
        if libraries.does_not_load(text):
            setup = loaded.settings.setup
            if not setup and loaded.file is not None:
                text += f"; {libraries.BUILD}"
            elif setup and plan is None:
                text += f"; to build it, run `setup` of groupbench.toml: {setup}"
        raise (UsageError(text) if plan is None else PlanError(f"{plan.name}: {text}")) from error


def _run(options: dict[str, Any]) -> int:
    lists = tuple(name for name in ("operators", "backends", "metrics") if options[f"list_{name}"])
    on_tritonbench = not lists and _checked(options)
    options = options | {"plugins": _plugins(options)}
    options = options | _rivals(options)
    if lists:
        _list(options, lists)
        return 0
    if on_tritonbench:
        return _run_tritonbench(options)
    options = options | flags.translated(options["rest"], _flags(click.get_current_context()))
    session = _session(options)
    return _run_fleet(options, session) if any(options[name] for name in FLEET) else _run_builtin(options, session)


def _plugins(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the plugins from the plan or this folder's groupbench.toml, and from the options."""
    try:
        loaded = project.load(options["plan"])
    except project.ProjectError as error:
        raise UsageError(f"plan {error.message}" if options["plan"] else error.message) from error
    folders = loaded.python_path() if loaded.settings.plugins else []
    os.environ |= with_folders(folders, os.environ)  # for the processes that measure
    return (loaded.plugins if options["plan"] else loaded.placed_plugins)(options["plugins"])


def _rivals(options: dict[str, Any]) -> dict[str, Any]:
    """Return the changed options: requested rivals are plugins; those not installed are skipped."""
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
    """Return whether TritonBench measures. Raises UsageError for contradictory options."""
    _check_complete(options)
    if options["plan"] is not None:
        _check_plan_alone(click.get_current_context())
    on_tritonbench = _picks_tritonbench(options)
    _check_place(options, on_tritonbench)
    return on_tritonbench


def _check_complete(options: dict[str, Any]) -> None:
    """Raise UsageError for an option without a required one."""
    if options["plan"] is None and options["plan_name"]:
        raise UsageError("--plan-name needs --plan FILE")
    if options["plan"] is None and not options["ops"]:
        word = next((word for word in options["rest"] if not word.startswith("-")), "NAME")
        plan = project.NAME if Path(project.NAME).is_file() else "FILE"
        raise UsageError(f"nothing to measure: add --op {word} (see --list-operators) or --plan {plan}")
    if options["resume"] and options["records"] is None:
        raise UsageError("--resume needs the file of the run to continue: add --records FILE")


def _check_place(options: dict[str, Any], on_tritonbench: bool) -> None:
    """Raise UsageError for an option without effect on the host or machines."""
    option = next((name for name in BUILTIN_ONLY if options[name]), None)
    profiled = NCU in _costs(options)
    if on_tritonbench and (option or profiled):
        named = f"--{option.replace('_', '-')}" if option else f"--costs {NCU}"
        raise UsageError(f"{named} works only on the built-in host: add --host builtin")
    if profiled and (place := next((name for name in FLEET if options[name]), None)):
        raise UsageError(f"--costs {NCU} profiles on one GPU of this machine: remove --{place}")


def _costs(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the costs to measure: those named, and those of metrics."""
    from groupbench.operators.table import costs_of

    return tuple(dict.fromkeys([*options["costs"], *sorted(costs_of(options["metrics"]))]))


def _run_tritonbench(options: dict[str, Any]) -> int:
    from groupbench.operators.hosts import tritonbench
    from groupbench.operators.measure.environment import resolve_device

    device = resolve_device(options["device"])
    explicit = {"on_command_line": _on_command_line(click.get_current_context())}
    return tritonbench.measure(options | explicit, device, _session(options))


def _run_builtin(options: dict[str, Any], session: Any) -> int:
    """Measure on the first GPU or the CPU; measure a plan on all local GPUs."""
    from groupbench.operators.hosts import builtin
    from groupbench.operators.measure import profiler
    from groupbench.operators.measure.environment import resolve_device

    device = resolve_device(options["device"])
    if NCU in _costs(options):
        profiler.check(device)
    selections = _selections(options, device, session)
    unmeasured = options["unmeasured"]
    if options["plan"] is not None and device == "cuda" and unmeasured is None:
        from groupbench.operators.fleet import host

        if where := host.for_plan(device):
            return host.measure(selections, device, session, where)
    return builtin.measure(selections, device, session, unmeasured)


def _list(options: dict[str, Any], lists: tuple[str, ...]) -> None:
    """Print the requested lists, from TritonBench for operators unknown to groupbench."""
    if options["rest"]:
        raise UsageError(f"unknown option or argument: {' '.join(options['rest'])}")
    from groupbench.operators import listing

    foreign = listing.foreign(options["ops"], options["plugins"]) if _picks_tritonbench(options) else ()
    if foreign:
        from groupbench.operators.hosts import tritonbench

        for op in foreign:
            tritonbench.show(op, lists, tuple(options["plugins"]))
    ours = tuple(op for op in options["ops"] if op not in foreign)
    if ours or not foreign:
        listing.show(options | {"ops": ours})


def _run_fleet(options: dict[str, Any], session: Any) -> int:
    """Measure on the named GPUs, here or on other machines, which have GPUs unless --device names another device."""
    from groupbench.operators.fleet import host, slurm
    from groupbench.operators.measure.environment import resolve_device

    where = host.place(options)
    elsewhere = where.far and where.slurm != slurm.LOCAL and options["device"] == "auto"
    device = resolve_device("cuda" if elsewhere else options["device"])
    if where.gpus is not None and device == "cpu" and options["device"] == "auto":
        raise UsageError(
            f"--gpus {where.gpus}: torch sees no GPU here; to try the command on the CPU, add --device cpu"
        )
    return host.measure(_selections(options, device, session), device, session, where)


def _on_command_line(context: click.Context) -> list[str]:
    """Return the parameters set on the command line."""
    names = [parameter.name or "" for parameter in context.command.params]
    return [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def _flags(context: click.Context) -> list[str]:
    return [flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("--")]


def _check_plan_alone(context: click.Context) -> None:
    """Raise UsageError for an option ignored by a plan."""
    names, plan = _on_command_line(context), Path(context.params["plan"])
    for parameter in context.command.params:
        if parameter.name in names and parameter.name in SET_BY_PLAN:
            flag = parameter.opts[0]
            raise UsageError(
                f"{plan.name} sets the cells and their timing: change them there and remove {flag}; to measure other "
                f"cells, use `tritonbench --op NAME{'' if flag == '--op' else f' {flag} ...'}`"
            )
    if context.params["rest"]:
        raise UsageError(flags.unknown(context.params["rest"], _flags(context)))


def _picks_tritonbench(options: dict[str, Any]) -> bool:
    """Return whether TritonBench is the host. A plan needs the built-in host, which isolates and interleaves cells."""
    if options["host"] == "tritonbench":
        if options["plan"] is not None:
            raise UsageError("--plan needs the built-in host: remove --host tritonbench")
        if not has_tritonbench():
            raise UsageError("TritonBench is not installed: pip install 'groupbench[tritonbench]', or --host builtin")
        return True
    return options["host"] == "auto" and options["plan"] is None and has_tritonbench()


def _session(options: dict[str, Any]) -> Any:
    from groupbench.operators import table
    from groupbench.operators.session import Session

    unknown = [name for name in options["metrics"] if name not in table.metrics_of_tables()]
    if unknown and not _picks_tritonbench(options):
        raise UsageError(no_such("no metric", unknown[0], table.metrics_of_tables()))
    if options["plot"]:
        from groupbench.tracker.tools import plots

        try:
            plots.check()
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
    from groupbench.operators import foreign, plan
    from groupbench.operators.measure.protocol import Protocol

    plugins = tuple(options["plugins"])
    if options["plan"] is not None:
        contents = plan.read_plan(options["plan"], device, plugins)
        session.plan = options["plan_name"] or contents.name
        session.budget_s = options["budget"] or contents.budget_s or math.inf
        session.builds = contents.builds
        return contents.selections
    if options["trace_steps"] != plan.TRACE_STEPS and options["routing_trace"] is None:
        raise UsageError("--trace-steps needs --routing-trace")
    if options["cudagraph"] and device == "cpu":
        raise UsageError("--cudagraph needs a GPU: a CPU has no CUDA graphs")
    protocol = Protocol(
        options["protocol"],
        options["bursts"],
        options["samples"],
        idle_s=options["idle"],
        cudagraph=options["cudagraph"],
        test_only=options.get("test_only", False),
    )
    arguments = (options["ops"], options["only"], options["skip"], plugins, options["baseline"])
    named = foreign.ask(plan.named, *arguments, plugins=plugins)
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
            costs=_costs(options),
            routing_trace=options["routing_trace"],
            trace_steps=options["trace_steps"],
        )
        for op in options["ops"]
    ]


_SESSIONS: list[Any] = []
"""The session of this process, once there is one."""


def main() -> None:
    """Run the command; report every expected failure in one line and an exit code."""
    shell.run("tritonbench", command, GroupbenchError)
