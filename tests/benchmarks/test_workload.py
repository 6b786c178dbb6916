"""The benchmarks give every tool the same tokens to learn from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import shorten
from benchmarks.train_trl import TEMPLATE
from benchmarks.training import loss_after
from benchmarks.workload import SHAPES, RowCounts, write_model, write_rows
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.data.sources.reader import read_source
from fctune.data.synthetic import iter_conversations
from fctune.models.sources import read_architecture

SEQ_LEN = 1_024


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RowCounts]:
    folder = tmp_path_factory.mktemp("workload")
    write_model(folder / "model", SHAPES["toy"], has_weights=False, num_texts=100)
    counts = write_rows(folder / "rows", folder / "model", iter_conversations("train", 40, 3), SEQ_LEN)
    return folder, counts


def ours(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return each row's tokens and the positions of its supervised ones."""
    template = ChatTemplate(folder / "model")
    conversations = list(read_source(str(folder / "rows" / "rows.jsonl")))
    assert all(isinstance(row, Conversation) for row in conversations)
    encoded = [template.encode(row)[0] for row in conversations if isinstance(row, Conversation)]
    return [(row.tokens, [i for i, weight in enumerate(row.weights) if weight > 0]) for row in encoded]


def test_trl_learns_the_same_tokens(written: tuple[Path, RowCounts]) -> None:
    from transformers import AutoTokenizer

    folder, counts = written
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["messages"] for line in (folder / "rows" / "turns.jsonl").read_text().splitlines()]
    assert len(rows) == counts.rows > 20
    for row, (tokens, supervised) in zip(rows, ours(folder), strict=True):
        found = tokenizer.apply_chat_template(
            row, chat_template=TEMPLATE, return_assistant_tokens_mask=True, return_dict=True
        )
        assert found["input_ids"] == tokens
        assert [i for i, is_supervised in enumerate(found["assistant_masks"]) if is_supervised] == supervised


def test_torchtune_learns_the_same_tokens_and_the_headers(written: tuple[Path, RowCounts]) -> None:
    from torchtune.data import Message
    from torchtune.models.llama3 import llama3_tokenizer

    folder, _ = written
    model = folder / "model"
    tokenizer = llama3_tokenizer(str(model / "tokenizer.model"), str(model / "tokenizer.json"), max_seq_len=SEQ_LEN)
    rows = [json.loads(line)["messages"] for line in (folder / "rows" / "plain.jsonl").read_text().splitlines()]
    num_equal = 0
    for row, (tokens, supervised) in zip(rows, ours(folder), strict=True):
        messages = [Message(m["role"], m["content"], masked=m["role"] != "assistant") for m in row]
        found, is_masked = tokenizer.tokenize_messages(messages)
        assert found[-1] == tokenizer.eos_id
        header = tokenizer._tokenize_header(Message("assistant", ""))
        trained = [token for token, masked in zip(found, is_masked, strict=True) if not masked]
        num_turns = trained.count(tokenizer.special_tokens["<|start_header_id|>"])
        assert len(trained) == len(supervised) + num_turns * len(header)
        num_equal += found[:-1] == tokens
    assert num_equal > len(rows) / 2  # the others hold tool results, whose turn is a user's there


def test_rows_over_the_length_are_left_out(written: tuple[Path, RowCounts], tmp_path: Path) -> None:
    folder, counts = written
    rows = list(iter_conversations("train", 40, 3))
    cut = write_rows(tmp_path, folder / "model", rows, counts.longest)
    assert cut.longest < counts.longest
    assert cut.rows + cut.left_out == counts.rows + counts.left_out


def test_a_shape_counts_what_its_checkpoint_holds(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_model(tmp_path, SHAPES["toy"], has_weights=True, num_texts=10)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as tensors:
        assert sum(tensors.get_tensor(name).numel() for name in tensors.keys()) == SHAPES["toy"].num_parameters  # noqa: SIM118
    assert SHAPES["8b"].num_parameters == 8_030_261_248  # as Meta's Llama-3.1-8B


def test_the_loss_is_read_between_steps() -> None:
    run = {"supervised_by_step": [100, 100, 100], "losses": [4.0, 2.0, 1.0]}
    assert loss_after(run, 100) == 4.0
    assert loss_after(run, 150) == 3.0
    assert loss_after(run, 300) == 1.0
    assert loss_after(run, 10) == 4.0


@pytest.mark.parametrize("name", ["qwen2_0_5b", "gemma3_270m"])
def test_shapes_of_other_families_are_written_as_such(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, shorten(SHAPES[name], 2), has_weights=False, num_texts=50)
    architecture = read_architecture(tmp_path)
    assert (architecture.num_layers, architecture.embed_dim) == (2, SHAPES[name].width)
    assert architecture.vocab_size == SHAPES[name].vocab
    assert architecture.is_tied
