"""Send JSON over HTTP with retries, for the APIs of GitHub and GitLab.

Server errors and rate limits are retried for up to a minute. Redirects are not followed, since they would send the
request's secrets to another host. No error message contains a secret.
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

from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.text.wording import counted, printable

ATTEMPT_S = 20.0
"""Time limit of one attempt."""

RETRY_WAIT_S = 60.0
"""Most time to wait between attempts, in total."""

REQUEST_ATTEMPTS = 5
_RESPONSE_BYTES = 32 * 2**20  # a page of 100 issues has at most 6.5 MB of text


@dataclass(frozen=True)
class HttpRequest:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None  # sent as JSON
    secret: str = ""  # never shown in messages
    kind: type = object  # of the decoded JSON: any other response is a proxy's, not the service's


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: Any  # decoded JSON; None if it was not JSON

    @property
    def message(self) -> str:
        """The server's error message, at most 300 characters."""
        text = self.body.get("message") or self.body.get("error") if isinstance(self.body, dict) else self.body
        return printable(str(text))[:300] if text else ""


class HttpUncertain(OutputError):
    """The request was sent and failed, and the server may or may not have carried it out."""


class HttpRefused(OutputError):
    """The server refused the request; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_opener = urllib.request.build_opener(_Stay)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


class _TryAgain(OutputError):
    """An attempt failed, and another one may not."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s  # as the server asks; None: longer after each attempt


def send(request: HttpRequest, *, what: str, repeat: bool = True) -> HttpResponse:
    """Send a request and return the response, once the server has accepted it.

    Args:
        what: The request's name in messages, without secrets.
        repeat: The request may be sent twice; otherwise HttpUncertain is raised if it may have been carried out.

    Raises HttpRefused if the server refuses, OutputError for any other failure, each with a one-line message.
    """
    attempt, waited_s = 1, 0.0
    while True:
        try:
            return _attempt(request, what, repeat)
        except _TryAgain as failure:
            wait_s = 2.0 ** (attempt - 1) if failure.wait_s is None else failure.wait_s
            waited_s += wait_s
            if attempt == REQUEST_ATTEMPTS or waited_s > RETRY_WAIT_S:
                times = counted(attempt, "attempt")
                raise OutputError(f"{failure.message}; given up after {times}") from None
        sleep(wait_s)
        attempt += 1


def _attempt(request: HttpRequest, what: str, repeat: bool) -> HttpResponse:
    """Send a request once. Raises _TryAgain if another attempt makes sense."""
    try:
        response = _once(request)
    except (OSError, http.client.HTTPException, ValueError) as cause:
        reason = getattr(cause, "reason", None)
        failure = _hidden(f"{what}: no answer: {reason or cause}", request)
        if isinstance(cause, ValueError):
            raise OutputError(failure) from None
        if not repeat and not isinstance(reason, ConnectionRefusedError):
            raise HttpUncertain(failure) from None
        raise _TryAgain(failure) from None
    accepted = 200 <= response.status < 300
    if accepted and isinstance(response.body, request.kind):
        return response
    reason = "the response is not the API's JSON" if accepted else response.message
    failure = _hidden(f"{what}: {response.status} {reason}".rstrip(), request)
    if (accepted or response.status >= 500) and not repeat:
        raise HttpUncertain(failure)
    if not accepted and response.status < 500 and not _is_limit(response):
        raise HttpRefused(failure + _advice(response.status), response.status)
    raise _TryAgain(failure, _requested_wait(response))


def host(url: str) -> str:
    """Return the host of a URL, the only part that messages may show."""
    try:
        return printable(urlsplit(url).hostname or "?")
    except ValueError:
        return "?"


def _once(request: HttpRequest) -> HttpResponse:
    headers = {"User-Agent": "groupbench", "Accept": "application/json", **request.headers}
    data = None
    if request.body is not None:
        data = json.dumps(request.body).encode()
        headers["Content-Type"] = "application/json; charset=utf-8"
    # The callers check that the URL begins with https:// or http://.
    outgoing = urllib.request.Request(request.url, data, headers, method=request.method)  # noqa: S310
    try:
        with _opener.open(outgoing, timeout=ATTEMPT_S) as stream:
            return _response(stream.status, stream.headers, stream.read(_RESPONSE_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return _response(error.code, error.headers, error.read(_RESPONSE_BYTES))


def _response(status: int, headers: Any, body: bytes) -> HttpResponse:
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None if status < 400 or text.lstrip().startswith("<") else text
    return HttpResponse(status, {name.lower(): value for name, value in headers.items()}, value)


def _is_limit(response: HttpResponse) -> bool:
    """Return whether the server limits the rate of requests, for which GitHub uses 403 too."""
    if response.status != 403:
        return response.status == 429
    spent = response.headers.get("x-ratelimit-remaining") == "0" or "retry-after" in response.headers
    return spent or "rate limit" in response.message.lower()


def _requested_wait(response: HttpResponse) -> float | None:
    """Return the seconds that the server asks to wait, or None."""
    try:
        if "retry-after" in response.headers:
            return max(float(response.headers["retry-after"]), 0.0)
        if response.headers.get("x-ratelimit-remaining") == "0":
            return max(float(response.headers["x-ratelimit-reset"]) - time.time(), 1.0)
    except (KeyError, ValueError):
        pass
    return None


def _advice(status: int) -> str:
    if 300 <= status < 400:
        return "; it has moved: use its new address"
    return {401: "; check that the token is correct and still valid",
            403: "; check that the token may write there",
            404: "; check that it exists and that the token may see it"}.get(status, "")  # fmt: skip


def _hidden(text: str, request: HttpRequest) -> str:
    return text.replace(request.secret, "***") if request.secret else text
