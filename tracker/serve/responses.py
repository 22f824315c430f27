"""Make the responses to requests for pages, large ones in a process of their own.

Python runs one thread at a time, so a page of 500 rows in a thread would slow down every other page. The process has
neither the token nor jobs. If a page needs the result of a job, the server gets it and asks the process again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from groupbench.tracker.facts.errors import StoreError, TrackerError
from groupbench.tracker.serve.database import open_to_read
from groupbench.tracker.serve.jobs import Jobs, Known, Working
from groupbench.tracker.serve.parameters import Parameters
from groupbench.tracker.serve.render import Wanted, prepare, render
from groupbench.tracker.serve.security import Guard
from groupbench.tracker.serve.site import Page, Site
from groupbench.tracker.serve.worker import NICE_PAGES, JobWorker, spare_from_collection

LIMIT_S = 10.0
"""Maximum CPU time of a large page in seconds."""

_MOST_QUESTIONS = 4

View = Callable[..., Page]


@dataclass(frozen=True)
class PageResponse:
    """A response, as the process sends it."""

    body: bytes
    status: int
    headers: dict[str, str]
    kind: str
    crowded: bool = False  # the queue of the page's job was full


def respond(
    site: Site, view: View, parameters: Parameters, path_values: Mapping[str, Any], wanted: Wanted, writes: bool
) -> PageResponse:
    """Return a page as HTML or JSON. Raises TrackerError."""
    page = view(site, parameters, **path_values)
    headers = {} if page.again is None else {"Retry-After": str(page.again)}
    state = page.data.get("state")
    if wanted.json:
        # Nothing known yet: a program is to come back.
        status = 202 if state in ("comparing", "crowded") else page.status
        return PageResponse(msgspec.json.encode(page.data), status, headers, "application/json", state == "crowded")
    body = render(wanted, page, site.name, writes).encode()
    return PageResponse(body, page.status, headers, "text/html; charset=utf-8", state == "crowded")


@dataclass(frozen=True)
class _Question:
    """The arguments of `Jobs.ask`."""

    of: Hashable
    version: Hashable
    work: Callable[..., Any]
    args: tuple[Any, ...]
    patience: float | None
    keep: bool


class _UnansweredError(Exception):
    def __init__(self, question: _Question) -> None:
        super().__init__(question)
        self.question = question


class _Results(Jobs):
    """The results of jobs that the server got for one page, by their keys."""

    def __init__(self, results: Mapping[Hashable, Known | Working | TrackerError]) -> None:
        super().__init__()
        self._results = results

    def ask(
        self,
        of: Hashable,
        version: Hashable,
        work: Callable[..., Any],
        *args: Any,
        patience: float | None = None,
        keep: bool = False,
    ) -> Known | Working:
        if of not in self._results:
            raise _UnansweredError(_Question(of, version, work, args, patience, keep))
        result = self._results[of]
        if isinstance(result, TrackerError):
            raise result
        return result


class PageWorker:
    """The process of large pages."""

    def __init__(self, location: str) -> None:
        self._location, self._process = location, JobWorker(NICE_PAGES)
        self._process.submit(_warm, location, seconds=LIMIT_S)  # so that the first page need not wait for it

    async def respond(
        self,
        site: Site,
        view: View,
        parameters: Parameters,
        path_values: Mapping[str, Any],
        wanted: Wanted,
        writes: bool,
    ) -> PageResponse:
        """Return the response, made in the process."""
        results: dict[Hashable, Known | Working | TrackerError] = {}
        for _ in range(_MOST_QUESTIONS):
            future = self._process.submit(
                _respond, self._location, results, view, parameters, path_values, wanted, writes, seconds=LIMIT_S
            )
            made = await asyncio.shield(asyncio.wrap_future(future))
            if isinstance(made, PageResponse):
                return made
            results[made.of] = await run_in_threadpool(_result, site.jobs, made)
        raise StoreError("the page needs too many results; select fewer series")

    def close(self) -> None:
        self._process.close()


def _result(jobs: Jobs, question: _Question) -> Known | Working | TrackerError:
    try:
        return jobs.ask(
            question.of, question.version, question.work, *question.args, patience=question.patience, keep=question.keep
        )
    except TrackerError as error:
        return error


def _warm(location: str) -> None:
    prepare()
    site = _site(location)
    with site.database.read() as session:
        site.facets(session)
    spare_from_collection()


def _respond(location: str, results: Mapping[Hashable, Any], *args: Any) -> PageResponse | _Question:
    """Return the response, or the question that must be answered first. Runs in the process."""
    site = _site(location)
    site.jobs = _Results(results)
    try:
        return respond(site, *args)
    except _UnansweredError as error:
        return error.question


@lru_cache(maxsize=1)
def _site(location: str) -> Site:
    return Site(open_to_read(location), _Results({}), Guard())
