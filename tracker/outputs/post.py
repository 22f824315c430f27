"""A comment on a pull request that is written once and edited from then on: GitHub's REST API and GitLab's notes.

It is found by its mark, and only where the account of the token wrote it: whoever copies the mark gets no say, and no
comment of a person is ever written over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from groupbench.tracker.errors import OutputError
from groupbench.tracker.outputs import http

Done = Literal["created", "edited", "unchanged"]

_PAGE = 100
_PAGES = 100
_TRIES = 3


@dataclass(frozen=True)
class Forge:
    """Where to comment, and as whom."""

    kind: Literal["github", "gitlab"]
    api: str  # URL without a slash at its end
    repository: str
    number: int
    token: str

    @property
    def comments(self) -> str:
        if self.kind == "github":
            return f"/repos/{quote(self.repository)}/issues/{self.number}/comments"
        return f"/projects/{quote(self.repository, safe='')}/merge_requests/{self.number}/notes"

    def comment(self, key: int) -> str:
        if self.kind == "github":
            return f"/repos/{quote(self.repository)}/issues/comments/{key}"
        return f"{self.comments}/{key}"

    def ask(self, method: str, path: str, body: Any = None, *, repeat: bool = True) -> http.Answer:
        if self.kind == "github":
            headers = {"Authorization": f"Bearer {self.token}", "X-GitHub-Api-Version": "2022-11-28"}
            headers["Accept"] = "application/vnd.github+json"
        else:
            headers = {"PRIVATE-TOKEN": self.token}
        request = http.Request(method, self.api + path, headers, body, secret=self.token)
        what = f"{method} {path.partition('?')[0]} at {http.host(self.api)}"
        return http.send(request, what=what, repeat=repeat)


@dataclass(frozen=True)
class Comment:
    key: int
    author: str
    bot: bool
    body: str
    url: str | None


def post(forge: Forge, mark: str, text: str) -> tuple[Done, str | None]:
    """(what was done, URL of the comment). Raises OutputError."""
    text = text.replace("\r\n", "\n")
    me = _me(forge)
    for _ in range(_TRIES):
        for found in _mine(forge, mark, me):
            if found.body.replace("\r\n", "\n").strip() == text.strip():
                return "unchanged", found.url
            try:
                method = "PATCH" if forge.kind == "github" else "PUT"
                edited = forge.ask(method, forge.comment(found.key), {"body": text})
            except http.Refused as refused:
                if me is None and refused.status in (403, 404):
                    continue  # another program's comment
                raise
            return "edited", _url(edited.body) or found.url
        try:
            created = forge.ask("POST", forge.comments, {"body": text}, repeat=False)
        except http.Unsure as unsure:
            last = unsure
            http.sleep(2.0)
            continue  # it may be there: look again, or there would be two
        return "created", _url(created.body)
    raise OutputError(f"{last.message}; given up after {_TRIES} attempts")


def _me(forge: Forge) -> str | None:
    """Whose token it is; None for one that is no user's, as a workflow's own."""
    try:
        found = forge.ask("GET", "/user").body
    except http.Refused as refused:
        if forge.kind == "github" and refused.status in (403, 404):
            return None
        raise
    name = found.get("login" if forge.kind == "github" else "username") if isinstance(found, dict) else None
    return str(name) if name else None


def _mine(forge: Forge, mark: str, me: str | None) -> list[Comment]:
    """Comments with the mark by the token's account; by any program where that is not known."""
    return [
        comment
        for comment in _comments(forge)
        if comment.body.startswith(mark) and (comment.bot if me is None else comment.author == me)
    ]


def _comments(forge: Forge) -> Iterator[Comment]:
    for page in range(1, _PAGES + 1):
        answer = forge.ask("GET", f"{forge.comments}?per_page={_PAGE}&page={page}")
        if not isinstance(answer.body, list):
            raise OutputError(
                f"{http.host(forge.api)} is no API of {forge.kind}: it answers without a list of comments"
            )
        for item in answer.body:
            author = item.get("user" if forge.kind == "github" else "author") or {}
            yield Comment(
                int(item["id"]),
                str(author.get("login" if forge.kind == "github" else "username", "")),
                author.get("type") == "Bot",
                str(item.get("body") or ""),
                _url(item),
            )
        more = 'rel="next"' in answer.headers["link"] if "link" in answer.headers else len(answer.body) >= _PAGE
        if not more:
            return


def _url(item: Any) -> str | None:
    return item.get("html_url") if isinstance(item, dict) else None


def forge(
    environ: Mapping[str, str], *, kind: str | None = None, repository: str | None = None, number: int | None = None
) -> Forge:
    """Where CI's variables say. Raises OutputError, naming what is missing."""
    if kind is None:
        kind = "gitlab" if environ.get("GITLAB_CI") or environ.get("CI_API_V4_URL") else "github"
    if kind == "gitlab":
        token, token_name = environ.get("GITLAB_TOKEN"), "GITLAB_TOKEN"
        api = environ.get("CI_API_V4_URL") or "https://gitlab.com/api/v4"
        repository = repository or environ.get("CI_PROJECT_ID") or environ.get("CI_PROJECT_PATH")
        number = number or _number(environ.get("CI_MERGE_REQUEST_IID"))
        names = ("--repo or CI_PROJECT_ID", "--pr or CI_MERGE_REQUEST_IID")
    else:
        token, token_name = environ.get("GITHUB_TOKEN") or environ.get("GH_TOKEN"), "GITHUB_TOKEN"
        api = environ.get("GITHUB_API_URL") or "https://api.github.com"
        repository = repository or environ.get("GITHUB_REPOSITORY")
        number = number or _number_of_event(environ)
        names = ("--repo or GITHUB_REPOSITORY", "--pr, or a workflow that a pull request started")
    missing = [name for name, value in ((token_name, token), (names[0], repository), (names[1], number)) if not value]
    if missing or not token or not repository or not number:
        raise OutputError(f"post on {kind} needs {'; '.join(missing)}")
    if any(char.isspace() or not char.isprintable() or ord(char) > 126 for char in token):
        raise OutputError(f"{token_name} holds a character that no token has (a line's end?)")
    if kind == "github" and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise OutputError(f"repository {repository!r} is not of the form OWNER/NAME")
    if not api.startswith(("https://", "http://")):
        raise OutputError(f"the API's address {api!r} does not begin with https://")
    return Forge("gitlab" if kind == "gitlab" else "github", api.rstrip("/"), repository, number, token)


def _number_of_event(environ: Mapping[str, str]) -> int | None:
    """The pull request that a workflow is about: by its ref, or by the event that started it."""
    ref = re.fullmatch(r"refs/pull/(\d+)/(?:merge|head)", environ.get("GITHUB_REF", ""))
    if ref:
        return int(ref[1])
    try:
        event = json.loads(Path(environ.get("GITHUB_EVENT_PATH", "")).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(event, dict):
        return None
    requests = (event.get("workflow_run") or {}).get("pull_requests") or []
    issue = event.get("issue") or {}
    candidates = [event.get("pull_request"), issue if issue.get("pull_request") else None, *requests[:1]]
    return next((_number(found.get("number")) for found in candidates if found), None)


def _number(value: Any) -> int | None:
    return int(value) if str(value or "").isdecimal() and int(value) > 0 else None
