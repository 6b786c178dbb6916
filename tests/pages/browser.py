"""Pages in headless Chromium: their state after the scripts ran, and screenshots."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
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
    """Open a page in a frame of ``width``, run the script ``act`` after the page's own, and return its state."""
    (state,) = open_page_often(page, [width], dark, [act])
    return state


def open_page_often(
    page: Path, widths: Sequence[int] = (1100,), dark: bool = False, acts: Sequence[str] = ("",)
) -> list[PageState]:
    """Open a page at each width with each script, by one browser, which takes a second to start.

    The frames are iframes, since a headless window cannot be narrower than 500 pixels. Each state has all messages.
    """
    frames = []
    for number, (width, act) in enumerate(product(widths, acts)):
        copy = page.with_name(f"{page.stem}-probed-{number}.html")
        copy.write_text(page.read_text("utf-8").replace("<body>", f"<body>{_PROBE.replace('ACT', act)}", 1), "utf-8")
        frames.append(f'<iframe src="{copy.name}" width="{width}" height="900" style="border:0"></iframe>')
    frame = page.with_name(f"{page.stem}-frame.html")
    frame.write_text(
        f'<!doctype html><body style="margin:0">{"".join(frames)}<script>setInterval(() => {{'
        'const probes = [...document.querySelectorAll("iframe")].map((f) => f.contentDocument?.body?.dataset.probe);'
        "if (probes.every(Boolean)) document.body.dataset.probe = `[${probes}]`; }, 50);</script>"
    )
    result = _run(frame, ["--dump-dom", "--allow-file-access-from-files"], 1200, dark)
    match = re.search(r'data-probe="([^"]*)"', result.stdout)
    assert match, f"the page's script did not finish:\n{result.stderr[-2000:]}"
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return [PageState(probe, console) for probe in json.loads(html.unescape(match.group(1)))]


def check_fit(page: Path, act: str = "") -> list[PageState]:
    """Check that a page fits a screen and a phone, in light and dark, without errors or requests; return its states."""
    states = []
    for dark in (False, True):
        for width, state in zip((1100, 390), open_page_often(page, (1100, 390), dark, (act,)), strict=True):
            assert state.console == []
            assert state.probe["violations"] == state.probe["resources"] == []
            assert state.probe["width"] == width
            assert state.probe["scroll_width"] <= width
            assert state.probe["cut_tables"] == 0
            assert state.probe["theme"] == ("dark" if dark else "light")
            assert state.probe["background"] == ("rgb(20, 22, 26)" if dark else "rgb(247, 247, 245)")
            assert all(state.probe["inked"])
            states.append(state)
    return states


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
