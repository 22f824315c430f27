"""Load the templates for the report and `serve`, with shared filters.

Templates escape every text; no other code does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup, escape

from groupbench.tracker.facts.verdicts import tone_of, tone_of_count

REPORT = "groupbench.tracker.report"


def environment(packages: Sequence[str] = (REPORT,)) -> jinja2.Environment:
    """Return an environment with templates from these packages. The first package with the name wins."""
    env = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package, "") for package in packages]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    env.filters.update(breakable=breakable, commands=commands, embed=embed, tone=tone, tone_of_count=tone_of_count)
    return env


def piece(name: str, package: str = REPORT) -> str:
    """Return a package file's text, such as a style sheet."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8").rstrip()


def breakable(text: str | None) -> Markup:
    """Return a shape with breaks only after commas."""
    return Markup(str(escape(text or "")).replace(",", ",<wbr>"))  # noqa: S704 # escaped


def commands(text: str) -> Markup:
    """Return a text with backquoted parts marked as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 # escaped


def embed(value: Any) -> Markup:
    """Return JSON for a script element: no text in it can end the element."""
    text = msgspec.json.encode(value).decode()
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))  # noqa: S704 # no < is left


def tone(word: str | None) -> str:
    return tone_of(word).name
