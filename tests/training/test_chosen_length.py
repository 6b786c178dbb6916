"""``data.seq_len: auto``: chosen once for all ranks, kept when a run resumes, and by the memory of the devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fctune.apps.plan.plan import make_plan
from fctune.apps.plan.request import PlanRequest
from fctune.apps.preflight import preparation
from fctune.apps.preflight.preparation import check_prepared, prepare_run
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.base.exit_codes import DONE
from fctune.base.gpus import GPUS
from fctune.cli import main
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.data.conversation import Conversation, Message
from fctune.data.prepared_set import open_prepared
from fctune.data.row_lengths import RowLengths
from fctune.data.synthetic import iter_conversations
from fctune.models.planned_model import find_architecture
from fctune.models.transformers.architecture import parse_architecture
from fctune.parallel.layout import Hardware
from fctune.parallel.search import fit_seq_len
from fctune.training import setup
from fctune.training.env_overrides import resolve_launch
from tests.apps.preflight.preflight_nodes import OVERRIDES, TINY
from tests.conftest import ROOT, TINY_BASE
from tests.models.dense_samples import read_raw
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_kind_on_rank

LONG = Conversation((Message("user", "Tell me."), Message("assistant", "word " * 600))).to_openai()


def run_without_rows(world: World, argv: list[str]) -> dict[str, Any]:
    """Train on a rank where the lengths of the rows cannot be measured."""
    with patch.object(setup, "measure_lengths", side_effect=AssertionError):
        return run_kind_on_rank(world, argv, "lora")


@pytest.mark.thorough
def test_ranks_share_the_choice_and_a_resumed_run_keeps_it(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    rows = write_rows([*(one.to_openai() for one in iter_conversations("train", 24, 1)), LONG])
    common = [f"data.sources=[{{path: {rows}}}]", "data.seq_len=auto", "data.overlong=cut", "data.packed=true"]
    common += ["success=null", "epochs=8", "global_batch_size=2", "micro_batch_size=1"]
    first = run_ranks(run_kind_on_rank, 2, arguments_for(tmp_path, *common, "max_steps=1"), "lora")
    assert [done["code"] for done in first] == [0, 0], first[0]["err"]
    assert "data.seq_len: auto is 2,048 tokens (holds the longest row" in first[0]["out"] + first[0]["err"]
    run = tmp_path / "run"
    for file in (run / "run.json", *run.glob("checkpoints/*/trainer_state.json")):
        assert json.loads(file.read_text())["config"]["data"]["seq_len"] == 2048
    prepared = open_prepared(Path(json.loads((run / "run.json").read_text())["data"]["path"]))
    assert (prepared.seq_len, prepared.counts.cut) == (2048, 0)
    again = run_ranks(run_without_rows, 1, arguments_for(tmp_path, *common, "max_steps=2"))[0]
    assert again["code"] == 0, again["err"]
    assert "data.seq_len: auto is 2,048 tokens (as in " in again["out"] + again["err"]
    assert json.loads((run / "run.json").read_text())["config"]["data"]["seq_len"] == 2048


def plan(name: str, *overrides: str) -> RunConfig:
    source = "data.sources=[{path: synthetic:train:5}]"
    return load_config(ROOT / "configs" / f"{name}.yaml", ["data.seq_len=auto", source, *overrides])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "gpus", "overlong", "context", "mlp_tiles"),
    [
        ("qwen3_32b_lora", 1, "split_turns", 1, 1),
        ("llama3_1_8b_lora", 1, "split_turns", 1, 8),  # MLPs are computed in tiles where it does not fit otherwise
        ("llama3_1_8b_lora", 8, "fail", 8, 8),  # faster than whole rows, which fit, too
        ("llama3_3_70b_lora", 8, "fail", 8, 1),  # ranks share a row where it does not fit otherwise
    ],
)
def test_the_length_is_the_longest_that_the_plan_of_a_run_fits(
    name: str, gpus: int, overlong: str, context: int, mlp_tiles: int
) -> None:
    config = plan(name, f"data.overlong={overlong}", "micro_batch_size=1")
    architecture, _, _ = find_architecture(config.model.path)
    hardware, lengths = Hardware("cuda", gpus, 8, GPUS["h100"].memory_bytes, GPUS["h100"]), RowLengths()
    for tokens in (900, 110_000):
        lengths.add(tokens, 300)
    chosen, reason = fit_seq_len(config, lengths, architecture, hardware)
    planned = make_plan(chosen, PlanRequest(GPUS["h100"], 1, gpus))
    assert (planned.setting.context, planned.setting.mlp_tiles) == (context, mlp_tiles)
    assert planned.peak.footprint.total <= 0.9 * planned.request.gpu.memory_bytes
    if chosen.data.row_tokens < 131_072:
        assert "1 of 2 conversations is longer, with 50% of the supervised tokens" in reason
        doubled = replace(chosen, data=replace(chosen.data, seq_len=2 * chosen.data.row_tokens))
        over = make_plan(doubled, PlanRequest(GPUS["h100"], 1, gpus))
        assert over.peak.footprint.total > 0.9 * over.request.gpu.memory_bytes
        with pytest.raises(ConfigError, match=r"rows of at most [\d,]+ tokens .* GiB a rank"):
            fit_seq_len(plan(name, "data.overlong=fail", "micro_batch_size=1"), lengths, architecture, hardware)


def test_rows_are_twice_as_long_where_only_tiles_let_them_fit() -> None:
    lengths, hardware = RowLengths({110_000: (1, 300)}), Hardware("cuda", 1, 8, GPUS["h100"].memory_bytes)
    chosen = []
    for tiles in ("1", "null"):
        common = ("data.overlong=cut", "micro_batch_size=1", f"activation_checkpointing.mlp_tiles={tiles}")
        config = plan("llama3_1_8b_lora", *common)
        architecture, _, _ = find_architecture(config.model.path)
        chosen.append(fit_seq_len(config, lengths, architecture, hardware)[0].data.seq_len)
    assert chosen == [65_536, 131_072]


def test_a_model_that_fits_nowhere_is_refused_with_what_it_needs() -> None:
    config = plan("llama3_3_70b_lora")
    architecture, _, _ = find_architecture(config.model.path)
    lengths = RowLengths({2_000: (10, 100)})
    with pytest.raises(
        ConfigError, match=r"no length can be trained on: rows of 1,024 tokens need 1\d\d.\d GiB a rank"
    ):
        fit_seq_len(config, lengths, architecture, Hardware("cuda", 1, 1, GPUS["h100"].memory_bytes))


def test_layers_that_read_less_than_the_model_has_positions_for_limit_the_length() -> None:
    raw = read_raw("llama4_text", attention_chunk_size=2048, max_position_embeddings=8192)
    config = plan("tiny_lora", "data.overlong=drop")
    chosen, reason = fit_seq_len(config, RowLengths({5_000: (2, 10)}), parse_architecture("config.json", raw), None)
    assert chosen.data.seq_len == 2048
    assert "attend within chunks of 2048 tokens" in reason


@pytest.fixture
def long_rows(tmp_path: Path, write_rows: Callable[..., Path]) -> list[str]:
    """Arguments of a run of the tiny base on rows of which one takes 2,048 tokens."""
    rows = write_rows([*(one.to_openai() for one in iter_conversations("train", 60, 1)), LONG])
    given = [f"output_dir={tmp_path}/run", f"model.path={TINY_BASE}", f"data.sources=[{{path: {rows}}}]"]
    return ["--config", str(ROOT / "configs" / "tiny_lora.yaml"), *given, "data.seq_len=auto"]


def test_a_plan_has_the_length_once_the_rows_are_prepared(
    long_rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", *long_rows, "--gpu", "l4", "--gpus-per-node", "1"]
    assert main(command) == 2
    assert "data.seq_len=auto: the lengths of the rows are not measured yet" in capsys.readouterr().err
    assert main(["data", "prepare", *long_rows]) == 0
    prepared = " ".join(capsys.readouterr().out.split())
    assert "data.seq_len: auto is 2,048 tokens (holds the longest row, 1,2" in prepared
    assert "packs of 2,048 tokens" in prepared
    assert main(command) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert "data.seq_len: auto is 2,048 tokens (holds the longest row, 1,2" in planned
    assert "counted in" in planned
    assert main([*command, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["config"]["data"]["seq_len"] == 2048
    assert described["seq_len_reason"].startswith("holds the longest row")


def test_gpus_do_not_wait_for_rows_that_were_prepared_without_a_length(
    long_rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_MAX_ROW_BYTES", 10_000)
    launch, shown = resolve_launch(TINY, {}, [OVERRIDES[0], *long_rows[4:]], tmp_path), list[str]()
    assert len(check_prepared(launch, 16, {})) == 1
    assert prepare_run(launch, {}, shown.append) == DONE
    assert any("data.seq_len: auto is 2,048 tokens" in line for line in shown)
    assert check_prepared(launch, 16, {}) == []
