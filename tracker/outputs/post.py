"""A comment on a pull request that is written once and edited from then on: GitHub's REST API and GitLab's notes.

It is found by its mark, and only where the account of the token wrote it: whoever copies the mark gets no say, and no
comment of a person is ever written over.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from groupbench.tracker.errors import OutputError
from groupbench.tracker.outputs import http

Done = Literal["created", "edited", "unchanged"]

_PAGE = 100
_PAGES = 100
_TRIES = 3


@dataclass(frozen=True)
class Comment:
    key: int
    author: str
    bot: bool
    body: str
    url: str | None


@dataclass(frozen=True)
class Forge(ABC):
    """Where to comment, and as whom."""

    kind: ClassVar[str]
    token_name: ClassVar[str]  # variable of the token
    user_key: ClassVar[str]  # field that names an account
    author_key: ClassVar[str]  # field of a comment that holds its account
    edit: ClassVar[str]  # method that changes a comment
    answers_bots: ClassVar[bool]  # whether a token may be no user's, as a workflow's own

    api: str  # URL without a slash at its end
    repository: str
    number: int
    token: str

    @property
    @abstractmethod
    def comments(self) -> str:
        """Path of the comments."""

    @abstractmethod
    def comment(self, key: int) -> str:
        """Return the path of one comment."""

    @property
    @abstractmethod
    def headers(self) -> dict[str, str]:
        """Headers of every request, the token's included."""

    @classmethod
    @abstractmethod
    def of(cls, environ: Mapping[str, str], repository: str | None, number: int | None) -> Forge:
        """Return where CI's variables say. Raises OutputError, naming what is missing."""

    def ask(self, method: str, path: str, body: Any = None, *, repeat: bool = True) -> http.Answer:
        request = http.Request(method, self.api + path, self.headers, body, secret=self.token)
        what = f"{method} {path.partition('?')[0]} at {http.host(self.api)}"
        return http.send(request, what=what, repeat=repeat)

    def account(self) -> str | None:
        """Return whose token it is; None for one that is no user's."""
        try:
            user = self.ask("GET", "/user").body
        except http.Refused as refused:
            if self.answers_bots and refused.status in (403, 404):
                return None
            raise
        name = user.get(self.user_key) if isinstance(user, dict) else None
        return str(name) if name else None

    def read(self, item: Mapping[str, Any]) -> Comment:
        """Return a comment as the API gives it."""
        author = item.get(self.author_key) or {}
        return Comment(
            int(item["id"]),
            str(author.get(self.user_key, "")),
            author.get("type") == "Bot",
            str(item.get("body") or ""),
            _url(item),
        )

    @classmethod
    def _made(
        cls,
        token: str | None,
        api: str,
        repository: tuple[str | None, str],  # and what gives it
        number: tuple[int | None, str],
    ) -> Forge:
        needed = ((token, cls.token_name), repository, number)
        missing = [name for value, name in needed if not value]
        if missing or not token or not repository[0] or not number[0]:
            raise OutputError(f"post on {cls.kind} needs {'; '.join(missing)}")
        if any(char.isspace() or not char.isprintable() or ord(char) > 126 for char in token):
            raise OutputError(f"{cls.token_name} holds a character that no token has (a line's end?)")
        if not api.startswith(("https://", "http://")):
            raise OutputError(f"the API's address {api!r} does not begin with https://")
        return cls(api.rstrip("/"), repository[0], number[0], token)


class GitHub(Forge):
    kind = "github"
    token_name = "GITHUB_TOKEN"
    user_key, author_key, edit = "login", "user", "PATCH"
    answers_bots = True

    @property
    def comments(self) -> str:
        return f"/repos/{quote(self.repository)}/issues/{self.number}/comments"

    def comment(self, key: int) -> str:
        return f"/repos/{quote(self.repository)}/issues/comments/{key}"

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.token}",
            "X-GitHub-Api-Version": "2022-11-28",
            "Accept": "application/vnd.github+json",
        }

    @classmethod
    def of(cls, environ: Mapping[str, str], repository: str | None, number: int | None) -> Forge:
        repository = repository or environ.get("GITHUB_REPOSITORY")
        made = cls._made(
            environ.get("GITHUB_TOKEN") or environ.get("GH_TOKEN"),
            environ.get("GITHUB_API_URL") or "https://api.github.com",
            (repository, "--repo or GITHUB_REPOSITORY"),
            (number or _number_of_event(environ), "--pr, or a workflow that a pull request started"),
        )
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", made.repository):
            raise OutputError(f"repository {made.repository!r} is not of the form OWNER/NAME")
        return made


class GitLab(Forge):
    kind = "gitlab"
    token_name = "GITLAB_TOKEN"
    user_key, author_key, edit = "username", "author", "PUT"
    answers_bots = False

    @property
    def comments(self) -> str:
        return f"/projects/{quote(self.repository, safe='')}/merge_requests/{self.number}/notes"

    def comment(self, key: int) -> str:
        return f"{self.comments}/{key}"

    @property
    def headers(self) -> dict[str, str]:
        return {"PRIVATE-TOKEN": self.token}

    @classmethod
    def of(cls, environ: Mapping[str, str], repository: str | None, number: int | None) -> Forge:
        return cls._made(
            environ.get("GITLAB_TOKEN"),
            environ.get("CI_API_V4_URL") or "https://gitlab.com/api/v4",
            (repository or environ.get("CI_PROJECT_ID") or environ.get("CI_PROJECT_PATH"), "--repo or CI_PROJECT_ID"),
            (number or _number(environ.get("CI_MERGE_REQUEST_IID")), "--pr or CI_MERGE_REQUEST_IID"),
        )


FORGES: dict[str, type[Forge]] = {"github": GitHub, "gitlab": GitLab}


def forge(
    environ: Mapping[str, str], *, kind: str | None = None, repository: str | None = None, number: int | None = None
) -> Forge:
    """Return where CI's variables say. Raises OutputError, naming what is missing."""
    if kind is None:
        kind = "gitlab" if environ.get("GITLAB_CI") or environ.get("CI_API_V4_URL") else "github"
    return FORGES[kind].of(environ, repository, number)


def post(forge: Forge, mark: str, text: str) -> tuple[Done, str | None]:
    """Return (what was done, URL of the comment). Raises OutputError."""
    text = text.replace("\r\n", "\n")
    me = forge.account()
    for _ in range(_TRIES):
        for own in _own(forge, mark, me):
            if own.body.replace("\r\n", "\n").strip() == text.strip():
                return "unchanged", own.url
            try:
                edited = forge.ask(forge.edit, forge.comment(own.key), {"body": text})
            except http.Refused as refused:
                if me is None and refused.status in (403, 404):
                    continue  # another program's comment
                raise
            return "edited", _url(edited.body) or own.url
        try:
            created = forge.ask("POST", forge.comments, {"body": text}, repeat=False)
        except http.Unsure as unsure:
            last = unsure
            http.sleep(2.0)
            continue  # it may be there: look again, or there would be two
        return "created", _url(created.body)
    raise OutputError(f"{last.message}; given up after {_TRIES} attempts")


def _own(forge: Forge, mark: str, me: str | None) -> list[Comment]:
    """Return the comments with the mark by the token's account; by any program where that is not known."""
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
        yield from map(forge.read, answer.body)
        more = 'rel="next"' in answer.headers["link"] if "link" in answer.headers else len(answer.body) >= _PAGE
        if not more:
            return


def _url(item: Any) -> str | None:
    return item.get("html_url") if isinstance(item, dict) else None


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
