"""Hooks of ``make site``: pages of the repository's root, links to them, and a site that asks nobody.

mkdocs calls them by their names. Links in the Markdown are as a reader of the repository follows them; a
link to a file that is no page becomes its text. Nav entries that end in ``/`` stand for all pages of a
folder.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    **{
        name: name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    },
}
_LINK = re.compile(r"(?<!\!)\[([^\]]+)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```[^\S\n]*$)", re.MULTILINE | re.DOTALL)
_REQUEST = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
    r"|url\([\"']?(?:https?:)?//[^)]*\)"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out the entries of the navigation that stand for a folder."""
    config.nav = _expanded(config.nav)
    return config


def _expanded(nav: list[Any]) -> list[Any]:
    entries = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, below),) = entry.items()
            if isinstance(below, list):
                entry = {title: _expanded(below)}
            elif below.endswith("/"):
                entry = {title: _folder(below)}
        entries.append(entry)
    return entries


def _folder(name: str) -> list[str]:
    pages = sorted(path.name for path in (ROOT / "docs" / name).glob("*.md"))
    pages.sort(key=lambda page: page != "README.md")
    return [name + page for page in pages if page != "0000-template.md"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to pages of the site."""
    return with_links_to_pages(markdown, page.file.src_uri)


def with_links_to_pages(markdown: str, source: str) -> str:
    """Return the text of the page ``source`` of the site with its links as they are there."""
    own = next((name for name, made in ROOT_PAGES.items() if made == source), f"docs/{source}")
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(lambda link: _to_site(link, own, source), part) for part in parts[::2]]
    return "".join(parts)


def _to_site(link: re.Match[str], own: str, source: str) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
    if path in ROOT_PAGES:
        page = ROOT_PAGES[path]
    elif path.startswith("docs/") and path.endswith((".md", ".svg", ".png")):
        page = path.removeprefix("docs/")
    else:
        return text
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(source) or '.')}{anchor})"


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page would load something from elsewhere."""
    from mkdocs.exceptions import PluginError

    if found := requests_of(Path(config.site_dir)):
        raise PluginError("the site loads from elsewhere: " + "; ".join(found))


def requests_of(folder: Path) -> list[str]:
    """Return what pages and styles in a folder load from other hosts."""
    return [
        f"{path.relative_to(folder)}: {found[0]}"
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".html", ".css")
        for found in _REQUEST.finditer(path.read_text(encoding="utf-8"))
    ]
