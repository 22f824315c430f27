"""`groupbench mcp`: serve the commands as tools of the Model Context Protocol."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from groupbench.tracker.ab.evaluate import Evaluator
from groupbench.tracker.cli.declared import command, flag, option
from groupbench.tracker.cli.here import this_project, wait_option
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.text.brief import ANSWER_BYTES, brief, by_series, fewer_points, plain, size
from groupbench.tracker.tools.lease import WAITING

INSTRUCTIONS = """groupbench tracks the latency and accuracy of GPU kernels per commit. A series is one operator,
backend, shape, dtype and mode over time. Ask in this order: `gate` for the regressions of the newest run, with the
commits and the command to reproduce them (`repro`); `gate` with `why` for the evidence; `history` for the results of a
series per commit; `explain` for the difference between the kernels of two commits. `compare` compares two commits, and
`incidents` lists regressions by cause. `evaluate` judges a file with a new backend; `bisect` finds the commit that made
a kernel slower. These two run measurements, and exist only if the server was started with --allow-measuring.
`acknowledge` and `expect` change incidents, and exist only with --write. An answer has at most 10 kB; `left_out` counts
the missing entries and names the arguments to ask for them. Messages may name commands for a shell."""

Tool = Callable[..., Any]

NARROW = "give operator, backend or another filter"
SERIES = ("operator", "backend", "shape", "dtype", "mode", "hardware", "host", "protocol", "seed")
POINT = ("started", "commit", "latency_ms", "spread", "change", "rms", "status", "id", "message")


class NotInstalled(TrackerError):
    """The MCP SDK is not installed."""

    exit_code = ExitCode.USAGE


def ask(
    arguments: Sequence[str],
    db: str | None = None,
    narrow: str = NARROW,
    shorten: Callable[[Any], Any] = lambda output: output,
    form: str = "json",
) -> dict[str, Any]:
    """Run a command; return the JSON as `answer`, the exit code and its meaning, and the messages, of at most 10 kB.

    Args:
        arguments: The command's name and arguments.
        db: Its database.
        narrow: How to ask for less.
        shorten: Applied to the answer before it is cut.
        form: The command's output format; empty for a command without formats.
    """
    first, *others = arguments
    formats = [f"--format={form}"] if form else []
    command = own_program("groupbench.tracker", *options(db=db), *first.split(), *formats, *others)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        output: Any = json.loads(done.stdout)
    except ValueError:
        output = done.stdout.strip() or None
    messages = plain(done.stderr.strip(), 1500)
    instead = in_a_shell(messages)
    body = brief(shorten(output), narrow, ANSWER_BYTES - size(messages) - size(instead) - 200)
    facts = {"exit_code": done.returncode, "meaning": meaning(done.returncode, output), "answer": body}
    return facts | {name: text for name, text in (("messages", messages), ("in_a_shell", instead)) if text}


def meaning(code: int, output: Any) -> str:
    """Return the meaning of an exit code, in one word."""
    if code == ExitCode.FAILED:
        return "failed" if output is None else "worse"
    return (ExitCode(code).name if code in set(ExitCode) else "failed").lower()


def in_a_shell(messages: str) -> str:
    """Return a note for messages with commands or options, which a client's tools may lack; else nothing."""
    if not re.search(r"`[^`]+`|(?<!\S)--[a-z]", messages):
        return ""
    return "commands and options in messages are for a shell; the tools take filters as arguments instead"


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
        dtype: str | None = None,
        mode: str | None = None,
        since: str | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """Show how each series changed from commit to commit, those with the largest change first.

        `shape` may contain the wildcards * and ?; `since` is a date (2026-01-31) or an age (7d); `limit` is the number
        of newest points of each series: by default 20, and 3 of every series. The answer has fewer if it is too long.
        """
        where = {"operator": operator, "backend": backend, "shape": shape, "dtype": dtype, "mode": mode}
        narrow = "give operator, backend, shape or since for more points of fewer series"
        limit = limit or (20 if any(where.values()) else 3)
        return ask(["history", *options(**where, since=since, limit=limit)], db, narrow, _series)

    def gate(run: str | None = None, why: str | None = None) -> dict[str, Any]:
        """Judge the newest run, or the one whose id starts with `run`: list slower and less accurate series.

        Each has the change with its interval (`low`, `high`), the commits, and the command to reproduce it. With
        `why`, words of a series, such as "grouped_gemm triton", the answer is the evidence about it as text.
        """
        narrow = "the most severe come first; `why` with the words of one series shows it alone"
        if why:
            return ask(["gate", *options(run=run, why=why)], db, "give more words of the series", form="table")
        return ask(["gate", *options(run=run)], db, narrow, _notable)

    def compare(
        a: str,
        b: str,
        operator: str | None = None,
        backend: str | None = None,
        shape: str | None = None,
        dtype: str | None = None,
        mode: str | None = None,
    ) -> dict[str, Any]:
        """Compare two commits, runs or files of records, series by series, the most severe first."""
        where = {"operator": operator, "backend": backend, "shape": shape, "dtype": dtype, "mode": mode}
        return ask(["compare", "--fail-on=regressed", *options(**where), "--", a, b], db)

    def incidents() -> dict[str, Any]:
        """List open incidents: regressions of one cause, with the commit, the owner, the cost and the next step."""
        return ask(["incidents list"], db, "ask `gate` for the newest run alone, or `show` for one point")

    def show(id: str) -> dict[str, Any]:
        """Show everything stored about a point or a run, by id."""
        return ask(["show", "--", id], db, "ask for one point instead of a run")

    def explain(
        a: str, b: str | None = None, operator: str | None = None, backend: str | None = None, shape: str | None = None
    ) -> dict[str, Any]:
        """Explain how the kernels of two commits or runs differ: configs, registers and spills."""
        where = options(operator=operator, backend=backend, shape=shape)
        return ask(["explain", *where, "--", a, *([b] if b else [])], db)

    return [history, gate, compare, incidents, show, explain]


def _series(rows: Any) -> Any:
    """Return the rows of `history` by series, with as many points as fit."""
    if not isinstance(rows, list):
        return rows
    entries, points = fewer_points(
        by_series(rows, SERIES, POINT), lambda all_: size(plain(all_)) <= ANSWER_BYTES - 1500
    )
    return {"points_each": points, "series": entries}


def _notable(verdict: Any) -> Any:
    """Return a verdict of `gate` without the unchanged series, which are counted."""
    if not isinstance(verdict, dict) or "series" not in verdict:
        return verdict
    return verdict | {"series": [row for row in verdict["series"] if row["verdict"] != "ok"]}


def writing_tools(db: str | None) -> list[Tool]:
    """Return the tools to change the state of incidents."""

    def acknowledge(incidents: list[int], reason: str) -> dict[str, Any]:
        """Mark incidents as known and being worked on. The gate lists them, and fails only for a wrong result."""
        return ask(["incidents ack", *options(reason=reason), "--", *map(str, incidents)], db, form="")

    def expect(incidents: list[int], reason: str, until: str | None = None) -> dict[str, Any]:
        """Accept the new levels of incidents, with a reason, for good or until a date (2026-01-31) or a time (30d)."""
        return ask(["incidents expect", *options(reason=reason, until=until), "--", *map(str, incidents)], db, form="")

    return [acknowledge, expect]


def measuring_tools(db: str | None, device: str, folders: Sequence[str] = ()) -> list[Tool]:
    """Return the tools to run code on this machine, one at a time.

    Args:
        folders: Folders in which Python finds the modules of plugins and candidates.
    """
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
            WAITING.begun = False  # --wait limits the wait of every call
            if key not in kept:
                for other in [*kept]:
                    kept.pop(other).close()
                kept[key] = Evaluator(key, folders=folders, device=device)
            evaluated = kept[key].evaluate(
                candidate,
                operator=operator,
                against=against,
                shapes=shapes or (),
                suites=suites or (),
                dtypes=dtypes or (),
                mode=mode,
            )
            evaluations = list(evaluated)
        answer: dict[str, Any] = brief(
            {"evaluations": msgspec.to_builtins(evaluations)}, "give one shape and one dtype"
        )
        return answer

    def bisect(
        good: str,
        bad: str,
        operator: str | None = None,
        backend: str | None = None,
        shape: str | None = None,
        dtype: str | None = None,
        mode: str | None = None,
        metric: str | None = None,
        series: str | None = None,
        plugins: list[str] | None = None,
    ) -> dict[str, Any]:
        """Find the commit between `good` and `bad` that made a kernel slower or less accurate. Takes minutes.

        Give a cell by operator, backend, shape, dtype and mode, or `series`: the id of a stored point, as `history`
        lists it. `metric` is latency (the default), accuracy or another searched metric.
        """
        cell = {"operator": operator, "backend": backend, "shape": shape, "dtype": dtype, "mode": mode}
        search = {"metric": metric, "series": series, "plugin": plugins or [], "device": device}
        with alone:
            wait = f"{WAITING.first_s}s"
            return ask(["bisect", *options(**cell, **search, wait=wait), "--", good, bad], db)

    return [evaluate, bisect]


@command()
@wait_option()
def mcp(
    context: click.Context,
    allow_measuring: bool = flag(
        "--allow-measuring", help="Also offer evaluate and bisect, which run code on this machine."
    ),
    device: str = option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        help="Device that evaluate and bisect measure on.",
    ),
    write: bool = flag("--write", help="Also offer acknowledge and expect, which change incidents."),
) -> None:
    """Serve the Model Context Protocol on standard input and output.

    Without --allow-measuring and --write, the tools only read the database. An answer has at most 10 kB.

    \b
    claude mcp add groupbench -- groupbench mcp --allow-measuring
    """
    db = context.obj
    tools = reading_tools(db)
    if allow_measuring:
        tools += measuring_tools(db, device, this_project(context).python_path())
    server(tools + (writing_tools(db) if write else [])).run()


def server(tools: Sequence[Tool]) -> Any:
    """Return the SDK's server with these tools. Raises NotInstalled."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise NotInstalled(f"{error.name} is not installed: pip install 'groupbench[mcp]'") from error
    mcp_server = MCPServer("groupbench", instructions=INSTRUCTIONS)
    for tool in tools:
        reads = tool.__name__ not in ("evaluate", "bisect", "acknowledge", "expect")
        annotations = ToolAnnotations(read_only_hint=reads)
        mcp_server.tool(annotations=annotations, structured_output=False)(_compact(tool))
    return mcp_server


def _compact(tool: Tool) -> Tool:
    """Return a tool whose answer is JSON without indentation: the SDK would indent it, and send it twice."""

    @functools.wraps(tool)
    def compact(**arguments: Any) -> str:
        return json.dumps(tool(**arguments), ensure_ascii=False)

    return compact
