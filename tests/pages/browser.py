"""Pages in headless Chromium: their state after the scripts ran, and screenshots."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(BINARY is None, reason="needs chromium: apt-get install chromium")

# Runs after the page's scripts and stores the browser's state where --dump-dom prints it.
_PROBE = """<script>
addEventListener("securitypolicyviolation", (event) => probe.violations.push(event.blockedURI));
const probe = { violations: [] };
addEventListener("load", () => setTimeout(() => { (() => { ACT })(); setTimeout(() => {
  const inked = (canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean);
  probe.width = innerWidth;
  probe.scroll_width = document.documentElement.scrollWidth;
  const beyond = (table) => table.scrollWidth > table.parentElement.clientWidth;
  probe.cut_tables = [...document.querySelectorAll("table.stacked")].filter(beyond).length;
  probe.theme = document.documentElement.dataset.theme;
  probe.ready = document.documentElement.dataset.ready ?? null;
  probe.background = getComputedStyle(document.body).backgroundColor;
  probe.inked = [...document.querySelectorAll("canvas")].map(inked);
  probe.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  probe.text = document.querySelector("main").innerText;
  document.body.dataset.probe = JSON.stringify(probe);
}, 100); }, 300));
</script>"""


@dataclass(frozen=True, slots=True)
class PageState:
    """State of a page in the browser: ``probe`` as measured by ``_PROBE``, ``console`` messages."""

    probe: dict[str, Any]
    console: list[str] = field(default_factory=list)


def open_page(page: Path, width: int = 1100, dark: bool = False, act: str = "") -> PageState:
    """Open a page in a frame of ``width``, run the script ``act`` after the page's own, and return its state.

    The frame is an iframe, since a headless window cannot be narrower than 500 pixels.
    """
    copy = page.with_name(f"{page.stem}-probed.html")
    copy.write_text(page.read_text("utf-8").replace("<body>", f"<body>{_PROBE.replace('ACT', act)}", 1), "utf-8")
    frame = page.with_name(f"{page.stem}-frame.html")
    frame.write_text(
        f'<!doctype html><body style="margin:0"><iframe id="f" src="{copy.name}" width="{width}" height="900" '
        'style="border:0"></iframe><script>setInterval(() => { const probe = f.contentDocument?.body?.dataset.probe;'
        "if (probe) document.body.dataset.probe = probe; }, 50);</script>"
    )
    result = _run(frame, ["--dump-dom", "--allow-file-access-from-files"], 1200, dark)
    match = re.search(r'data-probe="([^"]*)"', result.stdout)
    assert match, f"the page's script did not finish:\n{result.stderr[-2000:]}"
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return PageState(json.loads(html.unescape(match.group(1))), console)


def take_screenshot(page: Path, image: Path, width: int = 1100, height: int = 1600, dark: bool = False) -> None:
    """Write a PNG of the page's first ``height`` pixels."""
    _run(page, ["--hide-scrollbars", f"--screenshot={image}"], width, dark, height)


def _run(page: Path, options: list[str], width: int, dark: bool, height: int = 900) -> subprocess.CompletedProcess[str]:
    assert BINARY is not None
    command = [
        BINARY,
        "--headless=new",
        "--no-sandbox",  # root in a container has no sandbox
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={page.parent / 'chromium-profile'}",
        f"--window-size={width},{height}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
