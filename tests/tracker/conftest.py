"""Builders of records, files and databases. Times are made up, and no test waits for a clock.

Tests that use `db` run on SQLite and, but for those marked `sqlite`, on PostgreSQL too, most of them only with
--exhaustive (pytest_itemcollected): a cluster of its own is started where Debian's postgresql is installed.
GROUPBENCH_TEST_DATABASES=sqlite leaves that out.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

from groupbench.tracker.cli import main
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.record import Record, encode
from groupbench.tracker.store import engine
from groupbench.tracker.store.engine import Store, open_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

Database = Path | str
"""A SQLite file, or the URL of a PostgreSQL database."""

H100: dict[str, Any] = {
    "device": "cuda",
    "gpu": "NVIDIA H100 80GB HBM3",
    "gpu_uuid": "GPU-1",
    "driver": "570.1",
    "cuda": "13.0",
    "power_limit_w": 700.0,
    "python": "3.11.9",
    "torch": "2.13.0",
    "triton": "3.7.1",
}


def build(night: int = 0, ms: float | None = 1.0, **fields: Any) -> Record:
    """Return the record of one cell. `night` sets run, commit and time; other names set the field of that name."""
    run: dict[str, Any] = {
        "id": fields.pop("run", f"run-{night:03d}"),
        "started": datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=night),
        "trigger": "nightly",
        "plan": fields.pop("plan", "nightly"),
        "commit": {"hash": fields.pop("commit", f"{night:03x}" + "c" * 37), **fields.pop("commit_facts", {})},
    }
    cell = {"operator": "grouped_gemm", "backend": "triton", "shape": "G=4,N=1024,K=1024", "dtype": "bf16"}
    cell |= {
        name: fields.pop(name) for name in list(fields) if name in ("operator", "backend", "shape", "dtype", "mode")
    }
    cell |= fields.pop("cell", {})
    environment = H100 | fields.pop("environment", {})
    status = fields.pop("status", "ok")
    body: dict[str, Any] = {"status": status}
    if status != "ok":
        body["message"] = fields.pop("message", f"it was {status}")
    if status in ("ok", "wrong"):
        if ms is not None:
            spread = np.random.default_rng(night).normal(1, 0.0005, (5, 7))
            timing = fields.pop("timing", "gpu")
            body["latency"] = {"timing": timing, "bursts_ms": (ms * spread).tolist()}
        body["accuracy"] = {"rms": fields.pop("rms", 2e-3), "repeatable": fields.pop("repeatable", True)}
    return msgspec.convert(
        {"schema": 1, "run": run, "environment": environment, "cell": cell, **body, **fields}, Record
    )


@pytest.fixture(autouse=True)
def late_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock so that all nights of the tests are in the past."""
    monkeypatch.setattr("groupbench.tracker.store.checked.clock", lambda: datetime(2030, 1, 1, tzinfo=UTC))


@pytest.fixture(scope="session", autouse=True)
def compiled_statements() -> Iterator[None]:
    """Share compiled statements among all engines: each command has a new one, which would compile them again."""
    shared = LRUCache[Any, Any](2000)
    make = Engine.__init__

    def make_with_shared(self: Engine, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        self._compiled_cache = shared

    with pytest.MonkeyPatch.context() as patch:  # the engine's dialect is part of a statement's key
        patch.setattr(DefaultDialect, "__eq__", lambda self, other: type(self) is type(other))
        patch.setattr(DefaultDialect, "__hash__", lambda self: hash(type(self)))
        patch.setattr(Engine, "__init__", make_with_shared)
        yield


MIGRATE = ("test_durability", "test_migrations", "test_store")
"""Modules that test how files are created and synced. In all others, a new one is a copy, and no write is synced."""


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return an empty SQLite database."""
    path = tmp_path_factory.mktemp("empty") / "empty.db"
    open_store(path, create=True).close()
    return path.read_bytes()


@pytest.fixture(autouse=True)
def copied_databases(empty_database: bytes, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy an empty database instead of making each one, and sync nothing to disk, except in tests of just that."""
    if request.module.__name__.rpartition(".")[2] in MIGRATE:
        return
    create = engine._create_tables

    def copy(of: Engine) -> None:
        if of.dialect.name == "sqlite" and of.url.database:
            Path(of.url.database).write_bytes(empty_database)
        elif of.dialect.name == "sqlite" or not _copied(of, create):
            create(of)

    connect = engine._on_connect

    def without_sync(connection: Any, other: Any) -> None:
        connect(connection, other)
        connection.execute("PRAGMA synchronous = OFF")

    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(engine, "_on_connect", without_sync)
    monkeypatch.setattr(engine, "_create_tables", copy)


def _copied(of: Engine, create: Callable[[Engine], None]) -> bool:
    """Replace an empty database of PostgreSQL by a copy of one with tables, and keep it for the next test.

    Return False if it has other connections.
    """
    import psycopg

    server, name = str(of.url.query["host"]), of.url.database
    of.dispose()
    try:
        _psql(server, f"ALTER DATABASE {name} RENAME TO {EMPTY}")
    except psycopg.errors.ObjectInUse:
        return False
    if not _psql(server, f"SELECT FROM pg_database WHERE datname = '{FILLED}'"):
        _psql(server, f"CREATE DATABASE {FILLED} TEMPLATE template0 STRATEGY file_copy")
        whole = create_engine(of.url.set(database=FILLED))
        create(whole)
        whole.dispose()
    _psql(server, f"CREATE DATABASE {name} TEMPLATE {FILLED} STRATEGY file_copy")
    return True


EMPTY, FILLED = "empty", "filled"
"""Databases of the tests' PostgreSQL: one that the next test takes, and one that is copied."""


def backfilled(**fields: Any) -> list[Record]:
    """Return the results of a night at commit c, and of its parents b and a, measured later by a backfill.

    The backend `triton` takes 1, 2 and 3 ms at c, b and a, and the baseline `torch` twice as long.
    """
    hashes = [name * 40 for name in "cbaf"]
    records = []
    for place, (commit, parent) in enumerate(pairwise(hashes)):
        for backend, ms in (("triton", 1.0 + place), ("torch", 2.0 + 2 * place)):
            facts = {"commit": commit, "commit_facts": {"parents": [parent]}, "baseline": backend == "torch"}
            record = build(place + 1, ms, backend=backend, **facts, **fields)
            run = msgspec.structs.replace(record.run, trigger="backfill" if place else "nightly")
            records.append(msgspec.structs.replace(record, run=run))
    return records


@pytest.fixture
def make() -> Callable[..., Record]:
    return build


ON_FILES = (
    *("test_cli", "test_docs_query", "test_durability", "test_import", "test_sql", "test_store"),
    *("serve.test_answers", "serve.test_command", "serve.test_writing", "test_outputs"),
)
"""Modules that are about files, SQLite's own SQL or the network, except for tests marked `both`."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sqlite: of SQLite files, not of databases as such")
    config.addinivalue_line("markers", "both: runs on PostgreSQL too, even without --exhaustive")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        backends = os.environ.get("GROUPBENCH_TEST_DATABASES", "sqlite,postgresql").split(",")
        module = metafunc.module.__name__.rpartition(".")[2]
        of, both = (metafunc.definition.get_closest_marker(name) for name in ("sqlite", "both"))
        if of or (metafunc.module.__name__.endswith(ON_FILES) and not both):
            backends = ["sqlite"]
        elif module == "test_postgresql":
            backends = [name for name in backends if name == "postgresql"]
        metafunc.parametrize("backend", backends)


_on_postgresql: set[object] = set()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave most tests on PostgreSQL to --exhaustive, where all run on both databases.

    By default, the first test of a module and those marked `both` run there. Together, they reach every line of the
    product that sends a statement.
    """
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec") or item.path.stem == "test_postgresql":
        return
    if item.callspec.params.get("backend") == "postgresql":
        if item.module in _on_postgresql and not item.get_closest_marker("both"):
            item.add_marker("exhaustive")
        _on_postgresql.add(item.module)


@pytest.fixture
def backend() -> str:
    """Which database the test runs on: see pytest_generate_tests."""
    raise NotImplementedError


@pytest.fixture
def db(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Yield the place of a database that does not exist yet."""
    if backend == "sqlite":
        yield tmp_path / "t.db"
        return
    server: str = request.getfixturevalue("postgresql")
    name = f"t{next(_numbers)}"
    if not _psql(server, f"SELECT FROM pg_database WHERE datname = '{EMPTY}'"):
        _psql(server, f"CREATE DATABASE {EMPTY} TEMPLATE template0 STRATEGY file_copy")
    _psql(server, f"ALTER DATABASE {EMPTY} RENAME TO {name}")
    yield f"postgresql+psycopg://groupbench@/{name}?host={server}"
    _psql(server, f"DROP DATABASE {name} WITH (FORCE)")


_numbers = iter(range(1_000_000))


CLUSTER = "groupbench-pg-"
"""Start of the name of a cluster's folder."""


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """A PostgreSQL cluster without durability; gives the folder of its socket."""
    missing = _lacks_postgresql()
    if missing:
        warnings.warn(f"POSTGRESQL IS NOT TESTED: {missing}", stacklevel=1)
        pytest.skip(f"PostgreSQL is not tested: {missing}")
    programs = _postgresql_programs()
    assert programs is not None
    memory = Path("/dev/shm")  # a copy of a database is 300 files, which take a disk's file system 0.1 s
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    folder = Path(tempfile.mkdtemp(prefix=CLUSTER, dir=memory if roomy else None))
    user = "postgres" if os.geteuid() == 0 else None  # initdb refuses root
    for other in folder.parent.glob(f"{CLUSTER}*"):
        owner = other / "owner"
        if owner.exists() and not Path("/proc", owner.read_text()).exists():  # its test process was killed
            stop = [str(programs / "pg_ctl"), "-D", str(other / "data"), "-m", "immediate", "stop"]
            subprocess.run(stop, user=user, cwd=other, capture_output=True)
            shutil.rmtree(other, ignore_errors=True)
    (folder / "owner").write_text(str(os.getpid()))
    if user:
        shutil.chown(folder, user)

    def run(program: str, *args: str) -> None:
        command = [str(programs / program), *args]
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    data = str(folder / "data")
    run("initdb", "-D", data, "-U", "groupbench", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
    quick = (
        "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c max_connections=30 -c timezone=Asia/Tokyo"
        " -c autovacuum=off -c wal_level=minimal -c max_wal_senders=0 -c shared_buffers=16MB"
    )
    run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", f"-k {folder} -h '' {quick}", "start")
    try:
        yield str(folder)
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def _lacks_postgresql() -> str | None:
    if _postgresql_programs() is None:
        return "it is not installed (apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed (pip install 'groupbench[postgres]')"
    return None


def _postgresql_programs() -> Path | None:
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return programs[-1].parent if programs else Path(on_path).parent if on_path else None


@cache
def _administrator(server: str) -> Any:
    """Return the session's connection that makes databases: a new one for each statement takes longer than many do."""
    import psycopg

    return psycopg.connect(host=server, user="groupbench", dbname="postgres", autocommit=True)


def _psql(server: str, statement: str) -> int:
    """Run a statement, and return the number of its rows."""
    return _administrator(server).execute(statement.encode()).rowcount


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write records, or raw bytes, to a file."""

    def to_file(records: Iterable[Record | bytes], name: str = "records.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(r if isinstance(r, bytes) else encode(r) for r in records))
        return path

    return to_file


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Limit the size of files within the context, as on a disk that fills up: a write stores the part that fits."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


@pytest.fixture
def cli(db: Database, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command on the test's database; an exception that reaches the top fails the test."""
    for name in ("GROUPBENCH_DB", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Ada")
    monkeypatch.setattr("groupbench.tracker.tools.progress.INTERVAL_S", 600.0)  # no lines on a slow machine

    def run(*args: str | os.PathLike[str], stdin: bytes | None = None, db: Database = db) -> Result:
        result = CliRunner().invoke(main, ["--db", str(db), *map(str, args)], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code != ExitCode.BUG, result.stderr
        if result.exit_code == 2:
            assert result.stderr.startswith("groupbench: ")
            assert result.stderr.count("\n") == 1, result.stderr
        return result

    return run


@pytest.fixture(scope="module")
def filled_before() -> dict[bytes, bytes]:
    """Return the SQLite databases that `fill` has made for this module, by key."""
    return {}


@pytest.fixture
def fill(db: Database, filled_before: dict[bytes, bytes]) -> Callable[[bytes, Callable[[], object]], None]:
    """Fill the test's database by a function, or with a copy of the one that this module filled under the same key."""

    def fill_or_copy(key: bytes, make: Callable[[], object]) -> None:
        new = isinstance(db, Path) and not db.exists()
        if new and key in filled_before:
            Path(db).write_bytes(filled_before[key])
            return
        make()
        if new and not Path(f"{db}-wal").exists():
            filled_before[key] = Path(db).read_bytes()

    return fill_or_copy


@pytest.fixture
def stored(
    cli: Callable[..., Result],
    write: Callable[..., Path],
    db: Database,
    fill: Callable[[bytes, Callable[[], object]], None],
    request: pytest.FixtureRequest,
) -> Callable[..., Database]:
    """Store records by the command, and give the database's path. The second database of some records is a copy."""
    copies = request.module.__name__.rpartition(".")[2] not in MIGRATE

    def store(records: Iterable[Record]) -> Database:
        file = write(records)

        def ingest() -> None:
            result = cli("ingest", file)
            assert result.exit_code == 0, result.stderr

        if copies:
            fill(file.read_bytes(), ingest)
        else:
            ingest()
        return db

    return store


@pytest.fixture
def two_nights_are_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two nights make a change certain, instead of three, for tests of the code that uses verdicts."""
    from groupbench.tracker.stats import walk

    monkeypatch.setattr(walk, "NIGHTS", 2)


@pytest.fixture
def opened(db: Database) -> Iterable[Store]:
    with open_store(db, create=True) as store:
        yield store


CHROMIUM = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
UNUSED = ("WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "SpareRendererForSitePerProcess")
"""Features of Chromium for which it starts processes, half a second each: menus of the address, the next tab's."""
CHROMIUM_ARGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", f"--disable-features={','.join(UNUSED)}"),
    # A test's page is gone before optimized code would pay, and shares its process with the next test's.
    *("--process-per-site", "--js-flags=--max-lazy --no-opt --single-threaded"),
)
WINDOW: ViewportSize = {"width": 1280, "height": 720}
"""Size of a tab whose test asks for none."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Yield a real browser. Without one, the test is skipped, or fails if GROUPBENCH_BROWSER=required."""
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    missing = None
    if importlib.util.find_spec("playwright") is None:
        missing = "playwright is not installed (pip install 'groupbench[test]')"
    elif program is None:
        missing = "chromium is not installed (apt-get install chromium)"
    if missing is not None:
        if os.environ.get("GROUPBENCH_BROWSER") == "required":
            pytest.fail(f"a browser is required, and {missing}")
        pytest.skip(f"PAGES ARE NOT TESTED in a browser: {missing}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM_ARGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tab(chromium: Browser) -> Callable[..., Page]:
    """Return a function that gives the session's tab in a context with some options.

    A page that was shown there before loads in a fifth of a new tab's time.
    """
    tabs: dict[tuple[tuple[str, object], ...], Page] = {}

    def of(**options: Any) -> Page:
        kind = tuple(sorted(options.items()))
        if kind not in tabs:
            tabs[kind] = chromium.new_context(**options).new_page()
        return tabs[kind]

    return of


@pytest.fixture
def browse(chromium: Browser, tab: Callable[..., Page]) -> Iterator[Callable[..., Page]]:
    """Open a URL or a file in a tab without a state; keywords are those of playwright's `new_context`.

    At the end, no tab may have logged an error or requested anything from outside this machine.
    """
    errors: list[str] = []
    used: list[Page] = []
    further: list[Page] = []
    heard: dict[str, Callable[[Any], None]] = {
        "console": lambda line: errors.append(line.text) if line.type in ("error", "warning") else None,
        "pageerror": lambda error: errors.append(str(error)),
        "request": lambda request: check(request.url),
    }

    def check(url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "http://localhost:")):
            errors.append(f"asked for {url}")

    def browse(where: str | Path, viewport: ViewportSize = WINDOW, color_scheme: Any = "light", **options: Any) -> Page:
        page = tab(**options)
        if page in used:
            page = chromium.new_context(**options).new_page()
            further.append(page)
        used.append(page)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme, media="null")
        page.set_default_timeout(120_000)  # of loads and waits, which end earlier except on a busy machine
        for event, handle in heard.items():
            page.on(event, handle)  # type: ignore[call-overload]
        page.goto(where.as_uri() if isinstance(where, Path) else where)
        return page

    yield browse
    for page in used:
        if page in further:
            page.context.close()
            continue
        page.evaluate("localStorage.clear()")
        page.context.clear_cookies()
        for event, handle in heard.items():
            page.remove_listener(event, handle)
        page.goto("about:blank")
    assert not errors
