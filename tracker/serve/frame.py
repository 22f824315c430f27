"""Middleware: checks every request and adds security headers to every response."""

from __future__ import annotations

import unicodedata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import LONGEST_QUERY
from groupbench.tracker.serve.security import HEADERS, host_of, is_number

JSON = ".json"


class Frame:
    """Refuse requests too long or for another server, strip `.json`, and add security headers."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None = None, numbers: bool = False) -> None:
        self.app, self.hosts, self.numbers = app, hosts, numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_added(message.get("headers", []))]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(framed, *refusal)
            return
        path: str = scope["path"]
        static = path.startswith("/static/")
        scope.setdefault("state", {})["json"] = path.endswith(JSON) and not static
        if path.endswith(JSON) and not static:
            scope = {**scope, "path": path.removesuffix(JSON) or "/"}
        await self.app(scope, receive, framed)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = [value for name, value in scope["headers"] if name == b"host"]
        if self.hosts is not None:
            host = host_of(headers[0].decode("latin-1")) if len(headers) == 1 else ""
            if host not in self.hosts and not (self.numbers and is_number(host)):
                name = host[:80] or "without a name"
                return 421, f"this server is not known as {name}; `groupbench serve --name` adds a name"
        if len(scope.get("query_string", b"")) > LONGEST_QUERY:
            return 400, f"the query has more than {LONGEST_QUERY} characters"
        path = scope["path"]
        if len(path) > LIMITS.path or any(unicodedata.category(char) in ("Cc", "Cs") for char in path):
            return 400, "the address is too long, or holds a control character"
        return None


def wants_json(request: Request) -> bool:
    """Return whether the client wants JSON: the address ends in `.json`, or the client accepts JSON but not HTML."""
    if request.scope.get("state", {}).get("json"):
        return True
    accept = request.headers.get("accept", "")
    return "application/json" in accept and "text/html" not in accept


def _added(headers: Any) -> list[tuple[bytes, bytes]]:
    """Return the security headers, and `no-store` unless the response sets how long a cache may keep it."""
    there = {name.lower() for name, _ in headers}
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
    if b"cache-control" not in there:
        added += [(b"cache-control", b"no-store"), (b"vary", b"Accept, Cookie, Authorization")]
    return [(name, value) for name, value in added if name not in there]


async def _refuse(send: Send, status: int, message: str) -> None:
    body = msgspec.json.encode({"error": message, "status": status})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
