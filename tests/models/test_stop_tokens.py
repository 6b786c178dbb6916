"""An export stops at every token that ends a turn, in transformers' own generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.data.chat_template import ChatTemplate
from fctune.models.export import copy_companions
from tests.thinking_templates import HYBRID, write_thinking_model

EOT = "<|eot_id|>"
CALL_END = "<|eom_id|>"


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    """The tiny base with a template that ends calls and answers with different tokens."""
    path = tmp_path / "base"
    shutil.copytree(tiny_base, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    source = config["chat_template"]
    end = "        {{- '<|eot_id|>' }}\n    {%- endif %}\n{%- endfor %}"
    assert source.count(end) == 1
    call_end = "{{- '<|eom_id|>' if message.tool_calls else '<|eot_id|>' }}"
    config["chat_template"] = source.replace(end, end.replace("{{- '<|eot_id|>' }}", call_end))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    # The token takes the place of a piece of text.
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    spare = max(pieces, key=pieces.get)
    tokenizer["model"]["merges"] = [m for m in tokenizer["model"]["merges"] if "".join(m).replace(" ", "") != spare]
    number = pieces.pop(spare)
    entry = {**tokenizer["added_tokens"][0], "id": number, "content": CALL_END}
    tokenizer["added_tokens"].insert(0, entry)
    pieces[CALL_END] = number
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def edit(path: Path, **values: Any) -> None:
    file = path / "generation_config.json"
    kept = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))


def export(base: Path, out: Path) -> dict[str, Any]:
    """Copy what an export takes from its base, and return its generation config."""
    out.mkdir()
    copy_companions(base, out)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(base / name, out / name)
    found: dict[str, Any] = json.loads((out / "generation_config.json").read_text())
    return found


def test_the_generation_config_has_the_bases_and_the_templates_stop_tokens(base: Path, tmp_path: Path) -> None:
    template = ChatTemplate(base)
    named = {name: template.tokenizer.convert_tokens_to_ids(name) for name in (EOT, CALL_END)}
    edit(base, eos_token_id=5, temperature=0.6, top_p=0.9, do_sample=True, pad_token_id=None)
    found = export(base, tmp_path / "out")
    assert found["eos_token_id"][0] == 5
    assert set(found["eos_token_id"]) == {5, *named.values()} == {5, *template.stop_ids}
    assert (found["temperature"], found["top_p"], found["do_sample"]) == (0.6, 0.9, True)
    assert found["pad_token_id"] == template.tokenizer.pad_token_id
    # A base without the file: what transformers takes from its config.
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    (bare / "generation_config.json").unlink()
    found = export(bare, tmp_path / "other")
    config = json.loads((bare / "config.json").read_text())
    assert set(found["eos_token_id"]) == set(named.values())
    assert (found["bos_token_id"], found["pad_token_id"]) == (config["bos_token_id"], config["pad_token_id"])


def test_nothing_changes_where_the_base_knows_every_stop_token(tiny_base: Path, tmp_path: Path) -> None:
    before = json.loads((tiny_base / "generation_config.json").read_text())
    assert export(tiny_base, tmp_path / "out") == before


def test_transformers_stops_at_each_of_them(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    class Force(LogitsProcessor):
        """Makes the model write three tokens of text, then a stop token, then text again."""

        def __init__(self, token: int, start: int) -> None:
            self.token, self.start = token, start

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            chosen = self.token if input_ids.shape[1] == self.start + 3 else 40
            return torch.full_like(scores, -1e9).index_fill_(1, torch.tensor([chosen]), 0.0)

    found = export(base, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompt = torch.tensor([[1397, 50, 51]])
    lengths = {}
    for token in (*found["eos_token_id"], 41):
        force = LogitsProcessorList([Force(token, prompt.shape[1])])
        made = model.generate(prompt, max_new_tokens=8, do_sample=False, logits_processor=force)
        lengths[token] = made.shape[1] - prompt.shape[1]
    assert lengths == {**dict.fromkeys(found["eos_token_id"], 4), 41: 8}
    assert len(found["eos_token_id"]) == 2


def test_an_export_names_the_servers_parsers(tiny_base: Path, tmp_path: Path) -> None:
    export(tiny_base, tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "server_parsers.json").read_text())
    assert plain["vllm"] == plain["sglang"] == {"tool_call_parser": "hermes", "reasoning_parser": None}
    base = write_thinking_model(tiny_base, tmp_path / "thinks", HYBRID)
    export(base, tmp_path / "hybrid")
    hybrid = json.loads((tmp_path / "hybrid" / "server_parsers.json").read_text())
    assert hybrid["vllm"] == hybrid["sglang"] == {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
