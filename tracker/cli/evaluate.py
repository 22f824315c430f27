"""`groupbench evaluate`: a candidate against a backend, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.ab import progress_line
from groupbench.tracker.cli.here import this_project
from groupbench.tracker.cli.options import BACKEND, DTYPE, OPERATOR, SHAPE, Percent
from groupbench.tracker.cli.output import write_json
from groupbench.tracker.durations import Duration
from groupbench.tracker.text.wording import counted, milliseconds, printable

if TYPE_CHECKING:
    from groupbench.tracker.ab.evaluate import Evaluation


@click.command()
@click.argument("candidate")
@click.option("--against", metavar="NAME", help="Backend to compare with. [the operator's baseline]")
@click.option(*OPERATOR, metavar="NAME", help="Only the candidate's backends of this operator.")
@click.option(*BACKEND[:2], "backends", multiple=True, metavar="NAME", help="Only this one of the candidate's.")
@click.option(*SHAPE[:2], "shapes", multiple=True, metavar="TEXT", help="This shape; may be repeated.")
@click.option("--suite", "suites", multiple=True, metavar="NAME", help="This suite; may be repeated.")
@click.option(*DTYPE[:2], "dtypes", multiple=True, metavar="NAME", help="This precision; may be repeated.")
@click.option("--mode", default="fwd", show_default=True, help="fwd; bwd, fwd_bwd where the operator has them.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--plugin", "plugins", multiple=True, metavar="MODULE|FILE.py", help="The operator's plugin; trusted.")
@click.option("--budget", type=Duration(least=1, most=86_400), default="15s", show_default=True, help="For each cell.")
@click.option(
    "--min-effect", type=Percent(), default="1", show_default=True, metavar="PCT", help="Anything smaller is the same."
)
@click.option(
    "--timeout", type=Duration(least=1, most=1e6), default="120s", show_default=True, help="Silence that ends a cell."
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def evaluate(context: click.Context, candidate: str, as_json: bool, **given: Any) -> None:
    """Say whether CANDIDATE, a file with a backend, is right, honest and faster.

    CANDIDATE may have been written by a program: its results are judged, and its times bounded, by processes that do
    not import it. Without --shape or --suite the operator's first problem is measured.

    \b
    0  right, and faster or the same
    1  wrong, suspicious or slower
    2  usage
    3  it failed, or was not resolved within its budget
    """
    from groupbench.tracker.ab.evaluate import Evaluator, exit_code

    project = this_project(context)
    of_file = (project.place(name) if name.endswith(".py") else name for name in project.plugins())
    with Evaluator(
        tuple(dict.fromkeys((*of_file, *given.pop("plugins")))),
        device=given.pop("device"),
        budget_s=given.pop("budget"),
        min_effect=given.pop("min_effect"),
        timeout_s=given.pop("timeout"),
        progress=progress_line(),
    ) as evaluator:
        found = evaluator.evaluate(candidate, **given)
    if as_json:
        write_json(found)
    else:
        click.echo("\n\n".join("\n".join(map(printable, lines_of(one))) for one in found))
    context.exit(exit_code(found))


def lines_of(one: Evaluation) -> list[str]:
    """An evaluation for people."""
    lines = [f"{one.operator}/{one.backend} against {one.against}, {one.shape} {one.dtype} {one.mode} on {one.device}"]
    lines.append(f"  {one.verdict}" + (f": {one.problem}" if one.problem else ""))
    if one.speedup is not None:
        interval = f", {_speed(one.low)} to {_speed(one.high)}"
        lines[-1] += f": {one.speedup:.3f} x{interval}, from {counted(one.blocks, 'block')}"
        lines.append(f"  {milliseconds(one.candidate_ms)} ms against {milliseconds(one.against_ms)} ms")
    if one.rms is not None:
        lines.append(
            f"  rms error {one.rms:.2g}" + (f", {one.against_rms:.2g} of {one.against}" if one.against_rms else "")
        )
    lines += [f"  note: {one.note}"] if one.note else []
    for kernel in one.kernels:
        facts = ", ".join(f"{name} {value}" for name, value in kernel.items() if name not in ("name", "hash", "config"))
        lines.append(f"  kernel {kernel['name']}: {facts}")
    return [*lines, *(f"  try: {command}" for command in one.to_try)]


def _speed(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
