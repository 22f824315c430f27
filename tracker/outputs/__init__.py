"""The verdict on a run as CI wants it: one file a format, all made from one `Result`.

A format is a module with `render(result) -> str`, but for the two that are more than a file: the step summary, which
is added to what is there, and the webhook, which is sent. Whatever a text holds (a commit's subject, a compiler's
message), what is written is well formed and within the reader's limits.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupbench.tracker.errors import OutputError
from groupbench.tracker.text.files import whole_file

if TYPE_CHECKING:
    from groupbench.tracker.outputs.result import Result

FORMATS = {
    "summary": "Markdown for a step summary",
    "comment": "Markdown for a pull request; `groupbench post` posts it",
    "junit": "JUnit XML",
    "sarif": "SARIF 2.1.0",
    "json": "the verdict as --json",
    "badge": "a picture, .svg, or .json for shields.io",
    "atom": "a feed of alerts",
    "webhook": "a message to Slack",
}
"""name: what it is, in a line of help"""

SUMMARY_FILE = "GITHUB_STEP_SUMMARY"
WEBHOOK_URL = "GROUPBENCH_WEBHOOK"


@dataclass(frozen=True)
class Target:
    """Where one output goes."""

    form: str  # of FORMATS
    place: str  # a file; the webhook's URL
    append: bool = False


def parse(text: str, environ: Mapping[str, str] | None = None) -> Target:
    """The target that `FORMAT=FILE` names. Raises OutputError, one line, where it names none."""
    environ = os.environ if environ is None else environ
    form, _, place = text.partition("=")
    if form not in FORMATS:
        raise OutputError(f"no output {form!r}; there are: {', '.join(FORMATS)}")
    if place == "-":
        raise OutputError(f"{form}=-: stdout is the verdict's; give a file")
    if form == "webhook":
        place = place or environ.get(WEBHOOK_URL, "")
        if not place.startswith(("https://", "http://")):
            raise OutputError(f"webhook: needs an URL that begins with https://, in {WEBHOOK_URL} or webhook=URL")
        return Target(form, place)
    if form == "badge" and place and not place.lower().endswith((".svg", ".json")):
        raise OutputError(f"badge={place}: a badge ends with .svg, or with .json for shields.io")
    named = environ.get(SUMMARY_FILE, "") if form == "summary" else ""
    if not place and not named:
        raise OutputError(f"{form}: needs a file, {form}=FILE" + (f" or {SUMMARY_FILE}" if form == "summary" else ""))
    return Target(form, place or named, append=(place or named) == named)


def write(result: Result, targets: Sequence[Target], *, always: bool = False) -> list[str]:
    """Write all that can be; gives a line for each that cannot. `always`: the webhook, too, if nothing changed."""
    failures = []
    for target in targets:
        try:
            _write(result, target, always)
        except OutputError as error:
            failures.append(error.message)
    return failures


def _write(result: Result, target: Target, always: bool) -> None:
    if target.form == "webhook":
        from groupbench.tracker.outputs import webhook

        if always or result.changed:
            webhook.send(result, target.place)
        return
    if target.append:
        from groupbench.tracker.outputs import summary

        summary.append(result, Path(target.place))
        return
    render = importlib.import_module(f"{__name__}.{_module(target)}").render
    with whole_file(Path(target.place), OutputError) as file:
        file.write(render(result).encode())


def _module(target: Target) -> str:
    if target.form == "badge" and target.place.lower().endswith(".json"):
        return "shield"
    return {"json": "verdict"}.get(target.form, target.form)
