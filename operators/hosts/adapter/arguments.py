"""TritonBench's arguments: the name of their protocol, and errors for those that it would ignore."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from groupbench.operators.errors import UsageError
from groupbench.operators.hosts.adapter.internals import run_utils, triton_op
from groupbench.operators.hosts.adapter.lists import known_metrics
from groupbench.operators.hosts.journal import Event, Setup, send
from groupbench.tracker.text.wording import no_such

TIMER = (
    *("cudagraph", "skip_cache_clearing", "warmup", "rep", "repcnt", "entropy_criterion", "entropy_max_angle"),
    *("entropy_min_r2", "entropy_window_size", "entropy_max_samples"),
)
"""TritonBench's arguments for its timing. Our operators are timed by our protocol."""

LEVEL = (
    *("sleep", "gpu_lockdown", "gpu_lock_clock_mhz", "allow_tf32", "helion_backend", "autotune_warmup"),
    *("autotune_rep", "test_only"),
)
"""Its other arguments that affect latencies."""


def protocol_name(tb_args: Any, setup: Setup) -> str:
    """Return the protocol's name for records, with the arguments that affect latency and are not the default."""
    defaults = run_utils.get_parser().parse_args([])

    def changed(names: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            value = getattr(tb_args, name)
            if value != getattr(defaults, name):
                yield name if value is True else f"{name}={value}"

    timer = list(changed(TIMER))
    mode = tb_args.latency_measure_mode
    if not setup.own:
        return "+".join([f"tritonbench:{mode}", *timer, *changed(LEVEL)])
    timer += changed(("latency_measure_mode",))
    if timer:
        flag = timer[0].split("=")[0].replace("_", "-")
        raise UsageError(
            f"--{flag} works only with TritonBench's own operators; this one has --protocol, --bursts, --samples"
        )
    return "+".join([setup.protocol.label, *changed(LEVEL)])


@contextlib.contextmanager
def parsed(arguments: list[str] | None) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield (options that are not the default, unknown arguments) of an operator with a parser of its own."""
    options: dict[str, Any] = {}
    unknown = list(arguments or ())
    real = argparse.ArgumentParser.parse_known_args

    def parse(parser: Any, args: Any = None, namespace: Any = None) -> Any:
        values, rest = real(parser, args, namespace)
        if args is not None and list(args) == list(arguments or ()):
            defaults = vars(real(parser, [])[0])
            options.update({name: value for name, value in vars(values).items() if value != defaults.get(name)})
            unknown[:] = [text for text in unknown if text in rest]
        return values, rest

    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[assignment,method-assign]
    try:
        yield options, unknown
    finally:
        argparse.ArgumentParser.parse_known_args = real  # type: ignore[method-assign]


def check_inputs(op: Any) -> None:
    """Raise UsageError for an input that does not exist, which TritonBench would ignore."""
    count = op._available_num_inputs
    for number in map(int, op.tb_args.input_id.split(",")):
        if count and not 0 <= number < count:
            raise UsageError(f"--input-id {number}: there are inputs 0 to {count - 1}")


def check_backends(op: Any, setup: Setup) -> None:
    """Raise UsageError for unknown backends, which TritonBench would ignore."""
    registered = list(triton_op.REGISTERED_BENCHMARKS.get(op.name, ()))
    only, skip = op._only or [], op._skip or []
    baselines = op.tb_args.baseline.split(",") if op.tb_args.baseline else []
    strays = _strays(only, skip, registered, op.tb_args.only_match_mode)
    wrong = [name for name in baselines if name not in registered] + (strays if setup.alone else [])
    send(setup, Event(strays=tuple(strays)))
    if wrong:
        raise UsageError(no_such("no backend", wrong[0], registered))
    if only and not set(only) - set(strays):
        raise UsageError(f"none of the backends of --only; known: {', '.join(registered)}")
    if not set(only or registered) - set(skip):
        raise UsageError("--only and --skip leave no backend")


def _strays(only: list[str], skip: list[str], registered: list[str], match_mode: str) -> list[str]:
    """Return the names that select no backend. Unless they have to match exactly, those of `only` may be prefixes."""
    strays = [name for name in [*only, *skip] if name not in registered]
    if match_mode == "exact":
        return strays
    return [name for name in strays if name in skip or not any(text.startswith(name) for text in registered)]


def check_metrics(setup: Setup, arguments: list[str]) -> None:
    """Raise UsageError for a metric unknown to TritonBench: the column would be blank."""
    names = arguments[arguments.index("--metrics") + 1].split(",") if "--metrics" in arguments else []
    available = known_metrics(setup.op)
    for name in names:
        if name not in available:
            raise UsageError(
                f"TritonBench has no metric {name!r}; it has: {', '.join(available)}. --host builtin has others, "
                "which records always contain"
            )


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise UsageError, instead of printing the usage."""
    raise UsageError(message)
