"""Fixtures that tests of several benchmarks share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import TINY_BASE


@pytest.fixture
def chatml_base(tmp_path: Path) -> Path:
    """Copy the tiny base with the markers and the template of Qwen2.5, for which TRL has a training template."""
    import trl

    model = tmp_path / "base"
    shutil.copytree(TINY_BASE, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text()
        text = text.replace("<|start_header_id|>", "<|im_start|>").replace("<|eot_id|>", "<|im_end|>")
        (model / name).write_text(text)
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template.read_text()}))
    return model
