"""Post the verdict of each open merge request's measuring job as a comment on that request.

python ci/gitlab/comments.py

A job of the default branch runs this with GITLAB_TOKEN. It reads the text that the job `groupbench-compare` stored, and
runs none of the request's code. GitLab's API decides which request a text belongs to, never the text itself. A comment
that exists is edited if its text changed. A request that fails does not stop the others. The exit code is 0, or 1 if a
comment could not be posted.
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
MOST_LIST_BYTES = 1 << 28  # 100 merge requests may each have a description of 1 MiB
REQUESTS = 100  # number of merge requests to check, the most recently updated first

API = os.environ["CI_API_V4_URL"].rstrip("/")
PROJECT = f"{API}/projects/{quote(os.environ['CI_PROJECT_ID'], safe='')}"


def read(url: str, most: int = MOST_BYTES) -> bytes:
    """Return the first `most` bytes of the server's response. The token is not sent on to a redirect's target."""
    request = Request(url)  # noqa: S310 # GitLab's own address, from the job's environment
    request.add_unredirected_header("PRIVATE-TOKEN", os.environ["GITLAB_TOKEN"])
    with urlopen(request, timeout=60) as response:  # noqa: S310
        return response.read(most)


def rows(path: str) -> list[dict[str, Any]]:
    return json.loads(read(f"{PROJECT}{path}{'&' if '?' in path else '?'}per_page=100", MOST_LIST_BYTES))


def comment_of(request: int) -> str | None:
    """Return the text that a request's newest pipeline in this project stored, or None if it is not there yet."""
    for pipeline in rows(f"/merge_requests/{request}/pipelines"):
        if str(pipeline["project_id"]) != os.environ["CI_PROJECT_ID"]:
            continue  # a fork's pipeline, which ran on the fork's machines
        for job in rows(f"/pipelines/{pipeline['id']:d}/jobs"):
            if job["name"] == JOB:
                if not job.get("finished_at"):
                    return None
                try:
                    return read(f"{PROJECT}/jobs/{job['id']:d}/artifacts/{FILE}").decode(errors="replace")
                except HTTPError as error:
                    if error.code == 404:  # the job ended before it had a verdict; its log explains why
                        return None
                    raise
    return None


def harmless(text: str) -> str:
    """Return text without GitLab quick actions and mentions, because the bot may have more rights than the author."""
    return re.sub(r"^([\s>*+-]*)/", r"\1\\/", text, flags=re.MULTILINE).replace("@", "@\u2060")


def main() -> int:
    failed = 0
    for request in rows("/merge_requests?state=opened&scope=all&order_by=updated_at")[:REQUESTS]:
        try:
            text = comment_of(request["iid"])
        except (OSError, ValueError, KeyError) as error:
            print(f"!{request['iid']}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = 1
            continue
        if text is not None:
            command = ["groupbench", "post", "-", "--key", "ab", "--on", "gitlab", "--pr", str(request["iid"])]
            failed |= subprocess.run(command, input=harmless(text), text=True).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
