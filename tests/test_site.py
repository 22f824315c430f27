"""Check the site: it builds without a warning, has every page, and loads nothing from the network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts_of_ci import script

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "ci" / "site" / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("NOT TESTED: the site. mkdocs-material is not installed (pip install -e '.[docs]')")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", CONFIG, "--site-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.exhaustive  # the site's own job (ci/site.sh) builds it as strictly
def test_the_site_has_every_page_and_needs_no_network(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    index, other = ((site / name).read_text() for name in ("index.html", "guide/ci.html"))
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)"', index)
    assert "grouped_gemm" in (site / "search" / "search_index.js").read_text()
    sidebar = '<div class="md-sidebar md-sidebar--primary" data-md-component="sidebar" data-md-type="navigation" hidden'
    assert sidebar in index and sidebar not in other
    page = (site / "explanation" / "toolchains.html").read_text()
    assert 'href="../source/kernels/device.py.html"' in page
    assert "shared memory" in (site / "source" / "kernels" / "device.py.html").read_text()
    assert "FILE|URL" in (site / "reference" / "cli" / "index.html").read_text()


@pytest.mark.parametrize(
    ("place", "link", "becomes"),
    [
        ("index.md", "docs/guide/ci.md#outputs", "guide/ci.md#outputs"),
        ("guide/ci.md", "../../README.md", "../index.md"),
        ("guide/ci.md", "incidents.md", "incidents.md"),
        ("guide/ci.md", "#post", "#post"),
        ("notes/kernels/moe.md", "../../explanation/kernels/moe.md", "../../explanation/kernels/moe.md"),
        ("guide/ci.md", "../../ci/Dockerfile", "../source/ci/Dockerfile.md"),
        ("guide/report.md", "../images/report.png", "../images/report.png"),
        ("guide/ci.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_are_turned_into_those_of_the_site(place: str, link: str, becomes: str) -> None:
    pages = script("site/pages")
    page = type("Page", (), {"file": type("File", (), {"src_uri": place})})
    assert pages.on_page_markdown(f"[`a` b]({link})", page=page) == f"[`a` b]({becomes})"
    assert pages.on_page_markdown(f"[`a`]({link})", page=page) == f"[`a`]({becomes})"
    assert pages.on_page_markdown(f"`[a]({link})`", page=page) == f"`[a]({link})`"
