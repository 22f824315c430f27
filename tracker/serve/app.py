"""The web application: routes, responses in HTML or JSON, and errors with their cause.

A view is a plain function, run in a thread: it returns a `Page` from the database and the request's parameters. The
page's data is the JSON response body; a browser gets the same data as HTML.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

import anyio.to_thread
import msgspec
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from groupbench.tracker.facts.errors import StoreError, TrackerError
from groupbench.tracker.query.traffic import NO_TRAFFIC, Traffic
from groupbench.tracker.serve import frame, incidents, runs, series
from groupbench.tracker.serve.answers import Answers
from groupbench.tracker.serve.database import SlowError, open_to_read, open_to_write
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters, key_of
from groupbench.tracker.serve.render import Wanted, prepare, render
from groupbench.tracker.serve.security import COOKIE, Guard, Names, Refused, same_site
from groupbench.tracker.serve.site import Page, Site
from groupbench.tracker.serve.static import static_file
from groupbench.tracker.text.wording import printable

logger = logging.getLogger(__name__)

View = Callable[..., Page]

LARGEST_FORM = 64 * 1024
"""Maximum size of a form in bytes, enough for a thousand incidents."""

FORM_S = 10.0
"""Maximum time in seconds for the body of a request to arrive."""

_RAISED_BY_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, msgspec.MsgspecError),
    TemplateError,  # a template that looks up a damaged name
)
"""Exceptions of code that uses a value of another type than it was stored with."""

_SLOW_S = 1.0
"""Time in seconds from which a request is logged as slow."""


def create_app(
    location: str,
    *,
    token: str | None = None,  # allows clients that have it to change incidents; without one, the server is read-only
    hosts: frozenset[str] | None = None,  # accepted names in the Host header; None accepts all
    numbers: bool = False,  # accept IP addresses in the Host header as well
    answers: Answers | None = None,
    secure: bool = False,  # the server is only reachable over HTTPS, so its cookies are marked Secure
    names: Names | None = None,  # the sources of the names that are recorded with changes
    traffic: Traffic = NO_TRAFFIC,
) -> Starlette:
    """Return a database's dashboard. Raises StoreError if the database cannot be opened."""
    guard = Guard(token, names)
    writer = open_to_write(location) if guard.writes else None
    site = Site(open_to_read(location), answers or Answers(), guard, writer, traffic)
    _warm(site)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = LIMITS.threads
        try:
            yield
        finally:
            site.close()

    app = Starlette(
        routes=[
            _page("/", runs.overview, "groupbench gate"),
            _page("/overview", runs.overview, "groupbench gate"),
            _page("/runs", runs.runs, "groupbench list runs"),
            _page("/runs/{identifier:path}", runs.run, "groupbench gate --run ID"),
            _page("/series", series.search, "groupbench history"),
            _page("/series/{key}", series.series, "groupbench history"),
            _page("/points/{identifier}", series.point, "groupbench show ID"),
            Route("/incidents/change", change, methods=["POST"]),
            _page("/incidents", incidents.incidents, "groupbench incidents"),
            _page("/incidents/{key}", incidents.incident, "groupbench incidents"),
            Route("/login", login_form, methods=["GET"]),
            Route("/login", login, methods=["POST"]),
            Route("/logout", logout, methods=["POST"]),
            Route("/healthz", healthz, methods=["GET"]),
            Route("/static/{name}", static, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: _http_error,
            TrackerError: _expected_error,
            **dict.fromkeys(_RAISED_BY_DAMAGE, _perhaps_damaged),
            Exception: _unforeseen,
        },
        lifespan=lifespan,
    )
    app.state.site, app.state.secure = site, secure
    app.add_middleware(frame.Frame, hosts=hosts, numbers=numbers)
    return app


def _warm(site: Site) -> None:
    """Compile the templates, and start judging the newest run."""
    prepare()
    try:
        runs.overview(site, Parameters([]))
    except Exception:
        logger.warning("the overview cannot be shown; each request reports the cause", exc_info=True)


def _page(path: str, view: View, command: str) -> Route:
    """Return a page's route. `command` gives the same facts without a time limit."""

    async def endpoint(request: Request) -> Response:
        site: Site = request.app.state.site
        parameters = Parameters.of_query(request.url.query)
        path_values = dict(request.path_params)
        if "key" in path_values:
            try:
                path_values["key"] = key_of("the key", path_values["key"])
            except BadRequest as error:
                raise NotFound(error.message) from error
        wanted = Wanted.of(request, site.guard.person(request))
        began = time.monotonic()
        try:
            return await run_in_threadpool(_respond, site, view, parameters, path_values, wanted)
        except SlowError as error:
            raise StoreError(f"{error.message}: ask for less, or run `{command}`") from error
        finally:
            seconds = time.monotonic() - began
            logger.log(logging.WARNING if seconds >= _SLOW_S else logging.DEBUG, "%s took %.2f s", wanted.path, seconds)

    return Route(path, endpoint, methods=["GET"])


def _respond(
    site: Site, view: View, parameters: Parameters, path_values: Mapping[str, Any], wanted: Wanted
) -> Response:
    """Return a page as HTML or JSON. Raises TrackerError."""
    page = view(site, parameters, **path_values)
    headers = {} if page.again is None else {"Retry-After": str(page.again)}
    if wanted.json:
        return Response(msgspec.json.encode(page.data), page.status, headers, "application/json")
    html = render(wanted, page, site.name, site.guard.writes)
    return Response(html, page.status, headers, "text/html; charset=utf-8")


async def change(request: Request) -> Response:
    """Handle a form or JSON request to change the states of incidents."""
    site: Site = request.app.state.site
    person = site.guard.writer(request)
    pairs = await _form(request)
    site.guard.check_form(person, dict(pairs).get("csrf"))
    rows, back = await run_in_threadpool(incidents.change, site, Parameters(pairs), person)
    if frame.wants_json(request):
        return Response(msgspec.json.encode({"incidents": rows}), media_type="application/json")
    return RedirectResponse(back, 303)


async def login_form(request: Request) -> Response:
    site: Site = request.app.state.site
    parameters = Parameters.of_query(request.url.query)
    back = incidents.local(parameters.text("next") or "/")
    parameters.done()
    person = site.guard.person(request)
    shown = {"path": "/login", "asked": parameters, "next": back}
    page = Page("login.html", {"writes": site.guard.writes}, shown)
    return _respond(site, lambda *_: page, parameters, {}, Wanted.of(request, person))


async def login(request: Request) -> Response:
    """Start a session for a client with the token."""
    site: Site = request.app.state.site
    if not site.guard.writes:
        raise Refused("this server only reads; `groupbench serve --write` allows changes", 403)
    same_site(request)
    pairs = await _form(request)
    token = dict(pairs).get("token", "")
    parameters = Parameters((name, value) for name, value in pairs if name != "token")
    back = incidents.local(parameters.text("next") or "/")
    parameters.done()
    cookie = site.guard.begin(request, token.strip())
    response = RedirectResponse(back, 303)
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=LIMITS.session_s,
        httponly=True,
        samesite="strict",
        secure=request.app.state.secure,
        path="/",
    )
    return response


async def logout(request: Request) -> Response:
    site: Site = request.app.state.site
    person = site.guard.writer(request)
    site.guard.check_form(person, dict(await _form(request)).get("csrf"))
    site.guard.end(person)
    response = RedirectResponse("/", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", path="/")
    return response


async def _form(request: Request) -> list[tuple[str, str]]:
    """Return the fields from a form or a JSON object. Raises BadRequest."""
    body = b""
    try:
        async with asyncio.timeout(FORM_S):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_FORM:
                    raise BadRequest(f"the form has more than {LARGEST_FORM} bytes")
    except TimeoutError as error:
        raise BadRequest(f"the form did not arrive within {FORM_S:g} s") from error
    except ClientDisconnect as error:
        raise BadRequest("the connection ended within the form") from error
    if Parameters.of_query(request.url.query).url("") != "":
        raise BadRequest("a POST takes its parameters from the form, not from the address")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return _pairs_of_json(body)
    if kind != "application/x-www-form-urlencoded":
        raise BadRequest(f"{kind[:60] or 'no content type'}: send a form or JSON")
    try:
        return parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=2_000)
    except ValueError as error:
        raise BadRequest(f"the form cannot be read: {error}") from error


def _pairs_of_json(body: bytes) -> list[tuple[str, str]]:
    try:
        fields = msgspec.json.decode(body, type=dict[str, str | int | list[str | int] | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the JSON cannot be read: {error}") from error
    return [(name, str(each)) for name, value in fields.items() if value is not None
            for each in (value if isinstance(value, list) else [value])]  # fmt: skip


async def healthz(request: Request) -> Response:
    """Respond with 200 if the database can be read."""
    site: Site = request.app.state.site

    def look() -> None:
        with site.database.read() as session:
            site.facets(session)

    await run_in_threadpool(look)
    return Response(b'{"ok":true}', media_type="application/json")


async def static(request: Request) -> Response:
    parameters = Parameters.of_query(request.url.query)
    parameters.text("v")
    parameters.done()
    return static_file(request.path_params["name"], request.headers)  # from memory


# ---- errors


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = {404: "no such page", 405: f"{request.method} is not for this address"}.get(
        error.status_code, error.detail
    )
    return await _error_page(request, error.status_code, reason, error.headers)


async def _expected_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TrackerError)
    status = 400
    headers = None
    if isinstance(error, NotFound):
        status = 404
    elif isinstance(error, StoreError):
        logger.error("%s: %s", request.url.path, error.message)
        status, headers = 503, {"Retry-After": "5"}
    elif isinstance(error, Refused):
        status = error.status
        headers = {"WWW-Authenticate": 'Bearer realm="groupbench"'} if status == 401 else None
    return await _error_page(request, status, error.message, headers)


async def _perhaps_damaged(request: Request, error: Exception) -> Response:
    """Respond with 503 if damage is known, since a damaged value may raise anything. Else it is a bug."""
    site: Site = request.app.state.site
    damage = await run_in_threadpool(site.damage)
    if damage is None:
        raise error
    return await _expected_error(request, StoreError(damage))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return await _error_page(request, 500, "internal error; see the server's log")


async def _error_page(request: Request, status: int, text: str, headers: Any = None) -> Response:
    message = printable(text)  # the name of a file may hold what UTF-8 cannot encode
    if frame.wants_json(request):
        body = msgspec.json.encode({"error": message, "status": status})
        return Response(body, status, headers, "application/json")
    page = Page("error.html", {"error": message}, {"path": "", "status_code": status}, status)
    site: Site = request.app.state.site
    html = render(Wanted.of(request), page, site.name, site.guard.writes)
    return Response(html, status, headers, "text/html; charset=utf-8")
