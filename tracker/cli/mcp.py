"""`groupbench mcp`: the questions that commands answer, as tools of the Model Context Protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import click

from groupbench.tracker.errors import TrackerError
from groupbench.tracker.exits import ExitCode

INSTRUCTIONS = """groupbench tracks latency and accuracy of GPU kernels per commit. A series is one operator,
backend, shape, dtype and mode. Ask `gate` for the verdict on the newest run, `history` for how a series went, `compare`
for two commits, `explain` for what changed in their kernels. `evaluate` judges a file with a new backend; `bisect`
names the commit that made a kernel slower. Both measure, and are there only if the server was started with
--allow-measuring."""

Tool = Callable[..., Any]


class NotInstalled(TrackerError):
    """The SDK is missing."""

    exit_code = ExitCode.USAGE


def ask(arguments: Sequence[str], db: str | None = None) -> dict[str, Any]:
    """What a command answers: its JSON, its exit code with what that means, and what it said besides."""
    first, *others = arguments
    command = [sys.executable, "-m", "groupbench.tracker", *options(db=db), first, "--json", *others]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        answer: Any = json.loads(done.stdout)
    except ValueError:
        answer = done.stdout.strip() or None
    meaning = (ExitCode(done.returncode).name if done.returncode in set(ExitCode) else "failed").lower()
    return {"exit_code": done.returncode, "meaning": meaning, "answer": answer, "messages": done.stderr.strip()}


def options(**given: Any) -> list[str]:
    """`--name value` for each that is given; an option that is repeated for a list."""
    found: list[str] = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value] if value not in (None, "") else []:
            found += [f"--{name.replace('_', '-')}={each}"]
    return found


def reading_tools(db: str | None) -> list[Tool]:
    """Tools that read the database and change nothing."""

    def history(
        operator: str | None = None,
        backend: str | None = None,
        shape: str | None = None,
        since: str | None = None,
        limit: int = 20,
    ) -> dict[str, Any]:
        """How each series went from commit to commit. `shape` may have wildcards; `since` is 2026-01-31 or 7d."""
        given = {"operator": operator, "backend": backend, "shape": shape, "since": since, "limit": limit}
        return ask(["history", *options(**given)], db)

    def gate(run: str | None = None) -> dict[str, Any]:
        """Judge the newest run, or one by the start of its id: what got slower, less accurate or wrong since when."""
        return ask(["gate", *options(run=run)], db)

    def compare(a: str, b: str, operator: str | None = None, backend: str | None = None) -> dict[str, Any]:
        """Compare two commits, runs or files of records, series by series."""
        return ask(["compare", *options(operator=operator, backend=backend), "--", a, b], db)

    def alerts() -> dict[str, Any]:
        """List the changes for the worse that are open."""
        return ask(["alerts"], db)

    def show(id: str) -> dict[str, Any]:
        """All that is known of a point or a run, by its id."""
        return ask(["show", "--", id], db)

    def explain(
        a: str, b: str | None = None, operator: str | None = None, backend: str | None = None
    ) -> dict[str, Any]:
        """Say what happened to the kernels between two commits or runs: configs, registers, spills, code."""
        return ask(["explain", *options(operator=operator, backend=backend), "--", a, *([b] if b else [])], db)

    return [history, gate, compare, alerts, show, explain]


def measuring_tools(db: str | None, device: str) -> list[Tool]:
    """Tools that run code on this machine, one at a time."""
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
        """Say whether a file with a backend is right, honest and faster than another backend (the operator's baseline).

        `plugins` are files of operators that are not groupbench's own. The first wrong place of a result is named.
        """
        key = tuple(plugins or ())
        with alone:
            if key not in kept:
                for other in [*kept]:
                    kept.pop(other).close()
                kept[key] = Evaluator(key, device=device)
            found = kept[key].evaluate(
                candidate,
                operator=operator,
                against=against,
                shapes=shapes or (),
                suites=suites or (),
                dtypes=dtypes or (),
                mode=mode,
            )
        return {"evaluations": msgspec.to_builtins(found)}

    def bisect(
        good: str, bad: str, operator: str, backend: str, shape: str, plugins: list[str] | None = None
    ) -> dict[str, Any]:
        """Name the commit between two that made a kernel slower or less accurate. Takes minutes."""
        given = {"operator": operator, "backend": backend, "shape": shape, "plugin": plugins or [], "device": device}
        with alone:
            return ask(["bisect", *options(**given), "--", good, bad], db)

    return [evaluate, bisect]


@click.command()
@click.option("--allow-measuring", is_flag=True, help="Offer evaluate and bisect too, which run code on this machine.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.pass_obj
def mcp(db: str, allow_measuring: bool, device: str) -> None:
    """Serve the Model Context Protocol on standard input and output.

    Without --allow-measuring its tools read the database and change nothing.

    \b
    claude mcp add groupbench -- groupbench mcp --allow-measuring
    """
    server(reading_tools(db) + (measuring_tools(db, device) if allow_measuring else [])).run()


def server(tools: Sequence[Tool]) -> Any:
    """The SDK's server with these tools. Raises NotInstalled."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise NotInstalled(f"{error.name} is not installed: pip install 'groupbench[mcp]'") from error
    made = MCPServer("groupbench", instructions=INSTRUCTIONS)
    for tool in tools:
        reads = tool.__name__ not in ("evaluate", "bisect")
        made.tool(annotations=ToolAnnotations(read_only_hint=reads))(tool)
    return made
