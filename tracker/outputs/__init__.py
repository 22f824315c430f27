"""Write the verdict on a run for CI, in several formats made from one `GateResult`.

A format is a module with `render(result) -> str`. Only the step summary is more than a file: it is appended. Every
output is well formed and within the reader's limits, whatever text it contains, such as a commit's subject or a
compiler's message.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.wording import no_such

if TYPE_CHECKING:
    from groupbench.tracker.outputs.result import GateResult


@dataclass(frozen=True)
class OutputFormat:
    """One format: the meaning, the names of the files that a nightly run writes, and how a target is written."""

    meaning: str
    nightly: tuple[str, ...] = ()
    target: str = "=FILE"  # in brackets if an environment variable can name it


FORMATS = {
    "summary": OutputFormat("Markdown for a step summary", ("summary.md",), "[=FILE]"),
    "comment": OutputFormat("Markdown for a pull request; `groupbench post` posts it", ("comment.md",)),
    "junit": OutputFormat("JUnit XML", ("gate.xml",)),
    "json": OutputFormat("the verdict as --format json", ("verdict.json",)),
}
"""The formats by name."""

SUMMARY_FILE = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True)
class OutputTarget:
    """The destination of one output."""

    form: str  # a key of FORMATS
    place: str  # a file
    append: bool = False


def parse(text: str, environ: Mapping[str, str] | None = None) -> OutputTarget:
    """Return the target that `FORMAT=FILE` names. Raises OutputError, with a one-line message, if it is invalid."""
    environ = os.environ if environ is None else environ
    form, _, place = text.partition("=")
    if form not in FORMATS:
        raise OutputError(no_such("no output format", form, FORMATS))
    if place == "-":
        raise OutputError(f"{form}=-: stdout already carries the verdict; give a file")
    step_summary = environ.get(SUMMARY_FILE, "") if form == "summary" else ""
    place = place or step_summary
    if not place:
        raise OutputError(f"{form}: needs a file, {form}=FILE" + (f" or {SUMMARY_FILE}" if form == "summary" else ""))
    return OutputTarget(form, place, append=place == step_summary)


def write(result: GateResult, targets: Sequence[OutputTarget]) -> list[str]:
    """Write every output and return a message for each that failed."""
    failures = []
    for target in targets:
        try:
            _write(result, target)
        except OutputError as error:
            failures.append(error.message)
    return failures


def _write(result: GateResult, target: OutputTarget) -> None:
    if target.append:
        from groupbench.tracker.outputs import summary

        summary.append(result, Path(target.place))
        return
    module = {"json": "verdict"}.get(target.form, target.form)
    render = importlib.import_module(f"{__name__}.{module}").render
    with whole_file(Path(target.place), OutputError) as file:
        file.write(render(result).encode())
