"""`groupbench serve`: serve a live dashboard of the database."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.tracker.cli.declared import command, flag, option
from groupbench.tracker.cli.here import traffic_of
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.tools.git import user
from groupbench.tracker.tools.parameters import Number

if TYPE_CHECKING:
    from groupbench.tracker.serve.security import Names

TOKEN = "GROUPBENCH_TOKEN"  # noqa: S105 # the name of a variable


CONNECTIONS = 400
"""Maximum number of open connections. Below 1024, a common limit of open files per process."""

LARGEST_HEAD = 64 * 1024
"""Maximum size of the head of a request in bytes."""

SWITCH_S = 0.0005
"""Time in seconds for which a thread may hold Python's global lock while another waits for it.

A page releases the lock for each row that it reads. During a judgement, it would wait 5 ms each time with Python's
default.
"""


class ServeError(TrackerError):
    """The server cannot start."""


@command()
def serve(
    db: str,
    host: str = option("--host", default="127.0.0.1", help="Address to listen on."),
    port: int = option("--port", type=Number(0, 65535), default=8642, help="Port to listen on; 0 picks a free one."),
    write: bool = flag("--write", help="Let anyone with the token acknowledge, accept and close alerts."),
    token_file: Path | None = option(
        "--token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"File whose first line is the token. Default: the environment variable {TOKEN}.",
    ),
    names: tuple[str, ...] = option(
        "--name",
        multiple=True,
        help="Also accept requests for this host name, such as a proxy's; may be repeated.",
    ),
    proxies: tuple[str, ...] = option(
        "--proxy",
        multiple=True,
        metavar="ADDRESS",
        help="Trust this address to send the name of the person in --user-header; may be repeated.",
    ),
    user_header: str = option(
        "--user-header",
        default="X-Forwarded-User",
        help="Header in which a --proxy sends the name of the person, which is recorded with changes.",
    ),
    secure: bool = flag("--https", help="Mark cookies as Secure. Use this if the server is reachable only over HTTPS."),
) -> None:
    """Serve a live dashboard of the database: verdicts, runs, series and incidents.

    By default the server is read-only and only this machine can reach it. Press Ctrl-C to stop it.
    """
    if token_file is not None and not write:
        raise click.UsageError("--token-file requires --write: reading needs no token")
    try:
        import uvicorn

        from groupbench.tracker.serve.app import create_app
        from groupbench.tracker.serve.security import LOOPBACK, is_loopback
    except ModuleNotFoundError as error:
        raise ServeError(f"`serve` needs {error.name}, which is not installed: pip install -e '.[serve]'") from error
    token, people = _token(token_file) if write else None, _names(proxies, user_header)
    traffic = traffic_of(click.get_current_context())
    with _listening(host, port) as listener:
        alone = is_loopback(listener.getsockname()[0])
        hosts = {*LOOPBACK, host.lower(), *(name.lower() for name in names)}
        if not alone:
            hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        app = create_app(
            db, token=token, hosts=frozenset(hosts), numbers=not alone, secure=secure, names=people, traffic=traffic
        )
        config = uvicorn.Config(
            app, http="h11", ws="none", log_level="warning", access_log=False, server_header=False,
            proxy_headers=False, limit_concurrency=CONNECTIONS, timeout_keep_alive=20,
            h11_max_incomplete_event_size=LARGEST_HEAD, timeout_graceful_shutdown=3,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, _end)
        sys.setswitchinterval(SWITCH_S)
        shown = f"[{host}]" if ":" in host else host
        say(f"serving {app.state.site.database.store.name} at http://{shown}:{listener.getsockname()[1]}"
            f", {'incidents can be changed' if write else 'read-only'}; press Ctrl-C to stop")  # fmt: skip
        if not alone:
            say(f"anyone who can reach {host} can read the database")
        uvicorn.Server(config).run(sockets=[listener])


def _end(number: int, frame: object) -> None:
    """Exit with 0 on the signal that uvicorn raises again after its shutdown."""
    raise SystemExit(ExitCode.OK)


def _token(file: Path | None) -> str:
    """Return the token that a client must present to write. Raises UsageError if it is missing or too short."""
    from groupbench.tracker.serve.limits import LIMITS
    from groupbench.tracker.serve.security import MAKE_TOKEN

    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
        if not token:
            raise click.UsageError(f"{file}: the first line, which should hold the token, is empty; {MAKE_TOKEN}")
    else:
        token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise click.UsageError(f"--write needs a token, in {TOKEN} or --token-file; {MAKE_TOKEN}")
    if len(token) < LIMITS.token:
        raise click.UsageError(f"the token has {len(token)} characters; it needs {LIMITS.token} or more; {MAKE_TOKEN}")
    return token


def _names(proxies: tuple[str, ...], header: str) -> Names:
    """Return the sources of people's names. Raises UsageError."""
    from groupbench.tracker.serve.security import Names, plain_address

    addresses = {text: plain_address(text) for text in proxies}
    for text, address in addresses.items():
        if not address:
            raise click.UsageError(f"--proxy: {text!r} is not an IP address")
    local = user() or os.environ.get("USER") or "unknown"  # as for `groupbench incidents ack`
    return Names(local, frozenset(addresses.values()), header)


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ServeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServeError(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from error
    return listener
