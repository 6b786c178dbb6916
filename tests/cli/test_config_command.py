"""``fctune config`` lists, copies, checks and describes configs."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from fctune.cli import main
from fctune.config.loading import load_config, read_yaml_mapping
from fctune.config.shipped import list_shipped_configs, list_shipped_recipes
from tests.conftest import ROOT


def test_ls_names_every_config_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "ls"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()}
    assert {path.stem for path in (*list_shipped_configs(), *list_shipped_recipes())} <= listed


@pytest.mark.parametrize(("name", "file"), [("lora_tiny", "tiny_lora.yaml"), ("full_fc_distributed", None)])
def test_cp_copies_a_config_or_recipe_and_overwrites_only_by_force(
    name: str, file: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "deep" / (file or f"{name}.py")
    assert main(["config", "cp", name, str(target.parent)]) == 0
    original = ROOT / ("configs" if file else "recipes") / target.name
    assert target.read_bytes() == original.read_bytes()
    target.write_text("edited")
    assert main(["config", "cp", name, str(target)]) == 2
    assert "pass --force" in capsys.readouterr().err
    assert target.read_text() == "edited"
    assert main(["config", "cp", name, str(target), "--force"]) == 0
    assert target.read_bytes() == original.read_bytes()


def test_every_shipped_config_is_the_same_when_copied(tmp_path: Path) -> None:
    for path in list_shipped_configs():
        if path.name.startswith("acceptance_"):
            continue
        assert main(["config", "cp", path.stem, str(tmp_path), "--force"]) == 0
        copied = load_config(tmp_path / path.name)
        assert copied.to_dict() == load_config(path).to_dict()


def test_cp_suggests_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "cp", "tiny_lorra"]) == 2
    assert "did you mean tiny_lora?" in capsys.readouterr().err


def test_check_accepts_a_valid_config_and_lists_the_problems_of_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["config", "check", "tiny_lora"]) == 0
    assert "valid" in capsys.readouterr().out
    assert main(["config", "check", "tiny_lora", "epochs=0", "adapter.modules=[q_prj]"]) == 2
    report = capsys.readouterr().err
    assert "epochs=0" in report
    assert "did you mean q_proj?" in report


def test_the_json_schema_accepts_every_shipped_config_and_rejects_wrong_keys_and_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in list_shipped_configs():
        if not path.name.startswith("acceptance_"):
            assert not list(validator.iter_errors(read_yaml_mapping(path))), path.name
    good = read_yaml_mapping(ROOT / "configs" / "tiny_lora.yaml")
    wrong = ({"epoch": 1}, {"epochs": 0}, {"data": {"sources": [{}]}}, {"adapter": {"rank": "x"}}, {"precision": "fp8"})
    for change in wrong:
        assert list(validator.iter_errors(good | change)), change


def test_an_unknown_subcommand_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for words, near in ((["trian"], "train"), (["config", "chek"], "check"), (["data", "shwo"], "show")):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert f"did you mean {near}?" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from fctune import __version__

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fctune {__version__}\n"
