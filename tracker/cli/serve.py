"""`groupbench serve`: the dashboard, live from the database."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import click

from groupbench.tracker.cli.output import say
from groupbench.tracker.errors import TrackerError
from groupbench.tracker.exits import ExitCode

TOKEN = "GROUPBENCH_TOKEN"


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
    help="0 takes any that is free.",
)
@click.option("--write", is_flag=True, help="Let who has the token acknowledge, accept and close alerts.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"Its first line is the token. Default: the environment's {TOKEN}.",
)
@click.option("--name", "names", multiple=True, metavar="NAME", help="What else it is called, such as by a proxy.")
@click.option("--https", "secure", is_flag=True, help="Reached through a proxy by HTTPS alone: cookies say so.")
@click.pass_obj
def serve(
    db: str, host: str, port: int, write: bool, token_file: Path | None, names: tuple[str, ...], secure: bool
) -> None:
    """Show the database in a browser: what the report shows, live, with search, comparisons and alerts.

    Reads only, and answers nobody but this machine, unless told otherwise. Ends with ctrl-c.
    """
    if token_file is not None and not write:
        raise click.UsageError("--token-file goes with --write: reading needs no token")
    try:
        import uvicorn

        from groupbench.tracker.serve.app import create_app
        from groupbench.tracker.serve.connection import MOST, Connection
        from groupbench.tracker.serve.security import LOOPBACK, is_loopback
    except ModuleNotFoundError as error:
        raise ServeError(f"serve needs {error.name}, which is not installed: pip install -e '.[serve]'") from error
    token = _token(token_file) if write else None
    with _listening(host, port) as listener:
        alone = is_loopback(listener.getsockname()[0])
        hosts = {*LOOPBACK, host.lower(), *(name.lower() for name in names)}
        if not alone:
            hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        app = create_app(db, token=token, hosts=frozenset(hosts), numbers=not alone, secure=secure)
        shown = f"[{host}]" if ":" in host else host
        say(f"serving {app.state.site.database.store.name} at http://{shown}:{listener.getsockname()[1]}"
            f", {'alerts can be dealt with' if write else 'read-only'}; ctrl-c ends")  # fmt: skip
        if not alone:
            say(f"everybody who reaches {host} can read it")
        config = uvicorn.Config(
            app, http=Connection, ws="none", log_level="warning", access_log=False, server_header=False,
            proxy_headers=False, timeout_keep_alive=20, limit_concurrency=MOST, timeout_graceful_shutdown=3,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, _end)
        uvicorn.Server(config).run(sockets=[listener])


def _end(number: int, frame: object) -> None:
    """After uvicorn has shut down it raises the signal again: the process ends as one that was asked to, and tidies up.

    By the signal itself it would leave its worker's semaphores for Python to complain about.
    """
    raise SystemExit(ExitCode.OK)


def _token(file: Path | None) -> str:
    """Raises UsageError where there is none: whoever writes must have shown one."""
    from groupbench.tracker.serve.security import MAKE_TOKEN, SHORTEST_TOKEN

    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
        if not token:
            raise click.UsageError(f"{file}: its first line is empty, and is to be the token; {MAKE_TOKEN}")
    else:
        token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise click.UsageError(f"--write needs a token, in {TOKEN} or --token-file; {MAKE_TOKEN}")
    if len(token) < SHORTEST_TOKEN:
        raise click.UsageError(f"the token has {len(token)} characters, {SHORTEST_TOKEN} are the least; {MAKE_TOKEN}")
    return token


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ServeError."""
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
        why = getattr(error, "strerror", None) or str(error)
        raise ServeError(f"cannot listen on {host}:{port}: {why}; give another --host or --port") from error
    return listener
