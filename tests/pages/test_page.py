"""The page builder and the data page, rendered by a browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path

import pytest

from fctune.apps.report.data_page import write_data_html
from fctune.data.check import Report, check_sources
from fctune.data.conversation import Conversation
from fctune.pages.page import (
    Box,
    Chart,
    Example,
    Fold,
    Grid,
    Group,
    Heading,
    Items,
    Num,
    Page,
    Part,
    Pre,
    Series,
    Table,
    Text,
)
from tests.pages.browser import check_fit, needs_chromium, open_page, take_screenshot

DEFECTS = Path(__file__).parents[1] / "data" / "fixtures" / "defects.jsonl"
HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror=alert(1)>&amp;'


def render(part: Part) -> str:
    page = Page("x")
    page.add_section("x", part)
    return page.render()


def encode(conversation: Conversation) -> tuple[int, int]:
    length = 40 + sum(len(message.content or "") for message in conversation.messages)
    return length, length // 3


@pytest.fixture(scope="module")
def report() -> Report:
    paths = [str(DEFECTS), "synthetic:train:300:1"]
    return check_sources(paths, encode=encode, seq_len=128, validation=["synthetic:train:20:1"])


@pytest.fixture(scope="module")
def data_page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "data.html"
    write_data_html(report, path)
    return path


def test_a_page_is_one_self_contained_file(data_page: Path) -> None:
    text = data_page.read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=\"(?!data:)", text)
    assert "@import" not in text
    assert len(text) < 600_000


def test_a_page_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    page = Page("x")
    monkeypatch.setattr(page, "render", lambda footer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "before"


def test_the_numbers_of_the_report_are_on_the_page(data_page: Path, report: Report) -> None:
    text = data_page.read_text("utf-8")
    for number in (report.rows, report.calls, report.duplicates, report.defects, report.warnings):
        assert f">{number:,}</b>" in text
    for finding in (*report.defect_kinds, *report.warning_kinds):
        assert f"<code>{finding.kind}</code>" in text


def test_what_is_not_read_is_on_the_page(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": messages, "metadata": {"mood": "fair"}}]
    rows += [{"messages": messages[:1], "response": None, "error": "The call timed out."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check_sources([str(tmp_path / "rows.jsonl")])
    assert report.failures
    assert report.unread_columns == {"metadata": 1}
    write_data_html(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    for name in (*report.failures, *report.unread_columns):
        assert f">{html.escape(name)}<" in text


def test_the_number_of_tools_shown_is_never_above_the_number_of_all_tools(tmp_path: Path) -> None:
    report = check_sources(["synthetic:train:5:1"])
    write_data_html(report, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text("utf-8")
    many = re.search(r"The (\d+) most called of (\d+) tools", text)
    assert int(many[1]) < int(many[2]) if many else "All tools: calls" in text
    few = dataclasses.replace(report, tools=3, tool_use=4 * report.tool_use[:1])
    write_data_html(few, tmp_path / "b.html")
    assert "All tools: calls" in (tmp_path / "b.html").read_text("utf-8")


def test_large_numbers_in_tables_have_no_exponent() -> None:
    table = Table([Num("x")], [[12345.6], [9999.7], [1234.5], [0.123456], [2e-05], [0.0], [-12345.6]])
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", render(table))
    assert cells == ["12,346", "10,000", "1,234", "0.1235", "2e-05", "0", "-12,346"]


def test_a_chart_accepts_gaps_but_no_nan() -> None:
    assert "null" in render(Chart("lines", [1, 2], [Series("loss", [1.0, None])]))
    with pytest.raises(ValueError, match="not JSON compliant"):
        render(Chart("lines", [1], [Series("loss", [float("nan")])]))


@needs_chromium
def test_the_page_draws_its_charts_and_loads_nothing(data_page: Path) -> None:
    for state in check_fit(data_page):
        assert len(state.probe["inked"]) == int(state.probe["ready"]) >= 4


@needs_chromium
def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    page = Page(HOSTILE, HOSTILE, "bad")
    page.add_tiles([(HOSTILE, HOSTILE, "")])
    chart = Chart("bars", [HOSTILE, "b"], [Series(HOSTILE, [1, 2])], HOSTILE, HOSTILE, title=HOSTILE, note=HOSTILE)
    table = Table([HOSTILE], [[HOSTILE], ["\ud800"], [None], [True], [1234567]])
    texts: list[Part] = [HOSTILE, Text(HOSTILE, "bad"), Heading(HOSTILE, HOSTILE), Pre(HOSTILE)]
    items = Items([HOSTILE, Example(HOSTILE, HOSTILE, HOSTILE)])
    parts: list[Part] = [Fold(HOSTILE, texts, True, 1, HOSTILE), items, Grid([Box(HOSTILE, "bad", [HOSTILE])])]
    page.add_section(HOSTILE, chart, table, Group(parts, "pair"), lead=HOSTILE)
    page.write(tmp_path / "hostile.html", HOSTILE)
    state = open_page(tmp_path / "hostile.html")
    assert state.console == []
    assert state.probe["violations"] == []
    assert state.probe["text"].count("onerror=alert(1)") >= 20
    assert "1,234,567" in state.probe["text"]
    assert all(state.probe["inked"])


@needs_chromium
def test_a_line_chart_with_gaps_is_drawn(tmp_path: Path) -> None:
    page = Page("Lines")
    values = [None if i % 7 == 0 else 2.0 - i / 100 for i in range(100)]
    page.add_section("Loss", Chart("lines", list(range(100)), [Series("loss", values)], "step"))
    page.write(tmp_path / "lines.html")
    state = open_page(tmp_path / "lines.html")
    assert state.console == []
    assert state.probe["inked"] == [True]


TICKS = """const labels = ({ scales: { y } }) => y.ticks.map((tick) => tick.label).filter(Boolean);
document.querySelector("main").prepend(JSON.stringify(Object.values(Chart.instances).map(labels)));"""


@needs_chromium
def test_ticks_have_readable_labels(tmp_path: Path) -> None:
    cases: list[tuple[list[float], bool, list[str]]] = [
        ([0.0, 2e-5], False, ["0", "5e-6", "1e-5", "1.5e-5", "2e-5", "2.5e-5"]),  # a learning rate
        ([0.0, 2e-3], False, [f"{n / 5000:g}" for n in range(11)]),
        ([0.03, 6.8], True, ["0.05", "0.1", "0.2", "0.5", "1", "2", "5"]),
        ([0.0, 16000.0], False, [f"{n:,}" for n in range(0, 16001, 2000)]),
    ]
    page = Page("Ticks")
    for values, is_log, _ in cases:
        page.add_section("", Chart("lines", [1, 2], [Series("x", values)], "step", is_log=is_log))
    page.write(tmp_path / "ticks.html")
    (shown, *_) = open_page(tmp_path / "ticks.html", act=TICKS).probe["text"].splitlines()
    assert json.loads(shown) == [due for _, _, due in cases]


@needs_chromium
def test_no_two_lines_look_alike(tmp_path: Path) -> None:
    page = Page("Runs")
    runs = [Series(f"run {number}", [number, number + 1.0]) for number in range(12)]
    page.add_section("", Chart("lines", [1, 2], runs, "step"))
    page.write(tmp_path / "runs.html")
    act = """const [{ data }] = Object.values(Chart.instances);
    document.querySelector("main").prepend(JSON.stringify(data.datasets.map((s) => [s.borderColor, s.borderDash])));"""
    (shown, *_) = open_page(tmp_path / "runs.html", act=act).probe["text"].splitlines()
    assert len({json.dumps(look) for look in json.loads(shown)}) == 12


@needs_chromium
def test_a_screenshot_shows_the_page(data_page: Path, tmp_path: Path) -> None:
    image = tmp_path / "page.png"
    take_screenshot(data_page, image)
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 20_000
