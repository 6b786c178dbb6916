"""The model card says what a run recorded and measured, and nothing else."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from fctune.apps.push.card import WRITTEN_BY, make_model_card, name_on_hub
from fctune.apps.push.upload import Upload
from fctune.cli import main
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.model import ModelConfig
from fctune.data.template_args import write_template_args
from fctune.engines.vllm_options import server_options
from fctune.models.export import Prompting, copy_companions, write_adapter_config
from fctune.models.sources import read_architecture
from fctune.runs.record import read_run
from fctune.runs.release import mark_not_released
from fctune.tasks.evaluation.accuracy import find_accuracies
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT, TINY_BASE
from tests.runs.sample_runs import make_run, render_correct, write_results
from tests.thinking_templates import HYBRID, write_thinking_model


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


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    """Write a model whose template has a switch."""
    return write_thinking_model(tiny_base, tmp_path / "base", HYBRID)


@pytest.fixture
def adapter(run: Path, base: Path) -> Path:
    """Write the run's adapter, as exports do but for the weights, trained with a switch of the template."""
    folder = run / "export" / "adapter"
    folder.mkdir()
    write_base(folder, "hf:big/base@abc")
    copy_companions(base, folder, Prompting(template_args={"enable_thinking": False}))
    return folder


def write_base(folder: Path, base: str, **config: Any) -> None:
    write_adapter_config(folder, AdapterConfig(rank=64, alpha=128.0, **config), base, read_architecture(TINY_BASE))


def commands_of(card: str) -> list[list[str]]:
    return [shlex.split(line) for line in card.splitlines() if line.startswith(("vllm", "python"))]


def test_an_adapter_is_served_on_its_base_with_the_options_that_fctune_serve_passes(
    run: Path, adapter: Path, base: Path
) -> None:
    card = make_model_card(adapter, "me/tuned", read_run(run))
    (words,) = commands_of(card)
    assert words[:3] == ["vllm", "serve", "big/base"]
    assert words[words.index("--revision") + 1] == "abc"
    assert words[words.index("--tokenizer-revision") + 1] == "main", "the adapter's repository has no revision abc"
    assert words[words.index("--max-lora-rank") + 1] == "64"
    assert str(run) not in card
    header = ModelCard(card).data
    assert (header.library_name, header.base_model) == ("peft", "big/base")

    write_base(adapter, str(base))
    _, _, *options = server_options(str(adapter), name="tuned")
    published = [word.replace(str(adapter), "me/tuned") for word in options]
    assert {"--tokenizer", "--reasoning-parser", "--default-chat-template-kwargs"} < set(published)
    assert set(published) < set(words)


def test_an_adapter_that_vllm_cannot_load_is_served_merged(run: Path, adapter: Path) -> None:
    write_base(adapter, "hf:big/base@abc", dora=True)
    card = make_model_card(adapter, "me/tuned", read_run(run))
    assert "because vLLM cannot load DoRA's magnitudes: the run's `export/merged`" in card
    vllm, sglang = commands_of(card)
    assert vllm[:3] == ["vllm", "serve", "export/merged"]
    assert sglang[3:5] == ["--model-path", "export/merged"]
    assert "--enable-lora" not in vllm


def test_an_adapter_whose_base_is_not_on_the_hub_has_no_command_and_no_local_path(run: Path, adapter: Path) -> None:
    write_base(adapter, "/private/base")
    card = make_model_card(adapter, "me/tuned")
    assert not commands_of(card)
    assert "/private" not in card


def test_the_templates_switches_are_passed_to_every_server(run: Path) -> None:
    export = run / "export" / "merged"
    write_template_args(export, {"enable_thinking": False})
    vllm, sglang = commands_of(make_model_card(export, "me/tuned"))
    for words in (vllm, sglang):
        assert json.loads(words[words.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hf:a/b", "a/b"),
        ("hf:a/b@main:test", "a/b"),
        ("hf:/local/snapshot", None),
        (f"hf:/mnt/shared/hub/datasets--a--b/snapshots/{'26d14ebfe1' * 4}:train", "a/b"),
        (f"hf:/mnt/shared/hub/datasets--squad/snapshots/{'26d14ebfe1' * 4}", "squad"),
        ("models/a/b", None),
        ("hf:a/b/c", None),
    ],
)
def test_only_names_on_the_hub_are_linked(path: str, name: str | None) -> None:
    assert name_on_hub(path) == name


def test_an_edited_card_is_kept(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[str] = []
    card = run / "export" / "merged" / "README.md"
    monkeypatch.setattr("fctune.apps.push.upload.push", lambda *_: uploaded.append(card.read_text()) or "url")
    monkeypatch.setattr("fctune.apps.push.upload.find_visibility", lambda *_: "new")
    assert main(["push", str(run), "me/tuned", "--print-card"]) == 0
    assert not card.exists()
    assert main(["push", str(run), "me/tuned", "--yes"]) == 0
    assert main(["push", str(run), "me/other", "--yes"]) == 0
    card.write_text(card.read_text().replace(WRITTEN_BY, "Mine."))
    assert main(["push", str(run), "me/third", "--yes"]) == 0
    assert "# tuned" in uploaded[0]
    assert "# other" in uploaded[1]
    assert "Mine." in uploaded[2]
    assert "# other" in uploaded[2]


def test_a_card_of_one_s_own_names_what_the_gate_stopped(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export, cards = run / "export" / "merged", list[str]()

    def push(upload: Upload, *_: object) -> str:
        cards.append(upload.files["README.md"].decode() if isinstance(upload.files["README.md"], bytes) else "")
        return "url"

    monkeypatch.setattr("fctune.apps.push.upload.push", push)
    monkeypatch.setattr("fctune.apps.push.upload.find_visibility", lambda *_: "new")
    (export / "README.md").write_text("Mine.\n")
    mark_not_released(run, [{"name": "text", "title": "instructions", "verdict": "worse"}], tmp_path / "gate.json")
    assert main(["push", str(run), "me/tuned", "--yes", "--force"]) == 0
    assert cards[0].startswith("Mine.\n\n## Not released\n")
    assert cards[0].endswith("| instructions | worse |\n")
    assert (export / "README.md").read_text() == "Mine.\n", "it would stay when the mark is gone"


@pytest.mark.parametrize(
    ("verdicts", "words", "absent"),
    [
        (["worse"], "*worse*: it lost more than is accepted.", "undecided"),
        (["undecided"], "*undecided*: the sample is too small to rule out that it did.", "worse"),
        (["worse", "undecided"], "*worse*: it lost more than is accepted; *undecided*: the sample", "damaged"),
        ([], "The record of what stopped it is damaged.", "| line | verdict |"),
    ],
)
def test_the_card_says_what_stopped_the_model_and_no_more(
    run: Path, tmp_path: Path, verdicts: list[str], words: str, absent: str
) -> None:
    lines = [{"name": f"line{i}", "title": f"line {i}", "verdict": one} for i, one in enumerate(verdicts)]
    mark_not_released(run, lines, tmp_path / "gate.json")
    section = card_of(run).partition("## Not released")[2].partition("\n## ")[0]
    assert words in section
    assert absent not in section
    assert section.count("\n| line ") == len(lines) + bool(lines)


def test_an_export_on_another_disk_has_the_card_of_its_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = run / "export" / "merged"
    words = ["push", str(run), "me/tuned", "--print-card"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    (tmp_path / "other" / "export").mkdir(parents=True)
    merged.rename(tmp_path / "other" / "export" / "merged")
    merged.symlink_to(tmp_path / "other" / "export" / "merged")
    assert main(words) == 0
    assert "## Training" in expected
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/x y", "https://huggingface.co/me/x"])
def test_a_wrong_repository_name_is_refused_before_anything_is_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(tmp_path / "no-run"), name, "--print-card"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{name}: not a repository's name. Expected OWNER/NAME")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"origin": "fctune", "note": "", "calls": 7, "read": 7, "wrong": []},
            "It reads 7 of 7 held-out calls as written.",
        ),
        (
            {"origin": "fctune", "note": "", "calls": 7, "read": 5, "wrong": ['misread: wrote [["f", {}]], read []']},
            'It reads 5 of 7 held-out calls as written. Others are misread: wrote [["f", {}]], read [].',
        ),
        (
            {"origin": None, "note": "a response_template cannot express muse"},
            "does not read this model's answers. A resp",
        ),
    ],
)
def test_the_card_says_how_answers_are_parsed_and_what_is_not(run: Path, found: dict[str, Any], words: str) -> None:
    assert "## Parsing" not in card_of(run)
    path = run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"response_template": found}))
    assert words in card_of(run).partition("## Parsing")[2]
