"""Escape untrusted text for Markdown and XML.

Commit subjects, names, reasons and messages come from people and compilers. In Markdown they are written as code spans,
in which emphasis, links, tags, mentions and references have no effect (GitHub Flavored Markdown 0.29, 6.3; GitHub and
GitLab ignore mentions in code). A pipe ends a table cell even in a code span, and renderers disagree on escaping it
with a backslash, so a text with a pipe is written with character references.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from groupbench.tracker.text.wording import printable

_SAFE = re.compile(r"(?:(?![a-z]+:\w|www\.|GH-)[\w ,;%+→…()='’./-]|:(?=$|\d))*", re.IGNORECASE)
_PIECES = re.compile(r"`([^`|]+)`| +|[^ `]+?(?=[,;:.)]*(?:[ `]|$))|[,;:.)]+|`")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REFERENCES = {ord(char): f"&#{ord(char)};" for char in string.punctuation}


def shown(text: str, most: int) -> str:
    """Return at most `most` characters on one line, without control characters; a cut text ends with an ellipsis."""
    flat = printable(text)
    if len(flat) <= most:
        return flat
    cut = flat[: max(most - 2, 0)]
    whole = cut if cut.count("`") % 2 == 0 else cut[: cut.rindex("`")]  # never half a command
    return whole.rstrip() + " …"


def code(text: str) -> str:
    """Return a text as Markdown code on one line, also valid in a table cell; an empty text stays empty."""
    flat = printable(text)
    if not flat:
        return ""
    if "`" in flat or "|" in flat:
        return f"<code>{flat.translate(_REFERENCES)}</code>"
    return f"`{flat}`"


def words(text: str) -> str:
    """Return a text as plain Markdown, in which code is code, and so is each word that a renderer might change."""
    flat = printable(text)
    pieces = [f"`{match[1]}`" if match[1] else _word(match[0]) for match in _PIECES.finditer(flat)]
    touch = any(one[-1] in "`>" and two[0] in "`<" for one, two in pairwise(pieces))
    return code(flat) if touch else "".join(pieces)


def _word(text: str) -> str:
    return text if "_" not in text and _SAFE.fullmatch(text) else code(text)


def link(text: str, url: str | None) -> str:
    """Return Markdown with a link around it; both `text` and `url` must be escaped already."""
    return text if url is None else f"[{text}]({url})"


def xml(text: str) -> str:
    """Return a text with characters replaced that XML 1.0 cannot hold, not even as references."""
    return _NOT_XML.sub("�", text)


def clean(value: Any) -> Any:
    """Return a value without lone surrogates, which UTF-8 cannot encode, in texts, lists and dicts."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


@dataclass(frozen=True)
class Longest:
    """The longest texts, in characters, in a line about a change."""

    name: int = 60
    shape: int = 80
    subject: int = 120
    note: int = 200


LONGEST = Longest()


def size(text: str) -> int:
    """Return the size of a text in bytes of UTF-8, which no service's own count exceeds."""
    return len(text.encode("utf-8", "replace"))
