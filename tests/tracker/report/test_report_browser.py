"""The report as a reader has it: in a real browser, from a file, without a network. `browse` fails on any error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cases import rarely
from click.testing import CliRunner

from groupbench.tracker.cli import main
from groupbench.tracker.facts.record import Record, encode

from ..conftest import build as make

if TYPE_CHECKING:
    from playwright.sync_api import Page

Browse = Callable[..., "Page"]

WALK = (Path(__file__).parents[1] / "walk.js").read_text(encoding="utf-8")
HOSTILE = """</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'"&amp;\u2028"""
WORK = {"flops": 10**11, "min_bytes": 10**9, "dims": {"G": 4}}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 12 nights: two operators, canaries, a failure, a wrong result, names that want to be markup."""
    records = []
    for night in range(12):
        facts = {"subject": HOSTILE if night == 11 else f"Commit {night}", "author": "Ada <ada@example.org>"}
        fields = {"commit_facts": facts, "environment": {"driver": "1" if night < 4 else "2"}}
        for size in range(1, 5):
            cell = {"shape": f"G={size * size},N=1024", "cell": WORK}
            records.append(make(night, ms=float(size), backend="torch", baseline=True, **cell, **fields))
            records.append(make(night, ms=0.6 * size, backend="triton", **cell, **fields))
            records.append(make(night, ms=1.5 * size, backend="helion", **cell, **fields))
        copy = {"flops": 0, "min_bytes": 2 * 10**9}
        product = {"flops": 10**12, "min_bytes": 10**8}
        records.append(make(night, operator="canary", backend="torch", shape="copy", cell=copy, **fields))
        records.append(make(night, operator="canary", backend="torch", shape="mm", ms=2.0, cell=product, **fields))
        if night == 11:
            failed = {"status": "oom", "message": HOSTILE}
            records.append(make(night, operator=HOSTILE, backend=HOSTILE, shape=HOSTILE, **failed, **fields))
            records.append(make(night, operator=HOSTILE, backend="good", shape=HOSTILE, **fields))
            wrong = {"status": "wrong", "message": "0.5 outside"}
            records.append(make(night, backend="wrong", shape="G=1,N=1024", **wrong, **fields))
    return written(tmp_path_factory.mktemp("report"), records)


def written(folder: Path, records: list[Record]) -> Path:
    """Write the report of records."""
    (folder / "records.jsonl").write_bytes(b"".join(map(encode, records)))
    for command in (["ingest", "records.jsonl"], ["report", "-o", "report.html"]):
        where = [str(folder / part) if "." in part else part for part in command]
        done = CliRunner().invoke(main, ["--db", str(folder / "t.db"), *where])
        assert done.exit_code == 0, done.output
    return folder / "report.html"


def at(report: Path, page: str) -> str:
    return f"{report.as_uri()}#{page}"


def column(page: Page, table: str, place: int) -> list[str]:
    return page.locator(f"{table} tbody tr:visible td:nth-child({place})").all_inner_texts()


def opened(page: Page, section: str) -> None:
    """Wait until a page of the page is the one that is shown."""
    page.locator(f"#{section}.current").wait_for()
    assert page.locator("main > section:visible").count() == 1


def test_the_verdict_comes_first_and_pages_follow_the_address(browse: Browse, report: Path) -> None:
    page = browse(report)
    assert "regression" in page.inner_text(".verdict").lower()
    opened(page, "overview")
    assert page.locator("nav a[aria-current=page]").inner_text() == "Overview"
    page.get_by_role("link", name="grouped_gemm", exact=True).first.click()
    opened(page, "op-grouped_gemm")
    assert page.locator("nav a[aria-current=page]").inner_text() == "grouped_gemm"
    assert page.title().startswith("grouped_gemm · ")
    page.go_back()
    opened(page, "overview")
    page.goto(at(report, "environment"))
    opened(page, "environment")
    page.goto(at(report, "nowhere"))
    opened(page, "overview")


def test_a_change_leads_to_its_series(browse: Browse, report: Path) -> None:
    page = browse(report)
    page.locator("#changed a", has_text="wrong").click()
    article = page.locator("article:focus")
    assert article.locator("h4").inner_text().startswith("wrong wrong fwd · bf16 · G=1,N=1024")
    assert article.evaluate("node => { const y = node.getBoundingClientRect().top; return 0 <= y && y < innerHeight; }")
    page.goto(at(report, "op-grouped_gemm/s1"))
    page.reload()
    page.locator("#s1 .latency .point").first.wait_for()  # opened by its address
    assert page.locator("article:focus").get_attribute("id") == "s1"


def test_plots_are_drawn_when_they_are_looked_at(browse: Browse, report: Path) -> None:
    page = browse(report)
    opened(page, "overview")
    assert page.locator(".js-plotly-plot").count() == 0
    page.goto(at(report, "op-grouped_gemm"))
    page.wait_for_selector("[data-figure=map-0] .js-plotly-plot .heatmaplayer image, .heatmaplayer .hm")
    last = page.locator("#op-grouped_gemm article").last
    assert last.locator(".js-plotly-plot").count() == 0
    last.locator("summary").first.click()
    last.locator(".latency .js-plotly-plot .point").first.wait_for()
    last.locator(".accuracy .js-plotly-plot .point").first.wait_for()
    last.locator(".bursts .js-plotly-plot .box").first.wait_for()


def test_the_reader_chooses_the_baseline(browse: Browse, report: Path) -> None:
    page = browse(at(report, "op-grouped_gemm"))
    image = page.locator("[data-figure=map-0] [role=img]")
    assert image.get_attribute("aria-label").startswith("Speed-up over torch: 4 problems by 4 backends.")
    page.locator("[data-figure=map-0] summary").click()
    cells = page.locator("[data-figure=map-0] tbody tr").first.locator("td")
    cells.first.wait_for()
    assert cells.all_inner_texts() == ["G=1,N=1024", "1.00×", "▼ 0.67×", "▲ 1.67×", "wrong"]
    page.locator("section.current").get_by_label("Baseline").select_option("triton")
    assert image.get_attribute("aria-label").startswith("Speed-up over triton")
    assert cells.all_inner_texts() == ["G=1,N=1024", "▼ 0.60×", "▼ 0.40×", "1.00×", "wrong"]
    assert page.locator("[data-figure=map-0] .heatmap-label, [data-figure=map-0] text", has_text="▼ 0.60×").count()


def test_histories_are_folded_until_somebody_looks(browse: Browse, report: Path) -> None:
    page = browse(at(report, "op-grouped_gemm"))
    opened(page, "op-grouped_gemm")
    cards = page.locator("#op-grouped_gemm article")
    assert (cards.count(), page.locator("#op-grouped_gemm .plots").count()) == (13, 0)
    assert sum(card.bounding_box()["height"] for card in cards.all()) < 13 * 60
    page.get_by_label("Filter the histories of grouped_gemm").fill("triton")
    page.get_by_role("button", name="Open all listed series").click()
    assert page.locator("#op-grouped_gemm .plots").count() == 4
    page.goto(at(report, "op-canary"))
    opened(page, "op-canary")
    assert page.locator("#op-canary .plots").count() == 2  # few stay open
    assert page.locator("#op-canary .unfold").count() == 0


def test_every_plot_has_its_data_as_text(browse: Browse, report: Path) -> None:
    page = browse(at(report, "op-grouped_gemm"))
    roof = page.locator("[data-figure=roofline]")
    roof.locator("summary").click()
    roof.locator("tbody tr").first.wait_for()
    assert roof.locator("th").all_inner_texts()[:3] == ["backend", "problem", "FLOP/byte"]
    assert roof.locator("tbody tr").count() == 12
    card = page.locator("#op-grouped_gemm article").first
    card.locator("summary").first.click()
    for name, rows in (("latency", 13), ("accuracy", 12), ("bursts", 10)):
        part = card.locator(f".{name}")
        part.locator("summary").click()
        part.locator("tbody tr").first.wait_for()
        assert part.locator("tbody tr").count() == rows, name
        assert len(part.locator("[role=img]").get_attribute("aria-label")) > 50
    latencies = card.locator(".latency tbody").inner_text()
    assert "environment: driver 1 → 2" in latencies
    assert "004ccccccc · 2026-01-05 03:00 · Commit 4" in latencies


def test_tables_sort_by_number_or_text_and_say_so(browse: Browse, report: Path) -> None:
    page = browse(at(report, "op-grouped_gemm"))
    table = "#results-op-grouped_gemm"
    head = page.locator(f"{table} th", has_text="latency ms")
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    values = [float(text) for text in column(page, table, 7)]
    assert values == sorted(values)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert [float(text) for text in column(page, table, 7)] == values[::-1]
    speed = page.locator(f"{table} th", has_text="speedup")
    for _ in range(2):  # rows without a value come last in both orders
        speed.locator("button").click()
        assert column(page, table, 9)[-1] == ""
    page.locator(f"{table} th", has_text="shape").locator("button").click()
    assert head.get_attribute("aria-sort") == "none"
    shapes = column(page, table, 1)
    assert list(dict.fromkeys(shapes)) == ["G=1,N=1024", "G=4,N=1024", "G=9,N=1024", "G=16,N=1024"]


def test_filters_keep_what_holds_every_word(browse: Browse, report: Path) -> None:
    page = browse(at(report, "op-grouped_gemm"))
    table = page.get_by_label("Filter Results of grouped_gemm")
    table.fill("TRITON g=4")
    assert column(page, "#results-op-grouped_gemm", 4) == ["triton"]
    assert page.locator("p.filter", has=table).locator("output").inner_text() == "1 of 13"
    table.fill("nothing like it")
    assert column(page, "#results-op-grouped_gemm", 4) == []
    table.fill("")
    assert len(column(page, "#results-op-grouped_gemm", 4)) == 13
    page.get_by_label("Filter the histories of grouped_gemm").fill("helion G=16")
    assert page.locator("#op-grouped_gemm article:visible").count() == 1


def test_all_of_it_is_reached_by_keyboard(browse: Browse, report: Path) -> None:
    page = browse(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"theme", "Overview", "grouped_gemm", "Environment"} <= reached
    link = page.locator("nav a", has_text="grouped_gemm")
    link.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    page.locator("h2:focus").wait_for()  # wait_for_function evaluates a string, which the page forbids
    assert page.evaluate("document.activeElement.textContent") == "grouped_gemm"


def ground(page: Page) -> int:
    """Brightness of the page, 0 to 765."""
    rgb = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    return sum(rgb[:3])


def ink(page: Page) -> str:
    return page.locator("[data-figure=map-0] .xaxislayer-above text").first.evaluate("node => node.style.fill")


@pytest.mark.parametrize("scheme", ["dark", *rarely("light")])
def test_light_and_dark_are_the_system_s_until_the_button_says(browse: Browse, report: Path, scheme: str) -> None:
    page = browse(at(report, "op-grouped_gemm"), color_scheme=scheme)
    page.locator("[data-figure=map-0] .xaxislayer-above text").first.wait_for()
    assert page.evaluate("scrollY") == 0  # the address of a page shows the verdict too
    assert (ground(page) < 200) == (scheme == "dark")
    before = ink(page)
    page.locator("#theme").click()
    assert (ground(page) < 200) == (scheme == "light")
    assert ink(page) != before
    page.reload()
    assert (ground(page) < 200) == (scheme == "light")


def test_a_phone_needs_no_sideways_scrolling(browse: Browse, report: Path) -> None:
    phone = {"viewport": {"width": 375, "height": 812}, "has_touch": True, "is_mobile": True}
    page = browse(report, **phone)
    for place in ("overview", "unmeasured", "environment", "op-grouped_gemm"):
        page.goto(at(report, place))
        opened(page, place)
        assert page.evaluate("document.documentElement.scrollWidth") == 375, place
        boxes = page.locator(":is(#changed, #operators, #results-op-grouped_gemm):visible").locator("xpath=..")
        assert max(boxes.evaluate_all("all => all.map(n => n.scrollWidth - n.clientWidth)"), default=0) <= 0  # cards
    page.locator("[data-figure=map-0] .js-plotly-plot .xaxislayer-above text").first.wait_for()
    card = page.locator("#op-grouped_gemm article").first
    card.locator("summary").first.click()
    card.locator(".latency .point").first.wait_for()
    assert page.locator("[data-figure=map-0] .annotation", has_text="G=1,N=1024").count() == 1  # above its cells
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.evaluate("visualViewport.scale") == 1


@pytest.mark.exhaustive
def test_plots_follow_the_width_of_the_page(browse: Browse, report: Path) -> None:
    page = browse(report, viewport={"width": 1300, "height": 900})
    page.goto(at(report, "op-grouped_gemm"))
    card = page.locator("#op-grouped_gemm article").first
    card.locator("summary").first.click()
    plot = card.locator(".latency .js-plotly-plot")
    plot.locator(".point").first.wait_for()
    fits = """() => { const plot = document.querySelector("#op-grouped_gemm article .latency .js-plotly-plot");
        return Math.abs(plot.querySelector(".main-svg").getBoundingClientRect().width - plot.clientWidth) < 2; }"""
    page.set_viewport_size({"width": 800, "height": 900})
    page.wait_for_function(fits)
    page.goto(at(report, "overview"))
    page.set_viewport_size({"width": 1200, "height": 900})  # while the plot is hidden
    page.goto(at(report, "op-grouped_gemm"))
    page.wait_for_function(fits)
    page.evaluate("document.body.style.maxWidth = '500px'")  # without the window
    page.wait_for_function(fits)


def test_paper_has_every_map_and_plot_whole(browse: Browse, report: Path) -> None:
    page = browse(report, viewport={"width": 718, "height": 1000})
    page.evaluate("() => { window.dispatchEvent(new Event('beforeprint')); }")
    page.emulate_media(media="print")
    for name in ("map-0", "roofline"):
        plot = page.locator(f"#op-grouped_gemm [data-figure={name}] .js-plotly-plot")
        plot.wait_for()
        place = plot.bounding_box()
        assert 0 < place["width"] <= 718 - place["x"], name
        assert place["height"] < 1000, name
    assert page.locator("main > section:visible").count() == 6
    page.evaluate("() => { window.dispatchEvent(new Event('afterprint')); }")
    page.emulate_media(media="screen")
    assert page.locator("main > section:visible").count() == 1


@pytest.mark.parametrize(
    "places",
    [
        ("overview", "op-grouped_gemm"),
        pytest.param(("op-canary", "unmeasured", "environment"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_a_screen_reader_finds_its_way(browse: Browse, report: Path, places: tuple[str, ...]) -> None:
    page = browse(report)
    for place in places:
        page.goto(at(report, place))
        opened(page, place)
        page.wait_for_timeout(300)
        assert page.evaluate(WALK) == [], place


@pytest.fixture
def many(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same night where a page shows three series in full."""
    from groupbench.tracker.report import selection

    monkeypatch.setattr(selection, "FULL", 3)
    monkeypatch.setattr(selection.choose, "__defaults__", (3,))
    out = tmp_path / "many.html"
    done = CliRunner().invoke(main, ["--db", str(report.parent / "t.db"), "report", "-o", str(out)])
    assert done.exit_code == 0, done.output
    return out


def test_every_series_of_a_large_night_is_found(browse: Browse, many: Path) -> None:
    page = browse(many)
    assert "3 of 17 series in full" in page.locator("#overview").inner_text()
    page.locator("nav a", has_text="All series").click()
    opened(page, "series")
    rows = page.locator("#index tbody tr")
    assert rows.count() == 17
    assert page.evaluate(WALK) == []
    page.get_by_label("Find series by").fill("HELION g=16")
    assert rows.count() == 1
    assert "helion" in rows.inner_text()
    assert page.locator("#series output").inner_text() == "1 of 17"
    assert rows.locator("a").count() == 0
    page.get_by_label("Find series by").fill("")
    link = rows.locator("a").first
    address = link.get_attribute("href")
    link.click()
    assert page.locator("article:focus").get_attribute("id") == address.partition("/")[2]


def test_hostile_text_stays_text(browse: Browse, report: Path) -> None:
    page = browse(report)
    for link in page.locator("nav a").all():
        link.click()
        opened(page, link.get_attribute("href").lstrip("#"))
    page.locator("nav a", has_text="hacked").click()
    page.locator("section.current h2", has_text="hacked").wait_for()
    card = page.locator("section.current article", has_text="good")
    card.scroll_into_view_if_needed()
    point = card.locator(".latency .point").first
    point.wait_for()
    card.locator(".latency summary").click()
    card.locator(".latency tbody tr").first.wait_for()
    point.hover(force=True)
    card.locator(".hoverlayer .hovertext").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, .hoverlayer img").count() == 0
    assert "onerror" in card.locator(".latency tbody").inner_text()
    failed = page.locator("section.current article", has_text="No result")
    assert '<img src=x onerror="window.hacked = 2">' in failed.inner_text()
    page.goto(at(report, "unmeasured"))
    assert HOSTILE.split("\u2028")[0] in page.locator("section.current").inner_text()


def test_without_scripts_all_is_there_to_read(browse: Browse, report: Path) -> None:
    page = browse(report, java_script_enabled=False)
    assert page.locator("main > section:visible").count() == 6
    assert page.locator("#results-op-grouped_gemm tbody tr:visible").count() == 13


def test_toolchains_in_turns_have_lines_and_a_legend(browse: Browse, tmp_path: Path) -> None:
    records = [make(n, ms=0.9 if n % 2 else 1.0, environment={"triton": f"3.{7 + n % 2}.0"}) for n in range(20)]
    page = browse(at(written(tmp_path, records), "op-grouped_gemm/s1"))
    page.locator("#s1 .latency .point").first.wait_for()
    assert page.locator("#s1 .latency .legendtext").all_text_contents() == ["triton 3.7.0", "triton 3.8.0"]
    page.locator("#s1 .latency summary").first.click()
    rows = page.locator("#s1 .latency tr")
    rows.nth(20).wait_for()
    assert rows.nth(0).inner_text().split("\t") == ["run", "toolchain", "ms", "what happened"]
    assert rows.nth(1).inner_text().split("\t")[1] == "triton 3.7.0"
    assert rows.nth(2).inner_text().split("\t")[1] == "triton 3.8.0"
