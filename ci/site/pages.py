"""Add to the site the pages of the repository's root, and each source file that a page links to.

A hook of MkDocs. The Markdown files keep the links that GitHub follows; here each is turned into one between pages of
the site. A linked source file becomes a page with its text, so that the site needs no network and no repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".md": "markdown"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root and the linked source files."""
    from mkdocs.structure.files import File

    for name in ("iframe-worker.js", "site.css"):
        content = Path(__file__).with_name(name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=content))
    pages = {source: (ROOT / source).read_text(encoding="utf-8") for source in ROOT_PAGES}
    for source, text in pages.items():
        files.append(File.generated(config, ROOT_PAGES[source], content=text))
    below = ROOT / "docs"
    pages |= {f"docs/{path.relative_to(below)}": path.read_text(encoding="utf-8") for path in below.rglob("*.md")}
    linked = {_target(source, link) for source, text in pages.items() for link in _links(text)}
    for path in sorted(linked):
        if _page_of(path) is None:
            files.append(File.generated(config, _source_page(path), content=_listing(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links of the repository into those of the site."""
    place = page.file.src_uri
    if place.startswith("source/"):
        return markdown
    source = next((name for name, uri in ROOT_PAGES.items() if uri == place), f"docs/{place}")

    def turned(match: re.Match[str]) -> str:
        link = match[2]
        if "://" in link or link.startswith("#"):
            return match[0]
        path, _, anchor = link.partition("#")
        target = _target(source, path)
        new = posixpath.relpath(_page_of(target) or _source_page(target), posixpath.dirname(place) or ".")
        return f"{match[1]}{new}{'#' if anchor else ''}{anchor}{match[3]}"

    parts = CODE.split(_code_links(markdown))
    return "".join(_plain(part) if CODE.fullmatch(part) else LINK.sub(turned, part) for part in parts).replace(
        "\0", "`"
    )


def on_page_content(html: str, *, page: Any, **_: Any) -> None:
    """Hide the menu of the first page, which would only lead to itself."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]


def _plain(code: str) -> str:
    """Return code without the backslash that GitHub needs before a pipe in a table. MkDocs would show it."""
    return code if "\n" in code else code.replace(r"\|", "|")


def _code_links(markdown: str) -> str:
    """Hide the backquotes of a link's text, which is code but not its address."""
    return re.sub(r"\[`([^`\]\n]*)`\](?=\()", "[\0\\1\0]", markdown)


def _links(text: str) -> list[str]:
    plain = CODE.sub("", _code_links(text))
    return [link[1].partition("#")[0] for link in LINK.findall(plain) if "://" not in link[1] and link[1][0] != "#"]


def _target(source: str, link: str) -> str:
    """Return the path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _page_of(path: str) -> str | None:
    """Return the site's page or picture for a path of the repository, or None."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _listing(path: str) -> str:
    """Return the page of a source file, or the list of a folder's files."""
    file = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    if file.is_dir():
        return head + "".join(f"- {child.name}\n" for child in sorted(file.iterdir()) if child.name[0] not in "._")
    text = file.read_text(encoding="utf-8")
    return f"{head}`````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n`````\n"
