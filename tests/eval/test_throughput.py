"""Inference speed: counts, and times of a server with known delays."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from eval import throughput
from fctune.data.conversation import Conversation, Message
from fctune.engines.local import LocalEngine
from fctune.engines.server import ServerEngine
from fctune.tasks.evaluation.throughput import Speed, measure_endpoint, measure_in_process, measure_rounds
from tests.engines.fault_server import Handler, serve

PROMPTS = [Conversation((Message("user", f"Say kalo menu {i}."),)) for i in range(6)]


def test_every_answer_is_as_long_as_asked_and_times_are_in_order(tiny_base: Path) -> None:
    engine = LocalEngine(tiny_base)
    for width in (1, 4):
        speed = measure_in_process(engine, PROMPTS, width, 12)
        assert (speed.width, speed.num_prompts, speed.num_tokens) == (width, 6, 72)
        assert 0 < speed.first_s <= speed.first_p95_s < speed.total_s
        assert speed.decode_per_s is not None
        assert speed.tokens_per_s == pytest.approx(72 / speed.total_s)
        assert (speed.memory_bytes or 0) > 10 * 1024**2
    assert measure_in_process(engine, PROMPTS, 6, 1).decode_per_s is None


def test_a_server_is_timed_from_the_request_to_its_tokens() -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        time.sleep(0.2)
        events = [json.dumps({"choices": [{"delta": {"content": "a"}}]}) for _ in range(5)]
        handler.stream(*events, "[DONE]", pause_s=0.05)

    with serve(behave) as log:
        engine = ServerEngine(log.url)
        alone = measure_endpoint(engine, PROMPTS, 1, 5)
        log.max_open = 0
        together = measure_endpoint(engine, PROMPTS, 6, 5)
        assert log.max_open > 2
    assert alone.num_tokens == together.num_tokens == 30
    assert 0.2 <= alone.first_s < 0.4
    assert alone.decode_per_s == pytest.approx(1 / 0.05, rel=0.4)
    assert alone.total_s >= 6 * 0.4
    assert together.tokens_per_s > 2 * alone.tokens_per_s
    assert alone.memory_bytes is None


def test_rounds_go_in_turn_and_the_first_is_thrown_away() -> None:
    order: list[str] = []

    def measure(name: str) -> Speed:
        order.append(name)
        # Round 0, the warm-up, is by far the slowest.
        total_s = (100.0, 3.0, 1.0, 2.0)[order.count(name) - 1]
        return Speed(1, 1, 6, total_s, 0.1, 0.1, None, None)

    speeds = measure_rounds([lambda: measure("a"), lambda: measure("b")], 3, lambda place, speed: None)
    assert order == ["a", "b"] * 4
    assert [speed.total_s for speed in speeds] == [2.0, 2.0]


def test_the_command_measures_models_and_servers_side_by_side(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "deep" / "speed.json"
    event = json.dumps({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})
    with serve(lambda handler, *_: handler.stream(event)) as log:
        command = ["--model", str(tiny_base), "--model", log.url, "--widths", "1,2", "--new-tokens", "3"]
        assert throughput.main([*command, "--rounds", "1", "--json", str(found)]) == 0
    rows = json.loads(found.read_text())
    assert [(row["model"], row["width"], row["num_prompts"]) for row in rows] == [
        (str(tiny_base), 1, 2),
        (str(tiny_base), 2, 2),
        (log.url, 1, 2),
        (log.url, 2, 2),
    ]
    assert "throughput, 3 new tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--rounds", "0"], "expected 1 or more"), (["--model", "no/such"], "no such directory")],
)
def test_wrong_input_is_reported_in_one_sentence(
    arguments: list[str], words: str, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert throughput.main(["--model", str(tiny_base), *arguments]) == 2
    assert words in capsys.readouterr().err
