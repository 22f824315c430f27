"""`groupbench evaluate`: check a candidate backend and compare it with another, in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click

from groupbench.tracker.ab.evaluate import Evaluation, Evaluator, exit_code
from groupbench.tracker.cli.ab import progress_line
from groupbench.tracker.cli.declared import argument, command, option, options
from groupbench.tracker.cli.here import this_project, wait_option
from groupbench.tracker.cli.options import CELL_BUDGET, MIN_EFFECT_SAME, CellChoice, Percent, cell_choice
from groupbench.tracker.cli.output import Format, output_format, write_json
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.text.unchecked import unchecked_lines
from groupbench.tracker.text.wording import counted, milliseconds, printable
from groupbench.tracker.tools import signals
from groupbench.tracker.tools.parameters import Duration


@dataclass(frozen=True)
class EvaluateOptions:
    """Options for the time per cell and the smallest relevant change."""

    budget: float = option("--budget", type=Duration(least=1, most=86_400), default="15s", help=CELL_BUDGET)
    min_effect: float = option("--min-effect", type=Percent(), default="1", help=MIN_EFFECT_SAME)
    timeout: float = option(
        "--timeout",
        type=Duration(least=1, most=1e6),
        default="120s",
        help="Fail a cell that does not answer within this time, such as while it is prepared.",
    )


@command()
@wait_option()
def evaluate(
    context: click.Context,
    candidate: str = argument(),
    against: str | None = option("--against", help="Backend to compare with. Default: the operator's baseline."),
    choice: CellChoice = cell_choice("Evaluate only", "the operator's first shape", required=False),
    how: EvaluateOptions = options(EvaluateOptions),
    form: Format = output_format("table", "json"),
) -> None:
    """Check whether CANDIDATE, a Python file with a backend, is correct, honest and faster than the baseline.

    CANDIDATE may try to cheat: other processes judge the results, and the times are checked against
    the limits of the device. It is not sandboxed and runs with your permissions. Plugins of --plugin are trusted.

    \b
    Exit codes:
    0   correct, and faster or the same
    1   wrong, suspicious or slower
    2   usage error
    3   not resolved, or the baseline fails
    5   the candidate failed: it does not load, raises, crashes or does not answer
    75  another command uses this device

    With --format json, stdout has an answer for every outcome. After a usage error, it is an object with the verdict
    `refused` and the problem.
    """
    evaluations: list[Evaluation] = []
    try:
        with signals.keeping(lambda: f"{counted(len(evaluations), 'evaluation')} finished, and nothing is stored"):
            evaluations.extend(_evaluations(context, candidate, against, choice, how))
    except (TrackerError, click.UsageError) as error:
        if form == "json":
            write_json([*evaluations, {"verdict": "refused", "problem": error.message}])
        raise
    except KeyboardInterrupt:
        _show(evaluations, form)
        raise
    _show(evaluations, form)
    context.exit(exit_code(evaluations))


def _show(evaluations: list[Evaluation], form: Format) -> None:
    if form == "json":
        write_json(evaluations)
    elif evaluations:
        click.echo("\n\n".join("\n".join(map(printable, lines_of(each))) for each in evaluations))


def _evaluations(
    context: click.Context, candidate: str, against: str | None, choice: CellChoice, how: EvaluateOptions
) -> Iterator[Evaluation]:
    project = this_project(context)
    with Evaluator(
        project.placed_plugins(choice.plugins),
        folders=project.python_path(),
        device=choice.device,
        budget_s=how.budget,
        min_effect=how.min_effect,
        timeout_s=how.timeout,
        progress=progress_line(),
    ) as evaluator:
        yield from evaluator.evaluate(
            candidate,
            operator=choice.operator,
            backends=choice.backends,
            against=against,
            shapes=choice.shapes,
            suites=choice.suites,
            dtypes=choice.dtypes,
            mode=choice.mode,
        )


def lines_of(evaluation: Evaluation) -> list[str]:
    """Return an evaluation as lines of text."""
    if evaluation.backend is None:
        return [f"{evaluation.verdict}: {evaluation.problem}"]
    cell = f"{evaluation.shape} {evaluation.dtype} {evaluation.mode} on {evaluation.device}"
    lines = [f"{evaluation.operator}/{evaluation.backend} against {evaluation.against}, {cell}"]
    lines.append(f"  {evaluation.verdict}" + (f": {evaluation.problem}" if evaluation.problem else ""))
    if evaluation.speedup is not None:
        lines[-1] += f": {evaluation.speedup:.3f} x{_interval(evaluation)}, from {counted(evaluation.blocks, 'block')}"
        lines.append(f"  {milliseconds(evaluation.candidate_ms)} ms against {milliseconds(evaluation.against_ms)} ms")
    if evaluation.rms is not None:
        against = f"; {evaluation.against} has {evaluation.against_rms:.2g}" if evaluation.against_rms else ""
        lines.append(f"  rms error {evaluation.rms:.2g}{against}")
    if evaluation.against_problem is not None:
        lines.append(f"  {evaluation.against} itself is wrong or fails: {evaluation.against_problem}")
    lines += [f"  note: {evaluation.note}"] if evaluation.note else []
    named = {"candidate": "the candidate", "against": str(evaluation.against)}
    lines += [f"  {line}" for line in unchecked_lines({named[k]: why for k, why in evaluation.unchecked.items()})]
    for kernel in evaluation.kernels:
        facts = ", ".join(f"{name} {value}" for name, value in kernel.items() if name not in ("name", "hash", "config"))
        lines.append(f"  kernel {kernel['name']}: {facts}")
    return [*lines, *(f"  try: {command}" for command in evaluation.to_try)]


def _interval(evaluation: Evaluation) -> str:
    """Return the interval of the speed-up, of which a short comparison may know one end or none."""
    low, high = evaluation.low, evaluation.high
    if low is None or high is None:
        known = [(word, end) for word, end in (("above", low), ("below", high)) if end is not None]
        return "".join(f", {word} {end:.3f}" for word, end in known)
    return f", {low:.3f} to {high:.3f}"
