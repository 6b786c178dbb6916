"""The recipes of distillation as a user starts them, with the config of the page about it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fctune.data.chat_template import ChatTemplate
from tests.conftest import TINY_BASE
from tests.engines.vllm_stand_in import VllmStandIn
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import Kind, check_single_reports, distill_arguments, run_in_turn, write_teacher

MIXED = ("distill.on_policy_share=0.5", "data.sources=[{path: synthetic:train:10:2}]", "distill.beta=0.5")


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture
def server(teacher: Path) -> Iterator[VllmStandIn]:
    made = VllmStandIn(teacher)
    yield made
    made.stop()


@pytest.mark.thorough
def test_a_run_that_is_resumed_equals_one_that_was_not(server: VllmStandIn, tmp_path: Path) -> None:
    """Adapters, packed rows, a teacher on a server, and half of the answers from rows."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = (*MIXED, "distill.teacher=null", f"distill.teacher_server={{url: {server.url}, top_k: 8}}")
    plans: list[tuple[list[str], Kind]] = [
        (distill_arguments(whole, *options, "max_steps=3"), "distill"),
        (distill_arguments(halves, *options, "max_steps=1"), "distill"),
        (distill_arguments(halves, *options, "max_steps=3"), "distill"),
    ]
    results = run_ranks(run_in_turn, 1, plans)[0]
    assert [one["code"] for one in results] == [0, 0, 0], results
    one, two = (read_lines(folder, "metrics.jsonl") for folder in (whole, halves))
    for name in ("loss", "data_digest", "grad_norm", "teacher_tail"):
        assert [line[name] for line in one] == [line[name] for line in two], name
    assert all(line["loss"] > 0 for line in one)
    assert all(line["answers"] == line["answers_from_rows"] == 2 for line in one)
    assert all(0 < line["teacher_tail"] < 1 for line in one)
    adapters = [load_file(f / "run" / "export" / "adapter" / "adapter_model.safetensors") for f in (whole, halves)]
    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())
    rows = read_lines(halves, "rollouts.jsonl")
    assert set(Counter((row["batch"], row["case_id"], row["sample"]) for row in rows).values()) == {1}
    assert [row["version"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert json.loads((whole / "run" / "run.json").read_text())["data"]["teacher"] == "base"


@pytest.mark.thorough
def test_two_processes_train_all_weights_toward_a_teacher_in_process(teacher: Path, tmp_path: Path) -> None:
    options = ("~adapter", *MIXED, f"distill.teacher={teacher}", "parallel.mode=fsdp", "max_steps=2")
    plans: list[tuple[list[str], Kind]] = [(distill_arguments(tmp_path, *options), "full_distill")]
    results = run_ranks(run_in_turn, 2, plans)
    assert [rank[0]["code"] for rank in results] == [0, 0], results
    metrics = read_lines(tmp_path, "metrics.jsonl")
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in metrics)
    answers = Counter((row["batch"], row["case_id"]) for row in read_lines(tmp_path, "rollouts.jsonl"))
    assert set(answers.values()) == {1}
    assert len(answers) == 4
    exported = load_file(tmp_path / "run" / "export" / "merged" / "model.safetensors")
    base = load_file(TINY_BASE / "model.safetensors")
    assert any(not torch.equal(exported[name], base[name]) for name in exported.keys() & base.keys())


def test_bad_input_is_named_in_one_sentence(server: VllmStandIn, teacher: Path, tmp_path: Path) -> None:
    short, other = tmp_path / "short", tmp_path / "other"
    for path in (short, other):
        shutil.copytree(teacher, path)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    tokenizer = ChatTemplate(TINY_BASE).tokenizer
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    url = "distill.teacher_server={url: %s, top_k: %d}"
    wrong: list[tuple[tuple[str, ...], str, Kind]] = [
        (("distill.teacher=null",), "distill.teacher: missing; set distill.teacher to a model", "distill"),
        ((url % (server.url, 8),), "distill.teacher_server is set, too", "distill"),
        (("distill.teacher=no/model",), "distill.teacher=no/model: no such directory", "distill"),
        (("distill.cases=",), "distill.cases: missing, so the model has nothing to answer", "distill"),
        (("distill.on_policy_share=0.5",), "data.sources=[]: empty", "distill"),
        (("distill.on_policy_share=0.01", *MIXED[1:]), "of distill.answers_per_step=4, this is 0; raise", "distill"),
        (MIXED[1:2], "data.sources: with distill.on_policy_share=1 a run learns from its own answers", "distill"),
        (
            ("grpo={cases: synthetic:train:9}",),
            "a run learns from preference pairs, from verdicts or from a",
            "distill",
        ),
        (
            ("distill.engine=server", "distill.server={url: http://h}", "~adapter"),
            "this run trains all",
            "full_distill",
        ),
        (("data.seq_len=auto",), "a run with distill has answers, too; set a number of tokens", "distill"),
        (("~adapter",), "recipes/lora_distill_distributed is for configs with distill and adapter", "distill"),
        ((f"distill.teacher={short}",), f"distill.teacher={short}: has 512 positions", "distill"),
        ((f"distill.teacher={other}",), "'<new>' is token", "distill"),
        (("distill.teacher=null", url % ("http://127.0.0.1:9", 8)), "no server answers there", "distill"),
        (("distill.teacher=null", url % (server.url, 40)), "--max-logprobs 40", "distill"),
        (("distill.teacher=null", url % (server.url, 8), "data.seq_len=2048"), "2,049 are needed", "distill"),
    ]
    check_single_reports(
        [(distill_arguments(tmp_path, f"distill.teacher={teacher}", *one), words, kind) for one, words, kind in wrong],
        1,
    )
