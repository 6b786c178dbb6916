"""The demo in a real vLLM on the CPU: as a merged export and as an adapter, it makes the calls that it makes here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fctune.cli import main
from fctune.data.chat_template import ChatTemplate
from tests.ranks import find_port
from tests.serving.measuring import Record, Rows, measure, require_same
from tests.serving.servers import complete, read_calls, serve_vllm, stream

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def address(demo: Path, vllm_python: str) -> Iterator[str]:
    with serve_vllm(demo / "run", vllm_python, find_port()) as address:
        yield address


def test_every_case_is_judged_as_in_process(
    demo: Path, judged: Rows, address: str, tmp_path: Path, record_property: Record
) -> None:
    require_same(judged, measure(demo / "cases.jsonl", address, "run", tmp_path / "served.jsonl"), record_property)


def test_streamed_and_parallel_calls_are_those_in_process(judged: Rows, address: str) -> None:
    correct = [row for row in judged.values() if row["verdict"] == "correct"]
    cases = [row for row in correct if len(row["calls"]) > 1][:5] + [row for row in correct if not row["calls"]][:3]
    for row in cases:
        expected = [(call["name"], call["arguments"]) for call in row["calls"]]
        for answer in (complete, stream):
            message = answer(address, row["messages"], row["tools"])
            assert read_calls(message) == expected
            assert bool((message["content"] or "").strip()) == (not expected)


def test_an_idle_server_ends_by_itself(demo: Path, judged: Rows, vllm_python: str) -> None:
    row = next(iter(judged.values()))
    with serve_vllm(demo / "run", vllm_python, find_port(), stop_idle=0.2) as address:
        began = time.monotonic()
        while time.monotonic() - began < 20:
            complete(address, row["messages"], row["tools"])
        while time.monotonic() - began < 120:
            try:
                httpx.get(f"{address}/health", timeout=5)
            except httpx.ConnectError:
                break
            time.sleep(1)
        else:
            pytest.fail("the server still answers")


def test_tool_choice_is_respected(judged: Rows, address: str) -> None:
    row = next(row for row in judged.values() if row["verdict"] == "correct" and len(row["calls"]) == 1)
    name = row["calls"][0]["name"]
    assert not read_calls(complete(address, row["messages"], row["tools"], tool_choice="none"))
    named = complete(
        address, row["messages"], row["tools"], tool_choice={"type": "function", "function": {"name": name}}
    )
    assert [call[0] for call in read_calls(named)] == [name]


def test_the_prompt_is_tokenised_as_in_training(demo: Path, judged: Rows, address: str) -> None:
    template = ChatTemplate(demo / "run" / "export" / "merged")
    for row in list(judged.values())[:20]:
        text = template.render(row["prompt"], add_generation_prompt=True)
        body = {"model": "run", "messages": row["messages"], "tools": row["tools"] or None}
        answer = httpx.post(f"{address}/tokenize", json=body, timeout=60)
        assert answer.json()["tokens"] == template.tokenizer.encode(text, add_special_tokens=False)


def test_an_adapter_loaded_at_run_time_is_judged_as_in_process(
    demo: Path,
    judged: Rows,
    vllm_python: str,
    tiny_base: Path,
    tmp_path: Path,
    record_property: Record,
) -> None:
    adapter = demo / "run" / "export" / "adapter"
    with serve_vllm(tiny_base, vllm_python, find_port(), adapters=64) as address:
        body = {"lora_name": "tuned", "lora_path": str(adapter.resolve())}
        answer = httpx.post(f"{address}/v1/load_lora_adapter", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        require_same(
            judged, measure(demo / "cases.jsonl", address, "tuned", tmp_path / "served.jsonl"), record_property
        )


def test_an_adapter_is_served_by_its_own_name(
    demo: Path,
    judged: Rows,
    vllm_python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    monkeypatch.chdir(demo.resolve().parents[1])  # the adapter names its base relative to where the run was started
    with serve_vllm(demo.resolve() / "run" / "export" / "adapter", vllm_python, find_port()) as address:
        require_same(
            judged, measure(demo / "cases.jsonl", address, "adapter", tmp_path / "served.jsonl"), record_property
        )


def test_a_prompt_longer_than_the_context_is_refused_with_the_remedy(
    demo: Path, vllm_python: str, tmp_path: Path
) -> None:
    out = tmp_path / "served.jsonl"
    with serve_vllm(demo / "run", vllm_python, find_port(), "--max-model-len", "128") as address:
        words = ["eval", "--model", address, "--cases", str(demo / "cases.jsonl"), "--limit", "1", "--out", str(out)]
        assert main(words) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all("start the server with a longer context" in row["error"] for row in rows)
