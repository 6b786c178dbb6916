"""Runs on rows with and without reasoning: switched row by row, and recorded in all that they write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.chunk_encoder import Counts
from fctune.data.conversation import Conversation, Message
from fctune.data.encoding import encode_sources
from fctune.data.synthetic import iter_conversations
from fctune.engines.local import LocalEngine
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import Kind, arguments_for, check_single_report, run_kind_on_rank
from tests.thinking_templates import HYBRID, READS, write_thinking_model

THOUGHT = "A tool fits, so call it."
MARKED = "{%- if enable_thinking is defined %}{{- 'ON ' if enable_thinking else 'OFF ' }}{%- endif %}"
CLOSED = "<think>\n\n</think>\n\n"


def mixed_rows(count: int) -> list[dict[str, Any]]:
    """Return synthetic rows of which every second one has reasoning in each of the assistant's turns."""
    rows = [conversation.to_openai() for conversation in iter_conversations("train", count, 3)]
    for row in rows[::2]:
        for message in row["messages"]:
            if message["role"] == "assistant":
                message["reasoning_content"] = THOUGHT
    return rows


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_thinking_is_switched_row_by_row_in_a_mixed_run(
    num_processes: int, tiny_base: Path, tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    model = write_thinking_model(tiny_base, tmp_path / "model", MARKED + READS.replace("KEY", "reasoning"))
    template = ChatTemplate(model)
    mixed = str(write_rows(mixed_rows(80), "mixed.jsonl"))
    plain = str(write_rows(mixed_rows(80)[1::2], "plain.jsonl"))

    def texts(path: str, **options: Any) -> list[str]:
        config = DataConfig(sources=[SourceConfig(path=path)], **options)
        parts = list(encode_sources(config, model, Counts(), num_processes))
        tokens = [
            part.tokens[end - n : end]
            for part in parts
            for n, end in zip(part.lengths, part.lengths.cumsum(), strict=True)
        ]
        return [template.decode(ids.tolist()) for ids in tokens]

    by_row = texts(mixed)
    assert len(by_row) == 80
    assert ["OFF " in text for text in by_row] == [THOUGHT not in text for text in by_row]
    assert sum("ON " in text and THOUGHT in text for text in by_row) == 40
    assert not any("ON " in text or "OFF " in text for text in [*texts(plain), *texts(mixed, thinking="rows")])


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_records_its_switches_in_all_that_it_writes(
    kind: Kind, tiny_base: Path, tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    model = write_thinking_model(tiny_base, tmp_path / "model", HYBRID)
    rows = write_rows(mixed_rows(40))
    argv = arguments_for(
        tmp_path, f"model.path={model}", "model.template_args.enable_thinking=false", f"data.sources.0.path={rows}",
        "checkpoint.elastic_every=1", kind=kind,
    )  # fmt: skip
    (result,) = run_ranks(run_kind_on_rank, 1, argv, kind)
    assert result["code"] == 0, result
    run = tmp_path / "run"
    described = json.loads((run / "run.json").read_text())
    assert described["config"]["model"]["template_args"] == {"enable_thinking": False}
    assert described["data"]["inputs"]["template_args"] == {"enable_thinking": False}
    written = sorted(run.glob("export/*")) + sorted(run.glob("checkpoints/elastic-*"))
    assert len(written) == (2 if kind == "lora" else 1) + 2
    question = Conversation((Message("user", "Hi"),))
    for folder in written:
        assert ChatTemplate(folder).render(question, add_generation_prompt=True).endswith(CLOSED), folder
    # evaluation of the export prompts as evaluation in the run does, and names the switches
    adapter = (run / "export" / "adapter",) if kind == "lora" else ()
    for engine in (LocalEngine(run / "export" / "merged"), LocalEngine(model, *adapter)):
        expected = adapter or engine.model_dir != model
        assert engine.template.decode(engine.template.encode_prompt(question)).endswith(CLOSED) == bool(expected)
        assert engine.describe().get("template_args") == ({"enable_thinking": False} if expected else None)


def test_a_switch_that_the_template_does_not_read_is_reported_once(tiny_base: Path, tmp_path: Path) -> None:
    model = write_thinking_model(tiny_base, tmp_path / "model", HYBRID)
    argv = arguments_for(tmp_path, f"model.path={model}", "model.template_args.enable_thinkin=false")
    check_single_report(argv, "did you mean enable_thinking?")


def test_a_row_with_reasoning_that_the_template_does_not_print_is_named_with_its_line(
    tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    rows = write_rows(mixed_rows(30))
    check_single_report(arguments_for(tmp_path, f"data.sources.0.path={rows}"), f"{rows}:1: messages: messages[")
