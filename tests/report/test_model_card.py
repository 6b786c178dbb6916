"""The model card says what a run recorded and measured, and nothing else."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from fctune.cli import main
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.model import ModelConfig
from fctune.evaluation.suites import Suite, load_suite
from fctune.report.model_card import WRITTEN_BY, make_model_card, name_on_hub
from fctune.runs.record import read_run
from fctune.runs.results import find_accuracies
from tests.conftest import ROOT
from tests.runs.sample_runs import make_run, render_correct, write_results


@pytest.fixture(scope="module")
def smoke() -> Suite:
    return load_suite(ROOT / "eval" / "suites" / "smoke.yaml")


@pytest.fixture
def run(tmp_path: Path, smoke: Suite) -> Path:
    """Write a run with a merged export and evaluations before and after."""
    data = DataConfig(sources=[SourceConfig(path="hf:some/rows:train"), SourceConfig(path="/private/mine.jsonl")])
    path = tmp_path / "runs" / "mine"
    make_run(path, model=ModelConfig(path="hf:big/base@abc"), data=data)
    export = path / "export" / "merged"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (export / "model.safetensors").write_bytes(b"weights")
    names = {"tool_call_parser": "hermes", "reasoning_parser": None}
    (export / "server_parsers.json").write_text(json.dumps({"vllm": names, "sglang": names}))
    texts = render_correct(smoke)
    write_results(path / "eval" / "tuned.jsonl", smoke, texts, str(export))
    write_results(path.parent / "eval" / "base.jsonl", smoke, ["No."] * len(texts), "hf:big/base@abc")
    return path


def card_of(run: Path) -> str:
    record = read_run(run)
    return make_model_card(run / "export" / "merged", "me/tuned", record, find_accuracies(record))


def test_the_hub_reads_the_header(run: Path) -> None:
    found = ModelCard(card_of(run)).data
    assert found.base_model == "big/base"
    assert found.datasets == ["some/rows"]
    assert found.library_name == "transformers"
    assert "function-calling" in found.tags


def test_the_table_holds_the_measured_accuracy_and_that_of_the_base(run: Path, smoke: Suite) -> None:
    (total,) = [line for line in card_of(run).splitlines() if line.startswith("| all ")]
    cells = [cell.strip() for cell in total.strip("|").split("|")]
    num_without_call = sum(not case.expected for case in smoke.cases)
    assert cells[1] == str(len(smoke.cases))
    assert cells[2] == "100.0%"
    assert cells[4] == f"{num_without_call / len(smoke.cases):.1%}"


def test_no_local_path_is_published_and_nothing_is_claimed_that_was_not_measured(run: Path, tmp_path: Path) -> None:
    card = card_of(run)
    assert "/private" not in card
    assert "mine.jsonl" in card
    assert "| base model | `big/base` |" in card
    assert "| chat template | the base model's |" in card
    assert str(tmp_path) not in card
    bare = make_model_card(run / "export" / "merged", "me/tuned")
    assert "Accuracy" not in bare
    assert "## Training" not in bare
    assert yaml.safe_load(bare.split("---")[1]).keys() == {"library_name", "pipeline_tag", "tags"}


def test_an_adapter_is_served_on_its_base(run: Path) -> None:
    adapter = run / "export" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "server_parsers.json").write_text((run / "export" / "merged" / "server_parsers.json").read_text())
    card = make_model_card(adapter, "me/tuned", read_run(run))
    (command,) = [line for line in card.splitlines() if line.startswith("vllm serve")]
    words = shlex.split(command)
    assert words[2] == "big/base"
    assert words[words.index("--lora-modules") + 1] == "tuned=me/tuned"
    assert "sglang" not in card
    assert ModelCard(card).data.library_name == "peft"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hf:a/b", "a/b"),
        ("hf:a/b@main:test", "a/b"),
        ("hf:/local/snapshot", None),
        ("models/a/b", None),
        ("hf:a/b/c", None),
    ],
)
def test_only_names_on_the_hub_are_linked(path: str, name: str | None) -> None:
    assert name_on_hub(path) == name


def test_an_edited_card_is_kept(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[str] = []
    card = run / "export" / "merged" / "README.md"
    monkeypatch.setattr("fctune.launch.hub.push", lambda *_: uploaded.append(card.read_text()) or "url")
    assert main(["push", str(run), "me/tuned", "--print-card"]) == 0
    assert not card.exists()
    assert main(["push", str(run), "me/tuned"]) == 0
    assert main(["push", str(run), "me/other"]) == 0
    card.write_text(card.read_text().replace(WRITTEN_BY, "Mine."))
    assert main(["push", str(run), "me/third"]) == 0
    assert "# tuned" in uploaded[0]
    assert "# other" in uploaded[1]
    assert "Mine." in uploaded[2]
    assert "# other" in uploaded[2]


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/x y", "https://huggingface.co/me/x"])
def test_a_wrong_repository_name_is_refused_before_anything_is_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(tmp_path / "no-run"), name, "--print-card"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{name}: not a repository's name. Expected OWNER/NAME")
    assert said.count("\n") == 1
