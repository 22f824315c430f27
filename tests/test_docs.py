"""The pages link to what there is, and README.md to all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: small letters, digits and hyphens."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_readme_links_every_page() -> None:
    text = PAGES[0].read_text() + "".join(page.read_text() for page in PAGES[1:])
    for page in PAGES[1:]:
        assert f"]({page.name})" in text or f"](docs/{page.name})" in text, page.name
    for name in ("judgement", "kernels", "query", "tracker"):
        assert f"](docs/{name}.md)" in PAGES[0].read_text(), name
