"""Decide who may read and who may write.

Reading only requires this server's name in the Host header, which prevents DNS rebinding: another site cannot reach the
server under a foreign name. Writing requires the token. Programs send it in an Authorization header; people enter it
once in a form, and their session then has a cookie hidden from scripts and other sites. The token is never stored in a
cookie, an address or a log. A person's name comes from a trusted proxy, not from the person.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import checked

logger = logging.getLogger(__name__)

COOKIE = "groupbench"

USER_HEADER = "X-Forwarded-User"
"""Default name of the header in which a proxy sends the name of the person."""

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
    """The client lacks the permission for a request. The response has status 401 or 403."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Person:
    """A person or program with the token."""

    who: str  # recorded with changes; empty for a program, which gives a name with each change
    csrf: str | None  # the token in their forms; None for a program, whose header no other site can send
    session: str | None = None


@dataclass(frozen=True)
class Names:
    """The sources for people's names. No one can choose the recorded name."""

    local: str = "unknown"  # the person who runs the server, for connections from this machine
    proxies: frozenset[str] = frozenset()  # addresses of trusted proxies, as `plain_address` returns them
    header: str = USER_HEADER

    def of(self, request: Request) -> str:
        """Return the name behind a request, or the client's address if the name is not known.

        Raises Refused if a trusted proxy sent no name, and BadRequest for an invalid one.
        """
        address = "" if request.client is None else plain_address(request.client.host)
        if address in self.proxies:
            values = request.headers.getlist(self.header)
            # Starlette decodes headers as Latin-1; proxies send UTF-8.
            name = checked(self.header, values[0].encode("latin-1").decode("utf-8", "replace")) if values else ""
            if len(values) != 1 or not name:
                raise Refused(
                    f"the proxy sent no name in the {self.header} header, so the server cannot record it", 403
                )
            return name
        return self.local if not address or is_loopback(address) else address


class Guard:
    """The token, and the sessions started with it. Sessions end with this process."""

    def __init__(self, token: str | None = None, names: Names | None = None) -> None:
        if token is not None and len(token) < LIMITS.token:
            raise Refused(f"the token has {len(token)} characters; it needs {LIMITS.token} or more; {MAKE_TOKEN}", 401)
        self._digest = None if token is None else _digest(token)
        self.names = names or Names()
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[str, float]] = {}  # (CSRF token, end of session) by digest of the cookie

    @property
    def writes(self) -> bool:
        """Return whether this server accepts changes at all."""
        return self._digest is not None

    def knows(self, token: str) -> bool:
        """Return whether the token is right. The comparison takes the same time for every wrong token."""
        return self._digest is not None and hmac.compare_digest(_digest(token), self._digest)

    def begin(self, request: Request, token: str) -> str:
        """Start a session for a request's person, and return the cookie's value. Raises Refused."""
        if not self.knows(token):
            raise _wrong_token(request, "that is not the server's token")
        logger.info("%s logged in", self.names.of(request))
        cookie = secrets.token_urlsafe(32)
        with self._lock:
            now = time.monotonic()
            self._sessions = {key: kept for key, kept in self._sessions.items() if kept[1] > now}
            while len(self._sessions) >= LIMITS.sessions:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[_digest(cookie).hex()] = (secrets.token_urlsafe(32), now + LIMITS.session_s)
        return cookie

    def end(self, person: Person) -> None:
        with self._lock:
            self._sessions.pop(str(person.session), None)

    def person(self, request: Request) -> Person | None:
        """Return the person with a token or a session, else None. Raises Refused for a wrong token."""
        header = request.headers.get("authorization")
        if header is not None:
            scheme, _, token = header.partition(" ")
            if scheme.lower() != "bearer" or not self.knows(token.strip()):
                raise _wrong_token(request, "the Authorization header does not hold the server's token")
            return Person("", None)
        cookie = _session_cookie(request)
        if not cookie:
            return None
        session = _digest(cookie).hex()
        with self._lock:
            csrf, until = self._sessions.get(session, ("", 0.0))
        return Person(self.names.of(request), csrf, session) if until > time.monotonic() else None

    def writer(self, request: Request) -> Person:
        """Return the person behind a write request, before the form is read. The caller then calls `check_form`.

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


def plain_address(text: str) -> str:
    """Return an IP address in canonical form, as IPv4 if it is IPv4 within IPv6; an empty text for another text."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    return host == "localhost" or (is_number(host) and ipaddress.ip_address(host).is_loopback)


def _session_cookie(request: Request) -> str:
    """Return the session cookie's value, or "" without one.

    `request.cookies` would unquote every cookie, which takes 10 s for 60 KB on Python 3.11.7 (CVE-2024-7592).
    """
    pairs = (pair.partition("=") for header in request.headers.getlist("cookie") for pair in header.split(";"))
    return next((value.strip() for name, _, value in pairs if name.strip() == COOKIE), "")


def _wrong_token(request: Request, message: str) -> Refused:
    logger.warning("wrong token from %s", "an unknown address" if request.client is None else request.client.host)
    return Refused(message, 401)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
