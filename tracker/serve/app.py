"""The web application: routes, responses in HTML or JSON, and errors that name their cause.

A view is a plain function, run in a thread, that returns a `Page` from the database and the request's parameters. The
page's data is the body of the JSON response; a browser gets the same data as HTML.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from groupbench.tracker.facts.errors import StoreError, TrackerError
from groupbench.tracker.serve import alerting, comparing, frame, lane, operators, runs, series
from groupbench.tracker.serve.database import open_to_read, open_to_write
from groupbench.tracker.serve.jobs import Jobs
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters, key_of
from groupbench.tracker.serve.render import Wanted, prepare, render
from groupbench.tracker.serve.responses import PageWorker, View, respond
from groupbench.tracker.serve.security import COOKIE, SESSION_S, Guard, Refused, same_site
from groupbench.tracker.serve.site import Page, Site
from groupbench.tracker.serve.static import static_file
from groupbench.tracker.serve.turns import client_of
from groupbench.tracker.text.wording import printable

LARGEST_FORM = 64 * 1024
"""Maximum size of a form in bytes, enough for a thousand alerts."""

FORM_S = 10.0
"""Maximum time in seconds for the body of a request to arrive."""

_RAISED_BY_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, msgspec.MsgspecError),
    TemplateError,  # a template that looks up a damaged name
)
"""Exceptions of code that uses a value of another type than it was stored with."""

_WARM_S = 3.0
"""Time in seconds that the server spends on counting the points of the newest runs before it starts."""


def create_app(
    location: str,
    *,
    token: str | None = None,  # allows clients that have it to change alerts; without one, the server is read-only
    hosts: frozenset[str] | None = None,  # accepted names in the Host header; None accepts all
    numbers: bool = False,  # accept IP addresses in the Host header as well
    jobs: Jobs | None = None,
    secure: bool = False,  # the server is only reachable over HTTPS, so its cookies are marked Secure
    proxies: frozenset[str] = frozenset(),  # addresses whose X-Forwarded-For names the client
    apart: bool = False,  # make large pages in a process of their own
) -> Starlette:
    """Return the dashboard of a database. Raises StoreError if the database cannot be opened."""
    guard = Guard(token)
    site = Site(open_to_read(location), jobs or Jobs(), guard, open_to_write(location) if guard.writes else None)
    _warm(site)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        try:
            yield
        finally:
            if app.state.pages is not None:
                app.state.pages.close()
            site.close()

    app = Starlette(
        routes=[
            _page("/", runs.overview),
            _page("/overview", runs.overview),
            _page("/runs", runs.runs),
            _page("/runs/{identifier:path}", runs.run),
            _page("/series", series.search),
            _page("/series/{key}", series.series),
            _page("/points/{identifier}", series.point),
            _page("/operators", operators.operators),
            _page("/operators/{name:path}", operators.operator),
            _page("/compare", comparing.compare),
            Route("/alerts/change", change, methods=["POST"]),
            _page("/alerts", alerting.alerts),
            _page("/alerts/{key}", alerting.alert),
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
    app.state.site, app.state.secure, app.state.lane = site, secure, lane.Lane()
    app.state.pages, app.state.proxies = PageWorker(location) if apart else None, proxies
    app.add_middleware(frame.Frame, hosts=hosts, numbers=numbers)
    return app


def _warm(site: Site) -> None:
    """Load modules, templates, plotly and the choices of forms, and start judging the newest run."""
    import anyio
    import scipy.stats  # noqa: F401

    prepare()
    with contextlib.suppress(RuntimeError):  # of a running event loop
        anyio.run(run_in_threadpool, int)  # loads the modules that run a view in a thread
    try:
        with site.database.read() as session:
            site.facets(session)
        runs.overview(site, Parameters([]))
        runs.count_newest(site, _WARM_S)
    except Exception:  # noqa: S110 # reported to each request, with the damage that is its cause
        pass


def _page(path: str, view: View) -> Route:
    async def endpoint(request: Request) -> Response:
        site: Site = request.app.state.site
        parameters = Parameters.of_query(request.url.query)
        path_values = dict(request.path_params)
        if "key" in path_values:
            try:
                path_values["key"] = key_of("the key", path_values["key"])
            except BadRequest as error:
                raise NotFound(error.message) from error
        person = site.guard.person(request)
        state = request.app.state
        work = view, parameters, path_values, Wanted.of(request, person), site.guard.writes
        heavy = lane.is_heavy(parameters)
        # The results of comparisons are in this process, and too large for another.
        apart = heavy and state.pages is not None and view is not comparing.compare
        async with _turn(request, heavy, lane.REST if heavy and not apart else 0):
            if apart:
                made = await state.pages.respond(site, *work)
            else:
                made = await run_in_threadpool(respond, site, *work)
        if made.crowded:
            await asyncio.sleep(lane.CROWDED_S)
        return Response(made.body, made.status, made.headers, made.kind)

    return Route(path, endpoint, methods=["GET"])


def _turn(request: Request, heavy: bool = False, rest: float = 0) -> AbstractAsyncContextManager[None]:
    """Return the context of a request's work, which begins when it is the turn of its client."""
    state = request.app.state
    turns: lane.Lane = state.lane
    return turns.enter(client_of(request, state.proxies), heavy, rest)


async def change(request: Request) -> Response:
    """Handle a form or JSON request that changes the state of alerts."""
    site: Site = request.app.state.site
    person = site.guard.writer(request)
    pairs = await _form(request)
    site.guard.check_form(person, dict(pairs).get("csrf"))
    rows, back = await run_in_threadpool(alerting.change, site, Parameters(pairs), person)
    if frame.wants_json(request):
        return Response(msgspec.json.encode({"alerts": rows}), media_type="application/json")
    return RedirectResponse(back, 303)


async def login_form(request: Request) -> Response:
    site: Site = request.app.state.site
    parameters = Parameters.of_query(request.url.query)
    back = alerting.local(parameters.text("next") or "/")
    parameters.done()
    person = site.guard.person(request)
    writes = site.guard.writes
    page = Page("login.html", {"writes": writes}, {"path": "/login", "asked": parameters, "next": back})
    async with _turn(request):
        made = await run_in_threadpool(
            respond, site, lambda _, __: page, parameters, {}, Wanted.of(request, person), writes
        )
    return Response(made.body, made.status, made.headers, made.kind)


async def login(request: Request) -> Response:
    """Start a session for a client that sends the token."""
    site: Site = request.app.state.site
    if not site.guard.writes:
        raise Refused("this server only reads; `groupbench serve --write` allows changes", 403)
    same_site(request)
    pairs = await _form(request)
    token = dict(pairs).get("token", "")
    parameters = Parameters((name, value) for name, value in pairs if name != "token")
    who, back = parameters.text("who"), alerting.local(parameters.text("next") or "/")
    parameters.done()
    if not who:
        raise BadRequest("missing `who`: your name, recorded with every change you make")
    if not site.guard.knows(token.strip()):
        raise site.guard.wrong_token("that is not the server's token")
    cookie, _ = site.guard.begin(who)
    response = RedirectResponse(back, 303)
    response.set_cookie(
        COOKIE, cookie, max_age=SESSION_S, httponly=True, samesite="strict", secure=request.app.state.secure, path="/"
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
    """Return the fields of a form, or of a JSON object. Raises BadRequest."""
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

    async with _turn(request):
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
        status, headers = 503, {"Retry-After": "5"}
    elif isinstance(error, Refused):
        status = error.status
        await asyncio.sleep(error.wait_s)
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
    name, writes = site.name, site.guard.writes
    try:
        async with _turn(request):
            html = await run_in_threadpool(render, Wanted.of(request), page, name, writes)
    except lane.CrowdedError:
        return Response(message, status, headers, "text/plain; charset=utf-8")
    return Response(html, status, headers, "text/html; charset=utf-8")
