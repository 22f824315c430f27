"""Decide who may read and who may write.

Reading only requires that the Host header names this server, which prevents DNS rebinding: another site cannot reach
the server under its own name. Writing requires the token. Programs send it in an Authorization header; people enter it
once in a form, and their session then has a cookie that scripts cannot read and other sites cannot send. The token is
never stored in a cookie, an address or a log.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from groupbench.tracker.facts.errors import TrackerError

COOKIE = "groupbench"
SHORTEST_TOKEN = 16
SESSION_S = 12 * 3600
_MOST_SESSIONS = 1_000
_MOST_WRONG = 64
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
"""Delay in seconds of the response to a wrong token: for the first one, and after many within a minute."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Refused(TrackerError):
    """The client lacks the permission for a request. The response has status 401 or 403.

    wait_s  delay of the response in seconds, after a wrong token
    """

    def __init__(self, message: str, status: int, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.wait_s = wait_s


@dataclass(frozen=True)
class Person:
    """A person or program that has sent the token."""

    who: str  # the name that they entered; may be empty for a program
    csrf: str | None  # the token in their forms; None for a program, whose header no other site can send
    session: str | None = None


class Guard:
    """The token, and the sessions that were started with it. Sessions end with this process."""

    def __init__(self, token: str | None = None) -> None:
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise Refused(
                f"the token has {len(token)} characters; it needs {SHORTEST_TOKEN} or more; {MAKE_TOKEN}", 401
            )
        self._digest = None if token is None else _digest(token)
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[Person, float]] = {}  # (person, end of session) by digest of the cookie
        self._wrong: deque[float] = deque(maxlen=_MOST_WRONG)  # times of the last wrong tokens

    @property
    def writes(self) -> bool:
        """Return whether this server accepts changes at all."""
        return self._digest is not None

    def knows(self, token: str) -> bool:
        """Return whether the token is right. The comparison takes the same time for every wrong token."""
        return self._digest is not None and hmac.compare_digest(_digest(token), self._digest)

    def wrong_token(self, message: str) -> Refused:
        """Return the refusal of a wrong token. Its delay grows with the number of wrong tokens in the last minute.

        Clients are not distinguished; a right token is never delayed.
        """
        with self._lock:
            now = time.monotonic()
            self._wrong.append(now)
            recent = sum(when > now - 60 for when in self._wrong)
        return Refused(message, 401, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(recent // 5, 10)))

    def begin(self, who: str) -> tuple[str, Person]:
        """Start a session and return (the cookie's value, the person)."""
        cookie = secrets.token_urlsafe(32)
        person = Person(who, secrets.token_urlsafe(32), _digest(cookie).hex())
        with self._lock:
            now = time.monotonic()
            self._sessions = {key: kept for key, kept in self._sessions.items() if kept[1] > now}
            while len(self._sessions) >= _MOST_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[str(person.session)] = (person, now + SESSION_S)
        return cookie, person

    def end(self, person: Person) -> None:
        with self._lock:
            self._sessions.pop(str(person.session), None)

    def person(self, request: Request) -> Person | None:
        """Return the person of a request with a token or a session, else None. Raises Refused for a wrong token."""
        header = request.headers.get("authorization")
        if header is not None:
            scheme, _, token = header.partition(" ")
            if scheme.lower() != "bearer" or not self.knows(token.strip()):
                raise self.wrong_token("the Authorization header does not hold the server's token")
            return Person("", None)
        cookie = _session_cookie(request)
        if not cookie:
            return None
        with self._lock:
            person, until = self._sessions.get(_digest(cookie).hex(), (None, 0.0))
        return person if until > time.monotonic() else None

    def writer(self, request: Request) -> Person:
        """Return the person of a request to write, before its form is read. The caller then calls `check_form`.

        Raises Refused if the server is read-only, or if the request has no valid token or session.
        """
        if not self.writes:
            raise Refused("this server only reads; `groupbench serve --write` allows changes", 403)
        same_site(request)
        person = self.person(request)
        if person is None:
            raise Refused("writing needs the token: log in, or send it as `Authorization: Bearer TOKEN`", 401)
        return person

    def check_form(self, person: Person, csrf: str | None) -> None:
        """Raise Refused if the form does not contain the session's CSRF token."""
        if person.csrf is not None and not hmac.compare_digest((csrf or "").encode(), person.csrf.encode()):
            raise Refused("the form is not of this session; open its page again", 403)


MAKE_TOKEN = "`(umask 077; python -c 'import secrets; print(secrets.token_urlsafe())' > token)` makes one"  # noqa: S105 # a command


def same_site(request: Request) -> None:
    """Raise Refused if another site sent the request."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Refused("the request comes from another site", 403)
    origin = request.headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != request.headers.get("host", "").lower():
        raise Refused("the request comes from another site", 403)


def host_of(header: str) -> str:
    """Return the host name in a Host header, without the port; "" if the header is invalid."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_number(host: str) -> bool:
    """Return whether a host is an IP address. Unlike a name, no one else can make it refer to this server."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    return host == "localhost" or (is_number(host) and ipaddress.ip_address(host).is_loopback)


def _session_cookie(request: Request) -> str:
    """Return the value of the session's cookie, or "" without one.

    `request.cookies` would unquote every cookie, which takes 10 s for one of 60 KB on Python 3.11.7 (CVE-2024-7592).
    """
    pairs = (pair.partition("=") for header in request.headers.getlist("cookie") for pair in header.split(";"))
    return next((value.strip() for name, _, value in pairs if name.strip() == COOKIE), "")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
