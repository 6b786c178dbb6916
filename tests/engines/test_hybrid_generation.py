"""Hybrid models generate the same in a batch as alone: the padding before a prompt must not enter a state."""

from __future__ import annotations

from pathlib import Path

import pytest

from fctune.data.conversation import Conversation, Message
from fctune.engines.engine import make_prompts
from fctune.engines.local import LocalEngine
from tests.models.hybrid_samples import save_hybrid


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba"])
def test_batched_answers_of_hybrid_models_equal_those_one_at_a_time(model_type: str, tmp_path: Path) -> None:
    base = save_hybrid(model_type, tmp_path / model_type, with_tokenizer=True)
    texts = ("Hello.", "Book a table for two at eight, please, near the station.", "And the weather in Oslo?")
    prompts = [Conversation((Message("user", text),)) for text in texts]
    together, alone = (
        [answer.text for answer in sorted(engine.answer(make_prompts(prompts, 6)), key=lambda answer: answer.index)]
        for engine in (LocalEngine(base, batch_size=size) for size in (3, 1))
    )
    assert together == alone
    assert any(together)
