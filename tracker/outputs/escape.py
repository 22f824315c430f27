"""Texts of others, made harmless: in Markdown, XML and Slack's own language; and how long a text is to whom.

Subjects of commits, names, reasons and messages come from people and compilers. In Markdown they stand in code spans,
where neither emphasis nor links, tags, mentions nor references are read (GitHub Flavored Markdown 0.29, 6.3; both
GitHub and GitLab leave mentions in code alone). A pipe ends a table's cell even there, and readers differ in what a
backslash before it does: such a text is written as character references instead.
"""

from __future__ import annotations

import re
import string
from typing import Any

from groupbench.tracker.text.wording import printable

_SAFE = re.compile(r"(?:(?![a-z]+:\w|www\.|GH-)[\w ,;%+→…()='’.-]|:(?= |\d))*", re.IGNORECASE)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REFERENCES = {ord(char): f"&#{ord(char)};" for char in string.punctuation}


def shown(text: str, most: int) -> str:
    """One line without control characters, with an end that says if something is missing."""
    flat = printable(text)
    return flat if len(flat) <= most else flat[: max(most - 2, 0)].rstrip() + " …"


def code(text: str) -> str:
    """Markdown: the text as code, in a table's cell as well. One line; nothing for nothing."""
    flat = printable(text)
    if not flat:
        return ""
    if "`" in flat or "|" in flat:
        return f"<code>{flat.translate(_REFERENCES)}</code>"
    return f"`{flat}`"


def words(text: str) -> str:
    """Markdown: as plain text where every reader takes it as such, else as code."""
    flat = printable(text)
    return flat if "_" not in flat and _SAFE.fullmatch(flat) else code(flat)


def link(text: str, url: str | None) -> str:
    """Markdown that is ready, with an URL that is."""
    return text if url is None else f"[{text}]({url})"


def xml(text: str) -> str:
    """What XML 1.0 can hold of the text: not even references to the other characters are allowed in it."""
    return _NOT_XML.sub("�", text)


def clean(value: Any) -> Any:
    """Texts without lone surrogates, which no encoding has, in lists and dicts too."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def slack(text: str) -> str:
    """Slack's mrkdwn: https://api.slack.com/reference/surfaces/formatting#escaping. Without it <!channel> calls all."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def slack_code(text: str) -> str:
    flat = slack(text).replace("`", "ˋ")
    return f"`{flat}`" if flat else ""


def size(text: str) -> int:
    """Bytes of UTF-8: no reader counts more than that for a text."""
    return len(text.encode("utf-8", "replace"))
