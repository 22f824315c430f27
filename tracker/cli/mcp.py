"""`groupbench mcp`: serve the commands as tools of the Model Context Protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import click

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode

INSTRUCTIONS = """groupbench tracks the latency and accuracy of GPU kernels per commit. A series is one operator,
backend, shape, dtype and mode over time. `gate` returns the verdict on the newest run, `history` the results of a
series per commit, `compare` the difference between two commits, and `explain` how their kernels differ. `evaluate`
judges a file with a new backend; `bisect` finds the commit that made a kernel slower. These two run measurements, and
exist only if the server was started with --allow-measuring."""

Tool = Callable[..., Any]


class NotInstalled(TrackerError):
    """The MCP SDK is not installed."""

    exit_code = ExitCode.USAGE


def ask(arguments: Sequence[str], db: str | None = None) -> dict[str, Any]:
    """Run a command; return the JSON as `answer`, the exit code and its meaning, and the messages."""
    first, *others = arguments
    command = [sys.executable, "-m", "groupbench.tracker", *options(db=db), first, "--format=json", *others]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        output: Any = json.loads(done.stdout)
    except ValueError:
        output = done.stdout.strip() or None
    meaning = (ExitCode(done.returncode).name if done.returncode in set(ExitCode) else "failed").lower()
    return {"exit_code": done.returncode, "meaning": meaning, "answer": output, "messages": done.stderr.strip()}


def options(**values: Any) -> list[str]:
    """Return `--name=value` for each value but None and empty ones; for a list, one per item."""
    words: list[str] = []
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value] if value not in (None, "") else []:
            words += [f"--{name.replace('_', '-')}={each}"]
    return words


def reading_tools(db: str | None) -> list[Tool]:
    """Return the read-only tools."""

    def history(
        operator: str | None = None,
        backend: str | None = None,
        shape: str | None = None,
        since: str | None = None,
        limit: int = 20,
    ) -> dict[str, Any]:
        """Show how each series changed from commit to commit.

        `shape` may contain the wildcards * and ?; `since` is a date (2026-01-31) or an age (7d).
        """
        filters = {"operator": operator, "backend": backend, "shape": shape, "since": since, "limit": limit}
        return ask(["history", *options(**filters)], db)

    def gate(run: str | None = None) -> dict[str, Any]:
        """Judge the newest run, or the one whose id starts with `run`: list slower and less accurate series."""
        return ask(["gate", *options(run=run)], db)

    def compare(a: str, b: str, operator: str | None = None, backend: str | None = None) -> dict[str, Any]:
        """Compare two commits, runs or files of records, series by series."""
        return ask(["compare", *options(operator=operator, backend=backend), "--", a, b], db)

    def alerts() -> dict[str, Any]:
        """List open alerts."""
        return ask(["alerts"], db)

    def show(id: str) -> dict[str, Any]:
        """Show everything stored about a point or a run, by id."""
        return ask(["show", "--", id], db)

    def explain(
        a: str, b: str | None = None, operator: str | None = None, backend: str | None = None
    ) -> dict[str, Any]:
        """Explain how the kernels of two commits or runs differ: configs, registers, spills and code."""
        return ask(["explain", *options(operator=operator, backend=backend), "--", a, *([b] if b else [])], db)

    return [history, gate, compare, alerts, show, explain]


def measuring_tools(db: str | None, device: str) -> list[Tool]:
    """Return the tools to run code on this machine, one at a time."""
    import msgspec

    from groupbench.tracker.ab.evaluate import Evaluator

    kept: dict[tuple[str, ...], Evaluator] = {}
    alone = threading.Lock()

    def evaluate(
        candidate: str,
        against: str | None = None,
        operator: str | None = None,
        shapes: list[str] | None = None,
        suites: list[str] | None = None,
        dtypes: list[str] | None = None,
        mode: str = "fwd",
        plugins: list[str] | None = None,
    ) -> dict[str, Any]:
        """Check whether a file with a backend is correct, honest and faster than `against` (the operator's baseline).

        `plugins` are files with operators other than groupbench's own. For a wrong result, `problem` names the
        first wrong element.
        """
        key = tuple(plugins or ())
        with alone:
            if key not in kept:
                for other in [*kept]:
                    kept.pop(other).close()
                kept[key] = Evaluator(key, device=device)
            evaluations = kept[key].evaluate(
                candidate,
                operator=operator,
                against=against,
                shapes=shapes or (),
                suites=suites or (),
                dtypes=dtypes or (),
                mode=mode,
            )
        return {"evaluations": msgspec.to_builtins(evaluations)}

    def bisect(
        good: str, bad: str, operator: str, backend: str, shape: str, plugins: list[str] | None = None
    ) -> dict[str, Any]:
        """Find the commit between `good` and `bad` that made a kernel slower or less accurate. Takes minutes."""
        cell = {"operator": operator, "backend": backend, "shape": shape, "plugin": plugins or [], "device": device}
        with alone:
            return ask(["bisect", *options(**cell), "--", good, bad], db)

    return [evaluate, bisect]


@click.command()
@click.option("--allow-measuring", is_flag=True, help="Also offer evaluate and bisect, which run code on this machine.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="Device that evaluate and bisect measure on.",
)
@click.pass_obj
def mcp(db: str, allow_measuring: bool, device: str) -> None:
    """Serve the Model Context Protocol on standard input and output.

    Without --allow-measuring, the tools only read the database.

    \b
    claude mcp add groupbench -- groupbench mcp --allow-measuring
    """
    server(reading_tools(db) + (measuring_tools(db, device) if allow_measuring else [])).run()


def server(tools: Sequence[Tool]) -> Any:
    """Return the SDK's server with these tools. Raises NotInstalled."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise NotInstalled(f"{error.name} is not installed: pip install 'groupbench[mcp]'") from error
    mcp_server = MCPServer("groupbench", instructions=INSTRUCTIONS)
    for tool in tools:
        reads = tool.__name__ not in ("evaluate", "bisect")
        mcp_server.tool(annotations=ToolAnnotations(read_only_hint=reads))(tool)
    return mcp_server
