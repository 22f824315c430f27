"""The `groupbench` command. Commands are imported lazily to keep `--help` fast."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from groupbench.tracker.cli.groups import Commands, Program

SECTIONS: dict[str, Commands] = {
    "Measure": {
        "init": ("init:init", "Write groupbench.toml, a benchmark and a CI workflow."),
        "night": ("night:night", "Measure groupbench.toml, store, judge and report."),
        "backfill": ("backfill:backfill", "Measure past commits, each in its own checkout."),
        "pull-request": ("pull_request:pull_request", "Compare a change with its merge base, by measuring both."),
        "evaluate": ("evaluate:evaluate", "Check whether a candidate is correct, honest and faster."),
        "tune": ("tune:tune", "Find the fastest kernel configs for this GPU."),
        "doctor": ("doctor:doctor", "Check this machine, and suggest improvements."),
        "selftest": ("selftest:selftest", "Check that this machine catches backends that cheat."),
        "queue": ("queue:queue", "List the commands that measure or wait for a device."),
    },
    "Judge": {
        "gate": ("gate:gate", "Judge the newest run; the exit code is the verdict."),
        "incidents": (
            "List incidents, or change their state.\n\nWithout a command, list open ones: see `incidents list --help`.",
            "List incidents, or change their state.",
        ),
        "triage": ("incidents:week", "Summarise the incidents of a week in Markdown."),
        "pins": (
            "List, add and remove pinned commits, with which every run is compared in addition to its history.\n\n"
            "Without a command, list them.",
            "List, add and remove pinned commits.",
        ),
        "post": ("post:post", "Post or update a comment on a pull request."),
    },
    "Compare": {
        "ab": ("ab:ab", "Compare BASE and HEAD by measuring them alternately."),
        "compare": ("compare:compare", "Compare two commits, runs or files, series by series."),
        "league": ("league:league", "Rank the backends of each problem."),
        "gains": ("gains:gains", "List problems by the time that an optimal kernel saves."),
    },
    "Find the cause": {
        "confirm": ("confirm:confirm", "Measure suspects again: an A/B of both commits."),
        "bisect": ("bisect:bisect", "Find the commit that made a kernel slower or wrong."),
        "profile": ("profile:profile", "Profile a call on the GPU, and store the counters."),
        "explain": ("explain:explain", "Explain how the kernels of two commits or runs differ."),
    },
    "Show": {
        "history": ("history:history", "Show how each series changed from commit to commit."),
        "list": (
            "List runs, commits, series, environments or operators.",
            "List runs, commits, series, environments, operators.",
        ),
        "show": ("show:show", "Show everything stored about a point or a run."),
        "report": ("report:report", "Write a report as one offline HTML file."),
        "serve": ("serve:serve", "Serve a live dashboard of the database."),
        "mcp": ("mcp:mcp", "Serve the commands over the Model Context Protocol."),
    },
    "Store and maintain": {
        "ingest": ("ingest:ingest", "Store files of records in the database."),
        "import": ("import_:import_", "Import files written by other benchmarks."),
        "db": (
            "Query, export and maintain the database.",
            "Query, export, back up, verify or merge the database.",
        ),
    },
}
"""The commands by task. name: (module:attribute below this package, or a group's help; one line of help)"""

GROUPS: dict[str, Commands] = {
    "incidents": {
        "list": ("incidents:list_incidents", "List open incidents, the most expensive first."),
        "ack": ("incidents:ack", "Mark incidents as known and being worked on."),
        "expect": ("incidents:expect", "Accept the new levels of incidents."),
        "close": ("incidents:close", "Close incidents as fixed or invalid."),
        "note": ("incidents:note", "Add a note to incidents."),
        "accept-transition": (
            "incidents:accept_transition",
            "Accept levels that changed with the toolchain or machine.",
        ),
        "mute": ("decisions:mute", "Let the gate pass series until a date."),
        "unmute": ("decisions:unmute", "Judge muted series again."),
    },
    "pins": {
        "list": ("pins:list_pins", "List the pinned commits."),
        "add": ("pins:add", "Compare every later run with a fixed commit too."),
        "remove": ("pins:remove", "Stop comparing runs with a pinned commit."),
    },
    "list": {
        "runs": ("listing:runs", "List the runs, newest first."),
        "commits": ("listing:commits", "List the measured commits."),
        "series": ("listing:series", "List the series."),
        "envs": ("envs:envs", "List the environments and how they differ."),
        "operators": ("listing:operators", "List the operators with results."),
    },
    "db": {
        "sql": ("database:sql", "Run one read-only SQL statement."),
        "export": ("export:export", "Export every point as records, CSV or PyTorch's v3 format."),
        "prune": ("database:prune", "Remove some of the old points."),
        "backup": ("database:backup", "Copy the database while it is in use."),
        "verify": ("database:verify", "Check the database file, its references and every hash."),
        "merge": ("database:merge", "Add another database to this one."),
        "reject": ("decisions:reject", "Reject a run, so that no run is compared with it."),
        "rename": ("decisions:rename", "Rename an operator, a backend or a shape."),
    },
}
"""Commands of the groups."""


@click.command(
    cls=Program,
    sections=SECTIONS,
    groups=GROUPS,
    defaults={"incidents": "list", "pins": "list"},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--db",
    metavar="FILE|URL",
    envvar="GROUPBENCH_DB",
    help="Database. Default: GROUPBENCH_DB, or the project file's.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Project file. Default: groupbench.toml here or in a parent.",
)
@click.option(
    "--urgent",
    is_flag=True,
    help="Measure first, between two problems of a night.",
)
@click.option("-v", "--verbose", count=True, help="Log each step to stderr; -vv logs more.")
@click.version_option(package_name="groupbench")
@click.pass_context
def main(context: click.Context, db: str | None, config: Path | None, urgent: bool, verbose: int) -> None:
    """\b
    Track the latency and accuracy of kernels per commit.
    Exit codes: 0 ok, 1 worse, 2 usage error, 3 incomplete, 4 not comparable.
    """
    from groupbench.tracker.tools import logs  # `groupbench --help` needs neither

    here = importlib.import_module(f"{__name__}.here")
    logs.configure(verbose)
    here.WAITING.urgent = urgent
    project = here.find_project(context, config)
    context.obj = project.database if db is None else db
