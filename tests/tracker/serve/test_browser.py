"""The dashboard in a real browser: it draws, it works on a phone and in the dark, and it handles an alert."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cases import rarely

from groupbench.tracker.serve.answers import Answers
from groupbench.tracker.serve.app import create_app
from groupbench.tracker.serve.security import LOOPBACK, Names

pytestmark = pytest.mark.sqlite
WALK = (Path(__file__).parents[1] / "walk.js").read_text(encoding="utf-8")
TOKEN = "a-token-of-some-length"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def fill(cli: Any, stored: Any, make: Any, two_nights_are_certain: None) -> Callable[[], Path]:
    """Return a function that makes a database with a regression, its alert, canaries and hostile texts."""
    records = []
    for night in range(8):
        facts = {"commit_facts": {"branch": "main", "subject": "<img src=x onerror=alert(1)>"}}
        sizes = {"cell": {"dims": {"G": 4, "M": 4096}, "flops": 10**9, "min_bytes": 10**6}}
        records += [
            make(night, 1 + 0.001 * (night % 3) + (0.05 if night > 5 else 0), **facts, **sizes),
            make(night, 2.0, backend="torch", baseline=True, **facts, **sizes),
            make(night, backend="</script>", status="unavailable", message="<b>no</b>", **facts),
            make(night, 1.0, operator="canary", backend="matmul", cell={"flops": 10**12, "min_bytes": 10**8}),
            make(night, 1.0, operator="canary", backend="copy", cell={"min_bytes": 10**9}),
        ]

    def fill() -> Path:
        path: Path = stored(records)
        assert "1 opened" in cli("gate", "--update").stderr
        return path

    return fill


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Return a function that serves a copy of a database until the module ends, and returns the address."""
    import uvicorn

    with ExitStack() as stack:

        def start(database: Path) -> str:
            copy = shutil.copy(database, tmp_path_factory.mktemp("served"))
            app = create_app(
                str(copy), token=TOKEN, hosts=frozenset(LOOPBACK), answers=Answers(patience=60), names=Names("Ada")
            )
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", http="h11", timeout_graceful_shutdown=1))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(setattr, server, "should_exit", True)
            deadline = time.monotonic() + 30
            while not server.started and time.monotonic() < deadline:
                time.sleep(0.01)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


@pytest.fixture(scope="module")
def addresses() -> list[str]:
    """Return the address of the server of the module's tests, once there is one."""
    return []


@pytest.fixture
def address(addresses: list[str], start: Callable[[Path], str], fill: Callable[[], Path]) -> str:
    """Return the address of a server of that database, for tests that change nothing."""
    if not addresses:
        addresses.append(start(fill()))
    return addresses[0]


Browse = Callable[..., Any]


def test_every_figure_is_drawn_without_an_error(address: str, browse: Browse) -> None:
    """The fixture fails on any console message, so this test also covers the content security policy."""
    page = browse(address)
    page.get_by_role("heading", name="What changed").wait_for()
    for path, figures in (("/points/1.8", 1), ("/series/1", 4)):
        page.goto(address + path)
        assert page.locator("figure[data-figure]").count() == figures, path
        for place in page.locator("figure[data-figure]").all():
            place.scroll_into_view_if_needed()
            place.locator("svg.main-svg").first.wait_for()
            assert place.get_by_role("img").first.get_attribute("aria-label")
        # The plot's own rules are in our style sheet: without them its layers lie one below the other.
        layer = page.locator("svg.main-svg").first
        assert layer.evaluate("node => getComputedStyle(node).position") == "absolute"
        assert page.locator("head style").count() == 0
        page.get_by_text("Data as a table").first.click()
        page.locator("figure details table tbody tr").first.wait_for()
    # The series is among the backends of its problem.
    place = page.locator("figure[data-figure=backends]")
    assert place.get_by_role("img").first.get_attribute("aria-label").startswith("Latency of 2 backends by run.")
    place.get_by_text("Data as a table").click()
    place.locator("tbody tr").first.wait_for()
    assert place.locator("tbody tr").count() == 16
    assert {*place.locator("tbody td:first-child").all_inner_texts()} == {"triton", "torch"}


def test_an_alert_is_acknowledged_with_the_token(
    start: Callable[[Path], str], fill: Callable[[], Path], browse: Browse
) -> None:
    address = start(fill())
    page = browse(f"{address}/incidents")
    page.get_by_role("link", name="Log in", exact=True).click()
    page.get_by_label("token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/incidents")
    assert TOKEN not in page.content()
    page.get_by_label("incident 1").check()
    page.get_by_label("reason").fill("a known change")
    page.get_by_role("button", name="Acknowledge").click()
    page.locator(".badge", has_text="acknowledged").first.wait_for()
    assert page.url == f"{address}/incidents"
    page.get_by_role("link", name="incident 1").click()
    page.get_by_role("cell", name="a known change").wait_for()
    cookie = page.context.cookies()[0]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    page.get_by_role("button", name="log out").click()
    page.goto(f"{address}/incidents")
    assert page.get_by_role("button", name="Acknowledge").count() == 0


def test_a_view_is_shared_by_its_address(address: str, browse: Browse) -> None:
    page = browse(f"{address}/series")
    page.get_by_label("words").fill("torch")
    page.get_by_label("sizes").fill("M>=64")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**/series?**")
    assert page.url == f"{address}/series?q=torch&where=M%3E%3D64"  # empty fields are not in the address
    table = page.locator("main table tbody").inner_text()
    assert "torch" in table
    assert "triton" not in table
    assert browse(page.url).locator("main table tbody").inner_text() == table


PAGES = ("/", "/series/1", "/series", "/incidents")
MORE = ("/runs", "/runs/run-007?verdict=1", "/points/1.8", "/incidents/1", "/login")
SOME = [*PAGES, *rarely(*MORE)]
"""Each kind of page by default: a verdict, plots, a form, a list with actions."""


@pytest.mark.parametrize("path", SOME)
def test_nothing_is_wider_than_a_phone(address: str, browse: Browse, path: str) -> None:
    """No page scrolls sideways, and none of its tables does."""
    page = browse(address + path, **PHONE)
    tables = page.locator(".scroll:visible")
    assert tables.count() or path in ("/login", "/incidents")
    boxes = tables.evaluate_all("nodes => nodes.map(node => [node.ariaLabel, node.scrollWidth, node.clientWidth])")
    assert [name for name, wide, window in boxes if wide > window] == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # `innerWidth` grows with the page


def test_a_change_is_read_on_a_phone_without_scrolling(address: str, browse: Browse) -> None:
    page = browse(address, **PHONE)
    table = page.get_by_role("table", name="What changed")
    table.wait_for()
    row = table.locator("tbody tr").first
    for title in ("effect", "before", "now"):
        cell = row.locator(f"td[data-title='{title}']")
        place = cell.bounding_box()
        assert place["x"] >= 0, title
        assert place["x"] + place["width"] <= 390, title
        assert cell.inner_text(), title


@pytest.mark.parametrize("path", [*SOME, *rarely("/nowhere")])
def test_a_screen_reader_finds_its_way(address: str, tab: Callable[[], Any], path: str) -> None:
    page = tab()
    page.goto(address + path)
    page.wait_for_timeout(300)
    assert page.evaluate(WALK) == []


@pytest.mark.parametrize("scheme", ["dark", *rarely("light")])
def test_text_can_be_read_by_day_and_by_night(address: str, browse: Browse, scheme: str) -> None:
    page = browse(address, color_scheme=scheme)
    for selector in ("main p.verdict", "main .badge.bad", "main .badge.faint", "footer", "main td a", "header nav a"):
        ink, ground = page.locator(selector).first.evaluate(
            """node => {
                let under = node;
                const clear = () => getComputedStyle(under).backgroundColor === "rgba(0, 0, 0, 0)";
                while (clear() && under.parentElement) under = under.parentElement;
                return [getComputedStyle(node).color, getComputedStyle(under).backgroundColor];
            }"""
        )
        assert contrast(ink, ground) >= 4.5, selector
    page.get_by_role("button", name="theme").click()
    assert page.locator("html").get_attribute("data-theme") == {"light": "dark", "dark": "light"}[scheme]
    page.reload()
    assert page.locator("html").get_attribute("data-theme") is not None


def contrast(ink: str, ground: str) -> float:
    """Return the contrast ratio of two colours, as in the Web Content Accessibility Guidelines."""

    def light(colour: str) -> float:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(ink), light(ground)), reverse=True)
    return (high + 0.05) / (low + 0.05)
