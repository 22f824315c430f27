"""Write to GitHub or GitLab: post a comment once and edit it from then on. `issues` keeps incidents' issues.

A text is found by its mark, and only among those from the token's account: someone copying the mark cannot have their
own comment overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.outputs import comment, http

Done = Literal["created", "edited", "unchanged"]

_PAGE = 100
_PAGES = 100
_TRIES = 3


@dataclass(frozen=True)
class Text:
    """A comment or an issue."""

    key: int
    author: str
    bot: bool
    title: str
    body: str
    state: str  # open or closed
    url: str | None


@dataclass(frozen=True)
class Forge:
    """A repository on a service, with a pull or merge request, and the token to write there: here at GitHub."""

    kind: ClassVar[str] = "github"
    tokens: ClassVar[tuple[str, ...]] = ("GITHUB_TOKEN", "GH_TOKEN")  # variables
    address: ClassVar[tuple[str, str]] = ("GITHUB_API_URL", "https://api.github.com")  # variable and default
    repositories: ClassVar[tuple[str, ...]] = ("GITHUB_REPOSITORY",)
    form: ClassVar[str] = r"[\w.-]+/[\w.-]+"  # of a repository's name
    number_from: ClassVar[str] = "--pr, or a workflow that a pull request started"
    user_key: ClassVar[str] = "login"  # field that names an account
    author_key: ClassVar[str] = "user"  # field of a text that holds its account
    body_key: ClassVar[str] = "body"  # an issue's field for its text
    edit: ClassVar[str] = "PATCH"  # method that changes a text
    every: ClassVar[str] = "state=all"  # query for the issues in every state
    by: ClassVar[str] = "creator"  # parameter for those of an account
    since: ClassVar[str] = "since"  # parameter for those since a time
    moves: ClassVar[Mapping[str, Mapping[str, str]]] = {"open": {"state": "open"}, "closed": {"state": "closed"}}
    answers_bots: ClassVar[bool] = True  # whether a token may belong to no user, such as a workflow's own

    api: str  # URL without a trailing slash
    repository: str
    number: int  # of the request; 0 without one
    token: str

    @property
    def root(self) -> str:
        return f"/repos/{quote(self.repository)}"

    @property
    def comments(self) -> str:
        """The path to the comments."""
        return f"{self.root}/issues/{self.number}/comments"

    def comment(self, key: int) -> str:
        """Return a comment's path."""
        return f"{self.root}/issues/comments/{key}"

    @property
    def issues(self) -> str:
        return f"{self.root}/issues"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request, the token's included."""
        accepted = {"X-GitHub-Api-Version": "2022-11-28", "Accept": "application/vnd.github+json"}
        return {"Authorization": f"Bearer {self.token}", **accepted}

    def login_of(self, author: str, commit: str) -> str | None:
        """Return a commit author's account."""
        facts = self.ask("GET", f"{self.root}/commits/{commit}").body
        names = {((facts.get("commit") or {}).get(who) or {}).get("name") for who in ("author", "committer")}
        return (facts.get("author") or {}).get("login") if author in names else None

    def assignee(self, login: str) -> dict[str, Any]:
        """Return the field of an issue that assigns it to an account, if there is one."""
        return {"assignees": [login]}

    @classmethod
    def of(cls, environ: Mapping[str, str], repository: str | None, number: int | None) -> Forge:
        """Return the request that CI's variables and the options name. Raises OutputError, naming missing values."""
        token = next((environ[name] for name in cls.tokens if environ.get(name)), None)
        repository = repository or next((environ[name] for name in cls.repositories if environ.get(name)), None)
        number = _number_of_request(environ) if number is None else number
        named = {
            cls.tokens[0]: token, f"--repo or {cls.repositories[0]}": repository, cls.number_from: number
        }  # fmt: skip
        missing = [name for name, value in named.items() if value is None]
        if token is None or repository is None or number is None:
            raise OutputError(f"post on {cls.kind} needs {'; '.join(missing)}")
        if any(char.isspace() or not char.isprintable() or ord(char) > 126 for char in token):
            raise OutputError(f"{cls.tokens[0]} contains a character that no token has (a line break?)")
        variable, default = cls.address
        api = environ.get(variable) or default
        if not api.startswith(("https://", "http://")):
            raise OutputError(f"the API's URL {api!r} does not begin with https://")
        if not re.fullmatch(cls.form, repository):
            raise OutputError(f"repository {repository!r} does not have the form OWNER/NAME")
        return cls(api.rstrip("/"), repository, number, token)

    def ask(
        self, method: str, path: str, body: Any = None, *, kind: type = dict, repeat: bool = True
    ) -> http.HttpResponse:
        request = http.HttpRequest(method, self.api + path, self.headers, body, self.token, kind)
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
        name = user.get(self.user_key)
        return str(name) if name else None

    def read(self, item: Mapping[str, Any]) -> Text:
        """Return a comment or an issue from the API's JSON."""
        author = item.get(self.author_key) or {}
        return Text(
            int(item.get("iid") or item.get("number") or item.get("id") or 0),
            str(author.get(self.user_key, "")),
            author.get("type") == "Bot",
            str(item.get("title") or ""),
            str(item.get("body") or item.get("description") or "").replace("\r\n", "\n"),
            "closed" if item.get("state") == "closed" else "open",
            item.get("html_url") or item.get("web_url"),
        )

    def own(self, path: str, me: str | None) -> Iterator[Text]:
        """Yield a list's marked texts by the token's account, or by any bot if the account is unknown."""
        for item in self._pages(path):
            text = self.read(item)
            is_own = text.bot if me is None else text.author == me
            if is_own and comment.mark_of(text.body) and "pull_request" not in item:
                yield text

    def _pages(self, path: str) -> Iterator[Any]:
        """Yield a list's entries, page by page."""
        for page in range(1, _PAGES + 1):
            place = f"{path}{'&' if '?' in path else '?'}per_page={_PAGE}&page={page}"
            response = self.ask("GET", place, kind=list)
            yield from response.body
            links = response.headers.get("link")
            if len(response.body) < _PAGE if links is None else 'rel="next"' not in links:
                return

    def issues_since(self, since: datetime, me: str | None) -> Iterator[Text]:
        """Yield the account's issues, or those by any bot since a time if the account is unknown."""
        name, value = (self.by, me) if me else (self.since, f"{since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")
        return self.own(f"{self.issues}?{self.every}&{name}={quote(value, safe='')}", me)

    def edit_issue(self, key: int, *fields: Mapping[str, Any]) -> None:
        self.ask(self.edit, f"{self.issues}/{key}", {name: value for each in fields for name, value in each.items()})

    def create(self, path: str, body: Any, find: Callable[[], Text | None]) -> Text:
        """Create a text. If the answer is lost, look for it before another attempt. Raises OutputError."""
        for _ in range(_TRIES):
            try:
                return self.read(self.ask("POST", path, body, repeat=False).body)
            except http.HttpUncertain as unsure:
                last = unsure.message
            http.sleep(2.0)
            if (text := find()) is not None:
                return text
        raise OutputError(f"{last}; given up after {_TRIES} attempts")


class GitLab(Forge):
    kind = "gitlab"
    tokens = ("GITLAB_TOKEN",)
    address = ("CI_API_V4_URL", "https://gitlab.com/api/v4")
    repositories = ("CI_PROJECT_ID", "CI_PROJECT_PATH")
    form = ".+"
    number_from = "--pr or CI_MERGE_REQUEST_IID"
    user_key, author_key, body_key, edit = "username", "author", "description", "PUT"
    every, by, since = "scope=all", "author_username", "created_after"
    moves: ClassVar = {"open": {"state_event": "reopen"}, "closed": {"state_event": "close"}}
    answers_bots = False

    @property
    def root(self) -> str:
        return f"/projects/{quote(self.repository, safe='')}"

    @property
    def comments(self) -> str:
        return f"{self.root}/merge_requests/{self.number}/notes"

    def comment(self, key: int) -> str:
        return f"{self.comments}/{key}"

    @property
    def headers(self) -> dict[str, str]:
        return {"PRIVATE-TOKEN": self.token}

    def login_of(self, author: str, commit: str) -> str | None:
        users = self.ask("GET", f"/users?search={quote(author, safe='')}", kind=list).body
        names = [user.get("username") for user in users if user.get("name") == author]
        return names[0] if len(names) == 1 else None

    def assignee(self, login: str) -> dict[str, Any]:
        users = self.ask("GET", f"/users?username={quote(login, safe='')}", kind=list).body
        return {"assignee_ids": [user["id"] for user in users[:1]]}


FORGES: dict[str, type[Forge]] = {each.kind: each for each in (Forge, GitLab)}


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

    def earlier() -> Iterator[Text]:
        return (each for each in forge.own(forge.comments, me) if each.body.startswith(mark))

    for each in earlier():
        if each.body.strip() == text.strip():
            return "unchanged", each.url
        try:
            edited = forge.ask(forge.edit, forge.comment(each.key), {"body": text})
        except http.HttpRefused as refused:
            if me is None and refused.status in (403, 404):
                continue  # another program's comment
            raise
        return "edited", forge.read(edited.body).url or each.url
    created = forge.create(
        forge.comments, {"body": text}, lambda: next((e for e in earlier() if e.body.strip() == text.strip()), None)
    )
    return "created", created.url


def _number_of_request(environ: Mapping[str, str]) -> int | None:
    """Return the number of CI's request: GitLab's, or a workflow's from the ref or the event that started it."""
    if number := _number(environ.get("CI_MERGE_REQUEST_IID")):
        return number
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
