"""Hook of MkDocs: fail if a built page loads anything from another host, or would not open from disk."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# Attributes whose addresses a browser loads without being asked; links to follow (a) are not among them.
_SOURCES = ("script", "img", "iframe", "source", "video", "audio", "embed")
_LOADED = {("link", "href"), *((tag, "src") for tag in _SOURCES)}
_NOT_LOADED = {"canonical", "prev", "next", "alternate"}  # relations of links
_CSS_URL = re.compile(r"(?:url\(|@import)\s*['\"]?\s*(https?:)?//", re.I)
_REPOSITORY = re.compile(r'data-md-component="source"')  # asks the API of GitHub or GitLab for stars


class _Loads(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what one element loads."""
        relations = set((dict(attrs).get("rel") or "").split())
        if tag == "link" and relations & _NOT_LOADED:
            return
        self.found += [value for name, value in attrs if (tag, name) in _LOADED and value]


def find_foreign(site: Path) -> list[str]:
    """Return what the files of a built site load from other hosts, one line each."""
    found = []
    for file in sorted(site.rglob("*")):
        name = file.relative_to(site)
        if file.suffix == ".html":
            text = file.read_text("utf-8")
            loads = _Loads()
            loads.feed(text)
            found += [f"{name}: {address}" for address in loads.found if re.match(r"(https?:)?//", address)]
            found += [f"{name}: facts of the repository, because of repo_url"] if _REPOSITORY.search(text) else []
        if file.suffix in (".html", ".css") and _CSS_URL.search(file.read_text("utf-8")):
            found.append(f"{name}: a style that loads from another host")
    return found


def on_post_build(config: Any) -> None:
    """Check the site; called by MkDocs.

    Raises:
        SystemExit: A page loads something from another host.
    """
    if foreign := find_foreign(Path(config["site_dir"])):
        raise SystemExit("the site must not call other hosts:\n" + "\n".join(foreign))
