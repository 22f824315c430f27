"""Post the verdict of each open merge request's measuring job as a comment on that request.

python ci/gitlab/comments.py

A job of the default branch runs this, with GITLAB_TOKEN: it reads the text that the job `groupbench-compare` left, and
runs none of the request's code. Which request a text belongs to is GitLab's answer, never the text's. A comment that
is there already is edited, and left alone where nothing is new. Exit codes: 0, or 1 where a comment was not posted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

JOB = "groupbench-compare"
FILE = "artifacts/comment.md"
MOST_BYTES = 1 << 20
REQUESTS = 100  # of the merge requests that changed last

API = os.environ["CI_API_V4_URL"].rstrip("/")
PROJECT = f"{API}/projects/{quote(os.environ['CI_PROJECT_ID'], safe='')}"


def read(url: str) -> bytes:
    """Return the start of what the server answers. Where it redirects to, the token does not go."""
    request = Request(url)
    request.add_unredirected_header("PRIVATE-TOKEN", os.environ["GITLAB_TOKEN"])
    with urlopen(request, timeout=60) as answer:  # nosec B310 # GitLab's own address, from the job's environment
        return answer.read(MOST_BYTES)


def rows(path: str) -> list[dict[str, Any]]:
    return json.loads(read(f"{PROJECT}{path}{'&' if '?' in path else '?'}per_page=100"))


def comment_of(request: int) -> str | None:
    """Return the text of a request's newest pipeline of this project, or None while there is none."""
    for pipeline in rows(f"/merge_requests/{request}/pipelines"):
        if str(pipeline["project_id"]) != os.environ["CI_PROJECT_ID"]:
            continue  # a fork's own, which ran on its machines
        for job in rows(f"/pipelines/{pipeline['id']:d}/jobs"):
            if job["name"] == JOB:
                if not job.get("finished_at"):
                    return None
                try:
                    return read(f"{PROJECT}/jobs/{job['id']:d}/artifacts/{FILE}").decode(errors="replace")
                except HTTPError as error:
                    if error.code == 404:  # the job ended before it had a verdict, and says why
                        return None
                    raise
    return None


def harmless(text: str) -> str:
    """Return text in which no line is one of GitLab's quick actions, and no name is notified: the bot may do more."""
    return re.sub(r"^([\s>*+-]*)/", r"\1\\/", text, flags=re.MULTILINE).replace("@", "@\u2060")


def main() -> int:
    failed = 0
    for request in rows("/merge_requests?state=opened&scope=all&order_by=updated_at")[:REQUESTS]:
        text = comment_of(request["iid"])
        if text is not None:
            command = ["groupbench", "post", "-", "--key", "ab", "--on", "gitlab", "--pr", str(request["iid"])]
            failed |= subprocess.run(command, input=harmless(text), text=True).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
