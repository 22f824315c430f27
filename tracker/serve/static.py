"""Static page files: a fixed set, found by name. An address is never used as a path."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from starlette.datastructures import Headers
from starlette.responses import Response

from groupbench.tracker.facts.verdicts import style_sheet
from groupbench.tracker.serve.parameters import NotFound

_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
FILES = {
    "colours.css": ("groupbench.tracker.report", "colours.css"),
    "serve.css": ("groupbench.tracker.serve", "serve.css"),
    "serve.js": ("groupbench.tracker.serve", "serve.js"),
    "plotly.css": ("groupbench.tracker.serve", "plotly.css"),
    "icon.svg": ("groupbench.tracker.serve", "icon.svg"),
    "draw.js": ("groupbench.tracker.report", "draw.js"),
    "tables.js": ("groupbench.tracker.report", "tables.js"),
}
"""(package, file) by name. In addition there is plotly.js, which comes from plotly's own package."""


@dataclass(frozen=True)
class File:
    body: bytes
    packed: bytes  # by gzip
    digest: str
    kind: str


@lru_cache(maxsize=16)
def load(name: str) -> File:
    """Return a file by name. Raises NotFound."""
    if name == "plotly.js":
        body = _plotly()
    elif name in FILES:
        package, file = FILES[name]
        body = resources.files(package).joinpath(file).read_bytes()
        body = style_sheet().encode() + body if name == "colours.css" else body
    else:
        raise NotFound(f"no file {name[:80]!r}")
    kind = _TYPES[name.rpartition(".")[2]]
    return File(body, gzip.compress(body, 6, mtime=0), hashlib.sha256(body).hexdigest()[:16], kind)


def address(name: str) -> str:
    """Return a file's address with a content hash, so browsers may cache it forever."""
    return f"/static/{name}?v={load(name).digest}"


@lru_cache(maxsize=1)
def style_marks() -> tuple[str, ...]:
    """Return element ids to keep plotly's map library from adding a style element, which the CSP forbids.

    The library looks for an element with a 64-digit hexadecimal id, and adds none if it exists.
    """
    return tuple(re.findall(r'getElementById\("([0-9a-f]{64})"\)', load("plotly.js").body.decode()))


def static_file(name: str, headers: Headers) -> Response:
    file = load(name)
    tag = f'"{file.digest}"'
    caching = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": tag, "Vary": "Accept-Encoding"}
    if headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=caching)
    if "gzip" in headers.get("accept-encoding", ""):
        return Response(file.packed, headers={**caching, "Content-Encoding": "gzip"}, media_type=file.kind)
    return Response(file.body, headers=caching, media_type=file.kind)


def _plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script.encode()
