"""JSON over HTTP, with patience: for webhooks and the APIs of GitHub and GitLab.

Errors of the server and limits of its rate are waited out, a minute in all. Redirects are not followed, since the
secrets of a request would go with it to whoever is named there. No message holds a secret.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from groupbench.tracker.errors import OutputError
from groupbench.tracker.text.wording import printable

TIMEOUT_S = 20.0
"""Of one attempt."""

PATIENCE_S = 60.0
"""Of waits between attempts, all together."""

ATTEMPTS = 5
_LARGEST = 32 * 2**20


@dataclass(frozen=True)
class Request:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None  # sent as JSON
    secret: str = ""  # never to be said


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # names in small letters
    body: Any  # JSON; None where it was none

    @property
    def message(self) -> str:
        """What the server said of its refusal."""
        said = self.body.get("message") or self.body.get("error") if isinstance(self.body, dict) else self.body
        return printable(str(said))[:300] if said else ""


class Unsure(OutputError):
    """The server may have done it, or not: it failed after it was asked."""


class Refused(OutputError):
    """The server said no."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_opener = urllib.request.build_opener(_Stay)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def send(request: Request, *, what: str, repeat: bool = True) -> Answer:
    """The answer of a server that did it. `what` names the request in messages, without secrets.

    `repeat`: doing it twice does no harm; else Unsure is raised where it may have been done. Raises OutputError, one
    line: Refused where the server says no.
    """
    waited = 0.0
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = _once(request)
        except (OSError, http.client.HTTPException, ValueError) as cause:
            said = _hidden(f"{what}: no answer: {getattr(cause, 'reason', None) or cause}", request)
            if isinstance(cause, ValueError):
                raise OutputError(said) from None
            if not repeat and not isinstance(getattr(cause, "reason", None), ConnectionRefusedError):
                raise Unsure(said) from None
            wait = 2.0 ** (attempt - 1)
        else:
            if 200 <= answer.status < 300:
                return answer
            said = _hidden(f"{what}: {answer.status} {answer.message}".rstrip(), request)
            limited = answer.status == 429 or (answer.status == 403 and _is_limit(answer))
            if answer.status >= 500 and not repeat:
                raise Unsure(said)
            if answer.status < 500 and not limited:
                raise Refused(said + _advice(answer.status), answer.status)
            wait = _asked_wait(answer, 2.0 ** (attempt - 1))
        if attempt == ATTEMPTS or waited + wait > PATIENCE_S:
            raise OutputError(f"{said}; given up after {attempt} attempt{'s' if attempt > 1 else ''}")
        waited += wait
        sleep(wait)
    raise AssertionError("unreachable")


def host(url: str) -> str:
    """All of an URL that may be said."""
    try:
        return printable(urlsplit(url).hostname or "?")
    except ValueError:
        return "?"


def _once(request: Request) -> Answer:
    headers = {"User-Agent": "groupbench", "Accept": "application/json", **request.headers}
    data = None
    if request.body is not None:
        data = json.dumps(request.body).encode()
        headers["Content-Type"] = "application/json; charset=utf-8"
    asked = urllib.request.Request(request.url, data, headers, method=request.method)
    try:
        with _opener.open(asked, timeout=TIMEOUT_S) as found:
            return _answer(found.status, found.headers, found.read(_LARGEST))
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error.headers, error.read(_LARGEST))


def _answer(status: int, headers: Any, body: bytes) -> Answer:
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except ValueError:
        value = None if status < 400 or text.lstrip().startswith("<") else text
    return Answer(status, {name.lower(): value for name, value in headers.items()}, value)


def _is_limit(answer: Answer) -> bool:
    """GitHub says 403 for limits, too."""
    spent = answer.headers.get("x-ratelimit-remaining") == "0" or "retry-after" in answer.headers
    return spent or "rate limit" in answer.message.lower()


def _asked_wait(answer: Answer, otherwise: float) -> float:
    """Seconds that the server asks for."""
    try:
        if "retry-after" in answer.headers:
            return max(float(answer.headers["retry-after"]), 0.0)
        if answer.headers.get("x-ratelimit-remaining") == "0":
            return max(float(answer.headers["x-ratelimit-reset"]) - time.time(), 1.0)
    except (KeyError, ValueError):
        pass
    return otherwise


def _advice(status: int) -> str:
    if 300 <= status < 400:
        return "; it has moved, give its new address"
    return {401: "; is the token right, and still valid?", 403: "; may the token write there?",
            404: "; is there such a thing, and may the token see it?"}.get(status, "")  # fmt: skip


def _hidden(text: str, request: Request) -> str:
    return text.replace(request.secret, "***") if request.secret else text
