"""``make configs``: what is run of a config, and on which rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.deep_models import place_model
from benchmarks.run_configs import (
    ConfigFailure,
    check_graphs,
    digest_config,
    find_rows,
)
from fctune.config.loading import load_config
from fctune.config.shipped import list_shipped_configs
from fctune.data.sources import read_source
from tests.conftest import ROOT

CONFIGS = {path.stem: path for path in list_shipped_configs()}


def test_a_comment_keeps_the_digest_and_a_value_of_an_extended_file_changes_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    path = tmp_path / "configs" / "qwen3_8b_lora.yaml"
    digest = digest_config(path)
    path.write_text(f"# Another comment.\n{path.read_text()}")
    assert digest_config(path) == digest
    base = tmp_path / "configs" / "bases" / "hermes_glaive_lora.yaml"
    base.write_text(base.read_text().replace("epochs: 2", "epochs: 3"))
    assert digest_config(path) != digest


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_names_only_data_sets_with_rows_of_their_shape(name: str) -> None:
    if name.startswith("acceptance"):
        return
    for source in load_config(CONFIGS[name]).data.sources:
        find_rows(source.path)


def test_a_data_set_without_rows_fails() -> None:
    with pytest.raises(ConfigFailure, match="no rows in the shape of someone/else"):
        find_rows("hf:someone/else@main")


@pytest.mark.parametrize(("graphs", "is_constant"), [([3, 5, 5], True), ([3, 5, 7], False), ([0, 0], False)])
def test_graphs_may_not_grow_after_the_second_step(graphs: list[int], is_constant: bool) -> None:
    if is_constant:
        check_graphs(graphs)
    else:
        with pytest.raises(ConfigFailure, match="graphs after each step"):
            check_graphs(graphs)


def test_a_model_keeps_the_depth_and_kinds_of_its_config(tmp_path: Path) -> None:
    folder = place_model(tmp_path, "hf:google/gemma-3-270m", ["a text"])
    raw = json.loads((folder / "config.json").read_text())
    assert raw["num_hidden_layers"] == 18
    assert raw["layer_types"].count("full_attention") == 3
    assert raw["query_pre_attn_scalar"] == 256
    assert raw["hidden_size"] == 64
    assert place_model(tmp_path, "hf:google/gemma-3-270m", ["a text"]) == folder


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "configs" / "rows").glob("*.jsonl")), ids=lambda p: p.stem)
def test_all_rows_are_read_but_one_with_a_published_defect(path: Path) -> None:
    defects = [item for item in read_source(str(path)) if not hasattr(item, "messages")]
    assert len(defects) == (0 if "singleturn" in path.stem else 1)
