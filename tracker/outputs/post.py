"""Write to GitHub or GitLab: post a comment once and edit it from then on. `issues` keeps incidents' issues.

The comment is found by a mark, and only among those from the token's account: someone copying the mark cannot have
their own comment overwritten.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from groupbench.tracker.facts.errors import OutputError
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
class Issue:
    number: int
    author: str
    bot: bool
    title: str
    body: str
    state: str  # open or closed
    url: str | None


@dataclass(frozen=True)
class Forge(ABC):
    """A repository on a service, with a pull or merge request, and the token to write there."""

    kind: ClassVar[str]
    token_name: ClassVar[str]  # variable of the token
    user_key: ClassVar[str]  # field that names an account
    author_key: ClassVar[str]  # field of a comment that holds its account
    edit: ClassVar[str]  # method that changes a comment
    answers_bots: ClassVar[bool]  # whether a token may belong to no user, such as a workflow's own

    api: str  # URL without a trailing slash
    repository: str
    number: int  # of the request; 0 without one
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

    @abstractmethod
    def issues_since(self, since: datetime) -> str:
        """Return the path to all issues that were opened or changed since a time."""

    @abstractmethod
    def create_issue(self, title: str, text: str) -> Issue:
        """Open an issue. Raises HttpUncertain if it may have been opened."""

    @abstractmethod
    def edit_issue(self, number: int, title: str, text: str, state: str | None) -> None:
        """Change an issue's text, and its state if given."""

    @abstractmethod
    def login_of(self, author: str, commit: str) -> str | None:
        """Return a commit author's account."""

    @abstractmethod
    def assign(self, number: int, login: str) -> None:
        """Assign an issue to an account."""

    def read_issue(self, item: Mapping[str, Any]) -> Issue:
        """Return an issue from the API's JSON."""
        author = item.get(self.author_key) or {}
        body, number = item.get("body") or item.get("description") or "", item.get("iid") or item.get("number")
        return Issue(
            int(number or 0),
            str(author.get(self.user_key, "")),
            author.get("type") == "Bot",
            str(item.get("title") or ""),
            str(body).replace("\r\n", "\n"),
            "closed" if item.get("state") == "closed" else "open",
            _url(item) or item.get("web_url"),
        )

    @classmethod
    @abstractmethod
    def of(cls, environ: Mapping[str, str], repository: str | None, number: int | None) -> Forge:
        """Return the request that CI's variables and the options name. Raises OutputError, naming missing values."""

    def ask(self, method: str, path: str, body: Any = None, *, repeat: bool = True) -> http.HttpResponse:
        request = http.HttpRequest(method, self.api + path, self.headers, body, secret=self.token)
        what = f"{method} {path.partition('?')[0]} at {http.host(self.api)}"
        return http.send(request, what=what, repeat=repeat)

    def account(self) -> str | None:
        """Return the account of the token, or None if it belongs to no user."""
        try:
            user = self.ask("GET", "/user").body
        except http.HttpRefused as refused:
            if self.answers_bots and refused.status in (403, 404):
                return None
            raise
        name = user.get(self.user_key) if isinstance(user, dict) else None
        return str(name) if name else None

    def read(self, item: Mapping[str, Any]) -> Comment:
        """Return a comment from the API's JSON."""
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
        repository: tuple[str | None, str],  # the value, and where to set it
        number: tuple[int | None, str],
    ) -> Forge:
        needed = ((token, cls.token_name), repository, number)
        missing = [name for value, name in needed if value is None or value == ""]
        if missing or not token or not repository[0] or number[0] is None:
            raise OutputError(f"post on {cls.kind} needs {'; '.join(missing)}")
        if any(char.isspace() or not char.isprintable() or ord(char) > 126 for char in token):
            raise OutputError(f"{cls.token_name} contains a character that no token has (a line break?)")
        if not api.startswith(("https://", "http://")):
            raise OutputError(f"the API's URL {api!r} does not begin with https://")
        return cls(api.rstrip("/"), repository[0], number[0], token)


class GitHub(Forge):
    kind = "github"
    token_name = "GITHUB_TOKEN"  # noqa: S105 # the name of a variable
    user_key, author_key, edit = "login", "user", "PATCH"
    answers_bots = True

    @property
    def comments(self) -> str:
        return f"/repos/{quote(self.repository)}/issues/{self.number}/comments"

    def comment(self, key: int) -> str:
        return f"/repos/{quote(self.repository)}/issues/comments/{key}"

    @property
    def _issues(self) -> str:
        return f"/repos/{quote(self.repository)}/issues"

    def issues_since(self, since: datetime) -> str:
        return f"{self._issues}?state=all&since={since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"

    def create_issue(self, title: str, text: str) -> Issue:
        return self.read_issue(self.ask("POST", self._issues, {"title": title, "body": text}, repeat=False).body)

    def edit_issue(self, number: int, title: str, text: str, state: str | None) -> None:
        moved = {} if state is None else {"state": state}
        self.ask("PATCH", f"{self._issues}/{number}", {"title": title, "body": text, **moved})

    def login_of(self, author: str, commit: str) -> str | None:
        commit_facts = self.ask("GET", f"/repos/{quote(self.repository)}/commits/{commit}").body
        names = {(commit_facts.get("commit") or {}).get(who, {}).get("name") for who in ("author", "committer")}
        return (commit_facts.get("author") or {}).get("login") if author in names else None

    def assign(self, number: int, login: str) -> None:
        self.ask("PATCH", f"{self._issues}/{number}", {"assignees": [login]})

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
            (
                _number_of_event(environ) if number is None else number,
                "--pr, or a workflow that a pull request started",
            ),
        )
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", made.repository):
            raise OutputError(f"repository {made.repository!r} does not have the form OWNER/NAME")
        return made


class GitLab(Forge):
    kind = "gitlab"
    token_name = "GITLAB_TOKEN"  # noqa: S105 # the name of a variable
    user_key, author_key, edit = "username", "author", "PUT"
    answers_bots = False

    @property
    def comments(self) -> str:
        return f"/projects/{quote(self.repository, safe='')}/merge_requests/{self.number}/notes"

    def comment(self, key: int) -> str:
        return f"{self.comments}/{key}"

    @property
    def _issues(self) -> str:
        return f"/projects/{quote(self.repository, safe='')}/issues"

    def issues_since(self, since: datetime) -> str:
        return f"{self._issues}?scope=all&created_after={since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"

    def create_issue(self, title: str, text: str) -> Issue:
        return self.read_issue(self.ask("POST", self._issues, {"title": title, "description": text}, repeat=False).body)

    def edit_issue(self, number: int, title: str, text: str, state: str | None) -> None:
        moved = {} if state is None else {"state_event": "reopen" if state == "open" else "close"}
        self.ask("PUT", f"{self._issues}/{number}", {"title": title, "description": text, **moved})

    def login_of(self, author: str, commit: str) -> str | None:
        users = self.ask("GET", f"/users?search={quote(author, safe='')}").body
        names = [user.get("username") for user in users if user.get("name") == author]
        return names[0] if len(names) == 1 else None

    def assign(self, number: int, login: str) -> None:
        users = self.ask("GET", f"/users?username={quote(login, safe='')}").body
        if users:
            self.ask("PUT", f"{self._issues}/{number}", {"assignee_ids": [users[0]["id"]]})

    @property
    def headers(self) -> dict[str, str]:
        return {"PRIVATE-TOKEN": self.token}

    @classmethod
    def of(cls, environ: Mapping[str, str], repository: str | None, number: int | None) -> Forge:
        return cls._made(
            environ.get("GITLAB_TOKEN"),
            environ.get("CI_API_V4_URL") or "https://gitlab.com/api/v4",
            (repository or environ.get("CI_PROJECT_ID") or environ.get("CI_PROJECT_PATH"), "--repo or CI_PROJECT_ID"),
            (
                _number(environ.get("CI_MERGE_REQUEST_IID")) if number is None else number,
                "--pr or CI_MERGE_REQUEST_IID",
            ),
        )


FORGES: dict[str, type[Forge]] = {"github": GitHub, "gitlab": GitLab}


def forge(
    environ: Mapping[str, str], *, kind: str | None = None, repository: str | None = None, number: int | None = None
) -> Forge:
    """Return the request that CI's variables and the options name. Raises OutputError, naming missing values."""
    if kind is None:
        kind = "gitlab" if environ.get("GITLAB_CI") or environ.get("CI_API_V4_URL") else "github"
    return FORGES[kind].of(environ, repository, number)


def post(forge: Forge, mark: str, text: str) -> tuple[Done, str | None]:
    """Post or edit the comment; return (action, the comment's URL). Raises OutputError."""
    text = text.replace("\r\n", "\n")
    me = forge.account()
    for _ in range(_TRIES):
        for comment in _marked(forge, mark, me):
            if comment.body.replace("\r\n", "\n").strip() == text.strip():
                return "unchanged", comment.url
            try:
                edited = forge.ask(forge.edit, forge.comment(comment.key), {"body": text})
            except http.HttpRefused as refused:
                if me is None and refused.status in (403, 404):
                    continue  # another program's comment
                raise
            return "edited", _url(edited.body) or comment.url
        try:
            created = forge.ask("POST", forge.comments, {"body": text}, repeat=False)
        except http.HttpUncertain as unsure:
            last = unsure
            http.sleep(2.0)
            continue  # it may have been created: look again, to avoid a second comment
        return "created", _url(created.body)
    raise OutputError(f"{last.message}; given up after {_TRIES} attempts")


def _marked(forge: Forge, mark: str, me: str | None) -> list[Comment]:
    """Return the marked comments by the token's account, or by any bot if the account is unknown."""
    return [comment for comment in _comments(forge) if comment.body.startswith(mark) and is_own(comment, me)]


def is_own(written: Comment | Issue, me: str | None) -> bool:
    """Return whether the token's account wrote a comment or an issue, or any bot if the account is unknown."""
    return written.bot if me is None else written.author == me


def _comments(forge: Forge) -> Iterator[Comment]:
    return map(forge.read, pages(forge, forge.comments))


def pages(forge: Forge, path: str) -> Iterator[Any]:
    """Yield a list's entries, page by page."""
    for page in range(1, _PAGES + 1):
        response = forge.ask("GET", f"{path}{'&' if '?' in path else '?'}per_page={_PAGE}&page={page}")
        if not isinstance(response.body, list):
            raise OutputError(
                f"{http.host(forge.api)} is not an API of {forge.kind}: its response is not a list of comments"
            )
        yield from response.body
        more = 'rel="next"' in response.headers["link"] if "link" in response.headers else len(response.body) >= _PAGE
        if not more:
            return


def _url(item: Any) -> str | None:
    return item.get("html_url") if isinstance(item, dict) else None


def _number_of_event(environ: Mapping[str, str]) -> int | None:
    """Return the number of a workflow's pull request: from the ref, or from the event that started it."""
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
    return next((_number(candidate.get("number")) for candidate in candidates if candidate), None)


def _number(value: Any) -> int | None:
    return int(value) if str(value or "").isdecimal() and int(value) > 0 else None
