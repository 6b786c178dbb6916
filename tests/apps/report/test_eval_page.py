"""The page of an evaluation, rendered by a browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.eval_page import FACETS, make_case, write_eval_html
from fctune.calls.formats.registry import FORMATS
from fctune.engines.engine import Answer
from fctune.pages.page import Cases, Page
from fctune.tasks.benchmarks import find_suite_files
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import judge_answer
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT
from tests.pages.browser import check_fit, needs_chromium, open_page, open_page_often, take_screenshot
from tests.tasks.benchmarks.bfcl.bfcl_wheel import needs_wheel

HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror=alert(1)>&amp;\ud800'
LENIENT = '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}</tool_call>'


def answers_of(suite: Suite) -> list[str]:
    """Return one answer of each kind of error."""
    texts = [FORMATS["hermes"].render(case.expected) or "You are welcome." for case in suite.cases]
    wrong = [text.replace("Ana", "Eve") for text in texts[1:2]]
    return [LENIENT, *wrong, HOSTILE, texts[0]]


def make_page(path: Path, suite: Suite, texts: list[str], **settings: Any) -> list[dict[str, Any]]:
    rows = []
    for case, text in zip(suite.cases, texts, strict=True):
        answer = Answer(0, text, error=None if text else "no connection within 10 s", is_cut=len(text) > 5000)
        rows.append(judge_answer(case, answer, FORMATS["hermes"]).to_row())
    summary = {"model": "runs/x", **summarise_run(suite, rows, {"format": "hermes", **settings})}
    write_eval_html(summary, rows, path)
    return rows


@pytest.fixture(scope="module")
def smoke() -> Suite:
    return load_suite(ROOT / "eval" / "suites" / "smoke.yaml")


@pytest.fixture(scope="module")
def page(smoke: Suite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "eval.html"
    make_page(path, smoke, answers_of(smoke))
    return path


def failures_in(page: Path) -> list[dict[str, Any]]:
    text = page.read_text("utf-8")
    start = text.index("data-cases>") + len("data-cases>")
    found: list[dict[str, Any]] = json.loads(text[start : text.index("</script>", start)])
    return found


def test_every_failure_is_shown_with_prompt_calls_and_differences(page: Path, smoke: Suite) -> None:
    failures = failures_in(page)
    assert [failure["title"].split(":")[0] for failure in failures] == [case.id for case in smoke.cases]
    assert [failure["tags"][0] for failure in failures] == ["malformed", "wrong_arguments", "missed_call", "false_call"]
    assert failures[0]["tags"][1] == "lenient: correct"
    parts = {part["heading"]: part for part in failures[1]["parts"]}
    assert "attendees: ['Eve', 'Luis'], expected ['Ana', 'Luis']" in parts["Differences"]["text"]
    assert 'attendees: ["Ana", "Luis"]' in parts["Expected"]["text"] == parts["Got"]["other"]
    assert 'attendees: ["Eve", "Luis"]' in parts["Got"]["text"] == parts["Expected"]["other"]
    assert "user: Schedule a meeting" in parts["Prompt"]["text"]
    assert "get_weather(city: string, unit?: string)" in parts["Available tools"]["text"]


def test_rates_have_their_intervals(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "0.0% of 4 cases correct (95 % interval 0.0% - 49.0%)." in text
    assert text.count('<svg class="interval"') == 5
    assert 'aria-label="0.0%, 0.0% - 79.3%; lenient 100.0%"' in text


@needs_chromium
def test_the_page_fits_in_light_and_dark_down_to_a_phone(page: Path) -> None:
    for state in check_fit(page, "document.querySelectorAll('.case').forEach((d) => { d.open = true; });"):
        assert state.probe["text"].count("onerror=alert(1)") == 1
        assert "Eve" in state.probe["text"]


def shown(state: Any) -> tuple[str, list[str]]:
    """Return the counter's text and the ids of the listed cases."""
    lines = [line.strip() for line in state.probe["text"].splitlines()]
    count = next(line for line in lines if line.endswith(" of 4"))
    ids = ("weather: ", "meeting: ", "two_cities: ", "thanks: ")
    return count, [i.strip(": ") for i in ids if any(i in line for line in lines)]


PICK_AND_TYPE = """
const pick = (facet, value) => {
  const select = document.querySelector(`select[data-facet=${facet}]`);
  select.value = value;
  if (select.value !== value) throw new Error(`no option ${value}`);
  select.dispatchEvent(new Event("change"));
};
const type = (words) => {
  const input = document.querySelector(".filters input");
  input.value = words;
  input.dispatchEvent(new Event("input"));
};
"""


@needs_chromium
def test_failures_can_be_filtered_by_class_category_tool_and_text(page: Path) -> None:
    everything = ["weather", "meeting", "two_cities", "thanks"]
    due = {
        "": everything,
        "pick('verdict', 'false_call')": ["thanks"],
        "pick('tool', 'get_weather')": ["weather", "two_cities"],
        "pick('tool', 'none')": ["thanks"],
        "pick('tool', 'get_weather'); pick('category', 'single')": ["weather"],
        "type('EVE')": ["meeting"],
        "type('no such words')": [],
        "pick('verdict', 'malformed'); pick('verdict', '')": everything,
    }
    states = open_page_often(page, acts=[PICK_AND_TYPE + act for act in due])
    assert states[0].console == []
    assert dict(zip(due, map(shown, states), strict=True)) == {
        act: (f"{len(ids)} of 4", ids) for act, ids in due.items()
    }


@needs_chromium
def test_only_differing_lines_are_marked(page: Path) -> None:
    act = """
    const opened = [...document.querySelectorAll(".case")].find((d) => d.textContent.includes("meeting: "));
    opened.open = true;
    opened.addEventListener("toggle", () => setTimeout(() => {
      const marked = [...opened.querySelectorAll(".lacking, .wrong")].map((line) => line.textContent.trim());
      document.querySelector("main").prepend(`marked: ${marked.join(" | ")}`);
    }));
    """
    state = open_page(page, act=act)
    assert 'marked: attendees: ["Ana", "Luis"] | attendees: ["Eve", "Luis"]' in state.probe["text"]


@needs_chromium
def test_a_wrong_call_is_marked_on_both_sides_though_its_lines_occur_in_another_call(tmp_path: Path) -> None:
    def calls(*cities: str) -> list[dict[str, Any]]:
        return [{"name": "weather", "arguments": {"city": city}} for city in cities]

    row = {"id": "a", "category": "parallel", "verdict": "wrong_arguments", "lenient": {"verdict": "wrong_arguments"}}
    row |= {"differences": [], "answer": "x", "messages": []}
    row |= {"expected_calls": calls("Paris", "Rome"), "calls": calls("Paris", "Paris")}
    page = Page("page")
    page.add_section("Failures", Cases([make_case(row)], FACETS))
    page.write(tmp_path / "page.html")
    act = """
    const opened = document.querySelector(".case");
    opened.open = true;
    opened.addEventListener("toggle", () => setTimeout(() => {
      const marked = [...opened.querySelectorAll(".lacking, .wrong")]
        .map((e) => `${e.className} ${e.textContent.trim()}`);
      document.querySelector("main").prepend(`marked: ${marked.join(" | ")}`);
    }));
    """
    state = open_page(tmp_path / "page.html", act=act)
    assert 'marked: lacking city: "Rome" | wrong city: "Paris"' in state.probe["text"]


def test_a_zero_is_never_shown_as_good(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "<b>0</b><span>correct, strict reading</span>" in text.replace(' class=""', "")
    assert '<b class="good">0</b>' not in text


@needs_chromium
def test_a_long_list_grows_on_request(tmp_path: Path) -> None:
    suite = load_suite(ROOT / "eval" / "suites" / "synthetic.yaml", num_cases=60)
    path = tmp_path / "long.html"
    make_page(path, suite, ["<tool_call>{" + "x" * 6000] * 60)
    assert "more characters" in failures_in(path)[0]["parts"][3]["text"]
    count = 'document.querySelector("main").prepend(`listed: ${document.querySelectorAll(".case").length}.`);'
    more = 'document.querySelector("button.more").click();'
    few, many = open_page_often(path, acts=(count, more + more + count))
    assert "listed: 25." in few.probe["text"]
    assert "listed: 60." in many.probe["text"]


def test_evaluations_without_failures_or_answers_have_pages(smoke: Suite, tmp_path: Path) -> None:
    right = [FORMATS["hermes"].render(case.expected) or "Bye." for case in smoke.cases]
    make_page(tmp_path / "right.html", smoke, right)
    assert "<p>None.</p>" in (tmp_path / "right.html").read_text()
    make_page(tmp_path / "lost.html", smoke, [""] * 4, request={"tool_choice": "none"})
    text = (tmp_path / "lost.html").read_text()
    assert "no connection within 10 s" in text
    assert ">4</b><span>without an answer" in text


@needs_wheel
def test_a_benchmarks_page_has_no_total_and_lists_what_was_not_run(tmp_path: Path) -> None:
    suite = load_suite(find_suite_files()["bfcl"], categories=["simple_python", "multi_turn_base"])
    suite = suite.select(limit=3)
    make_page(tmp_path / "bfcl.html", suite, ["<tool_call>{", "No.", "Hello."])
    text = (tmp_path / "bfcl.html").read_text()
    assert "3 of 3 cases failed; rates are given by category." in text
    assert "multi_turn_base" in text
    assert "<td>all</td>" not in text


@needs_chromium
def test_a_screenshot_shows_the_page(page: Path, tmp_path: Path) -> None:
    image = tmp_path / "page.png"
    take_screenshot(page, image)
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 20_000


def test_a_single_category_is_shown_once(smoke: Suite, tmp_path: Path) -> None:
    category = smoke.cases[0].category
    single = replace(smoke, cases=[case for case in smoke.cases if case.category == category])
    make_page(tmp_path / "eval.html", single, [LENIENT] * len(single.cases))
    text = (tmp_path / "eval.html").read_text("utf-8")
    accuracy = text[text.index("<h2>Accuracy") : text.index("<h2>Error classes")]
    assert accuracy.count("<tr>") == 2  # the head and the category
    assert f">{category}</td>" in accuracy
