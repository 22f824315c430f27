"""`groupbench serve`: serve a live dashboard of the database."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path

import click

from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode

TOKEN = "GROUPBENCH_TOKEN"  # noqa: S105 # the name of a variable


class ServeError(TrackerError):
    """The server cannot start."""


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="NAME", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8642,
    show_default=True,
    metavar="N",
    help="Port to listen on; 0 picks a free one.",
)
@click.option("--write", is_flag=True, help="Let anyone with the token acknowledge, accept and close alerts.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"File whose first line is the token. Default: the environment variable {TOKEN}.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Also accept requests for this host name, such as a proxy's; may be repeated.",
)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Distinguish clients behind this proxy by its X-Forwarded-For header; may be repeated.",
)
@click.option(
    "--https",
    "secure",
    is_flag=True,
    help="Mark cookies as Secure. Use this if the server is reachable only over HTTPS.",
)
@click.pass_obj
def serve(
    db: str,
    host: str,
    port: int,
    write: bool,
    token_file: Path | None,
    names: tuple[str, ...],
    proxies: tuple[str, ...],
    secure: bool,
) -> None:
    """Serve a live dashboard of the database: the report, plus search, comparisons and alerts.

    By default the server is read-only and only this machine can reach it. Press Ctrl-C to stop it.
    """
    if token_file is not None and not write:
        raise click.UsageError("--token-file requires --write: reading needs no token")
    try:
        import uvicorn

        from groupbench.tracker.serve.app import create_app
        from groupbench.tracker.serve.connection import BACKLOG, Connection
        from groupbench.tracker.serve.lane import SWITCH_S
        from groupbench.tracker.serve.security import LOOPBACK, is_loopback
        from groupbench.tracker.serve.worker import spare_from_collection
    except ModuleNotFoundError as error:
        raise ServeError(f"`serve` needs {error.name}, which is not installed: pip install -e '.[serve]'") from error
    token, addresses = _token(token_file) if write else None, _addresses(proxies)
    with _listening(host, port) as listener:
        alone = is_loopback(listener.getsockname()[0])
        hosts = {*LOOPBACK, host.lower(), *(name.lower() for name in names)}
        if not alone:
            hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        app = create_app(
            db, token=token, hosts=frozenset(hosts), numbers=not alone, secure=secure,
            proxies=addresses, apart=True,
        )  # fmt: skip
        config = uvicorn.Config(
            app, http=Connection, ws="none", log_level="error", access_log=False, server_header=False,
            proxy_headers=False, timeout_keep_alive=20, backlog=BACKLOG, timeout_graceful_shutdown=3,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, _end)
        sys.setswitchinterval(SWITCH_S)
        spare_from_collection()  # takes 0.15 s, which the first request would wait for
        shown = f"[{host}]" if ":" in host else host
        say(f"serving {app.state.site.database.store.name} at http://{shown}:{listener.getsockname()[1]}"
            f", {'alerts can be changed' if write else 'read-only'}; press Ctrl-C to stop")  # fmt: skip
        if not alone:
            say(f"anyone who can reach {host} can read the database")
        uvicorn.Server(config).run(sockets=[listener])


def _end(number: int, frame: object) -> None:
    """Exit normally on the signal that uvicorn raises again after its shutdown.

    Death by the signal itself would leave the worker's semaphores behind, and Python would warn about them.
    """
    raise SystemExit(ExitCode.OK)


def _token(file: Path | None) -> str:
    """Return the token that a client must present to write. Raises UsageError if it is missing or too short."""
    from groupbench.tracker.serve.security import MAKE_TOKEN, SHORTEST_TOKEN

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
    if len(token) < SHORTEST_TOKEN:
        raise click.UsageError(
            f"the token has {len(token)} characters; it needs {SHORTEST_TOKEN} or more; {MAKE_TOKEN}"
        )
    return token


def _addresses(texts: tuple[str, ...]) -> frozenset[str]:
    """Return IP addresses as connections have them. Raises UsageError."""
    from groupbench.tracker.serve.turns import plain_address

    try:
        return frozenset(plain_address(str(ipaddress.ip_address(text))) for text in texts)
    except ValueError as error:
        raise click.UsageError(f"--proxy: {error}") from error


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
