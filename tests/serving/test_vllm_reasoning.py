"""The demo that reasons in a real vLLM: its reasoning is sent apart from the calls, with thinking on and off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import find_port
from tests.serving.measuring import Record, measure, read_judged, require_same
from tests.serving.servers import complete, read_calls, serve_vllm, stream

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def address(reasoning_demo: Path, vllm_python: str) -> Iterator[str]:
    with serve_vllm(reasoning_demo / "run", vllm_python, find_port()) as address:
        yield address


@pytest.mark.parametrize("thinking", ["true", "false"])
def test_every_case_is_judged_as_in_process(
    reasoning_demo: Path, address: str, tmp_path: Path, thinking: str, record_property: Record
) -> None:
    cases = reasoning_demo / "cases.jsonl"
    judged = read_judged(reasoning_demo / f"thinking_{thinking}.jsonl", cases)
    switch = ("--template-args", f"enable_thinking={thinking}")
    served = measure(cases, address, "run", tmp_path / "served.jsonl", *switch)
    require_same(judged, served, record_property, num_in_100=2)  # it breaks off more calls than the demo
    for id_, row in served.items():
        if not row["is_cut"] and row["verdict"] == judged[id_]["verdict"] == "correct":
            here, there = (found.get("reasoning") or {} for found in (judged[id_], row))
            assert there.get("text", "") == here.get("text", ""), id_


@pytest.mark.parametrize("thinking", [True, False])
def test_reasoning_is_streamed_apart_from_calls_and_answers(reasoning_demo: Path, address: str, thinking: bool) -> None:
    judged = read_judged(reasoning_demo / f"thinking_{str(thinking).lower()}.jsonl", reasoning_demo / "cases.jsonl")
    correct = [row for row in judged.values() if row["verdict"] == "correct"]
    cases = [row for row in correct if len(row["calls"]) > 1][:4] + [row for row in correct if not row["calls"]][:3]
    assert len(cases) == 7
    for row in cases:
        for get in (complete, stream):
            message = get(address, row["messages"], row["tools"], chat_template_kwargs={"enable_thinking": thinking})
            assert read_calls(message) == [(call["name"], call["arguments"]) for call in row["calls"]]
            expected = row["reasoning"]["text"] if thinking else ""
            assert (message.get("reasoning") or "").strip() == expected, get.__name__
            assert "think>" not in (message["content"] or "")
            assert bool((message["content"] or "").strip()) == (not row["calls"])
