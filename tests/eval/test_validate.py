"""Validation of intact exports, and of exports with one defect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval import validate
from fctune.engines.model_files import ModelFiles
from fctune.tasks.evaluation.validation import Check, Validator


@pytest.fixture
def model(tmp_path: Path, tiny_base: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_base, path)
    return path


def checks(model: Path, **options: Any) -> dict[str, Check]:
    return {check.name: check for check in Validator(model, **options).run()}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def split(model: Path) -> dict[str, str]:
    """In two files with an index, as large models are."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_an_intact_model_passes_every_requested_check(model: Path) -> None:
    found = checks(model, format_name="hermes", like=ModelFiles(model))
    assert {name: check.status for name, check in found.items()} == {
        **dict.fromkeys(("files", "weights", "values", "template", "stops", "loads", "logits"), "ok"),
        "calls": "skipped",
    }
    assert "mean KL 0.00e+00" in found["logits"].detail
    split(model)
    assert checks(model)["weights"].status == checks(model)["loads"].status == "ok"


def first_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if tensors[name].ndim == 2)


DEFECTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "files", "missing: tokenizer.json"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "files", "missing: *.safetensors"),
    "a config that is not JSON": (lambda m: (m / "config.json").write_text("{"), "files", "config.json cannot be read"),
    "weights cut short": (
        lambda m: (m / "model.safetensors").write_bytes((m / "model.safetensors").read_bytes()[:-1000]),
        "weights",
        "model.safetensors cannot be read",
    ),
    "a tensor that is missing": (
        lambda m: edit_weights(m, lambda t: t.pop("model.norm.weight")),
        "weights",
        "model.norm.weight is missing",
    ),
    "a tensor too many": (
        lambda m: edit_weights(m, lambda t: t.update(extra=torch.ones(2))),
        "weights",
        "extra is not part of a model of this config",
    ),
    "another shape": (lambda m: edit_json(m / "config.json", intermediate_size=48), "weights", "by the config"),
    "a shard that is gone": (
        lambda m: split(m) and (m / "model-00002-of-00002.safetensors").unlink(),
        "weights",
        "model-00002-of-00002.safetensors is named by the index and missing",
    ),
    "a shard without index": (
        lambda m: split(m) and (m / "model.safetensors.index.json").unlink(),
        "weights",
        "2 weight files and no model.safetensors.index.json",
    ),
    "a shard from elsewhere": (
        lambda m: split(m) and save_file({"x": torch.ones(1)}, m / "model-00003-of-00003.safetensors"),
        "weights",
        "model-00003-of-00003.safetensors is not in the index",
    ),
    "NaN": (
        lambda m: edit_weights(m, lambda t: t[first_matrix(t)][0, :3].fill_(float("nan"))),
        "values",
        "has 3 non-finite values",
    ),
    "infinity and its opposite": (
        lambda m: edit_weights(m, lambda t: t[first_matrix(t)][0, :2].copy_(torch.tensor([torch.inf, -torch.inf]))),
        "values",
        "has 2 non-finite values",
    ),
    "a matrix never written": (
        lambda m: edit_weights(m, lambda t: t[first_matrix(t)].zero_()),
        "values",
        "is all zeros",
    ),
    "no end of turn": (
        lambda m: edit_json(m / "generation_config.json", eos_token_id=0),
        "stops",
        "a server would not stop there",
    ),
    "a template that ignores tools": (
        lambda m: (m / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}"),
        "template",
        "chat template",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named_by_the_check_it_belongs_to(name: str, model: Path) -> None:
    break_it, check, words = DEFECTS[name]
    break_it(model)
    found = checks(model)
    assert [c.name for c in found.values() if c.status == "failed"] == [check]
    assert words in found[check].detail


def test_another_format_than_named_is_a_failure(model: Path) -> None:
    assert "writes calls as hermes, not as xlam" in checks(model, format_name="xlam")["template"].detail


def test_logits_of_another_model_and_templates_of_another_are_failures(
    model: Path, tiny_base: Path, make_model: Callable[..., Path]
) -> None:
    edit_weights(model, lambda t: t["model.norm.weight"].mul_(1.01))
    found = checks(model, like=ModelFiles(tiny_base))
    assert found["logits"].status == "failed"
    assert "over 1e-06, so this is not the model" in found["logits"].detail
    assert checks(model, like=ModelFiles(tiny_base), max_kl=10.0)["logits"].status == "ok"
    assert checks(make_model("llama"), like=ModelFiles(tiny_base))["logits"].status == "failed"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_export_has_the_logits_of_its_base_and_adapter(
    stored: torch.dtype, tmp_path: Path, tiny_base: Path
) -> None:
    """Held against PEFT, with the command as a script would use it; the export is that of a run in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    run, base = tmp_path / "run", tmp_path / "base"
    shutil.copytree(tiny_base, base)
    AutoModelForCausalLM.from_pretrained(tiny_base, dtype=stored).save_pretrained(base)
    widened = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(widened, LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(run / "export" / "adapter")
    shutil.copytree(base, run / "export" / "merged")
    out = tmp_path / "deep" / "checks.json"
    assert validate.main([str(run), "--no-calls", "--json", str(out)]) == 1
    failed = [check["name"] for check in json.loads(out.read_text()) if check["status"] == "failed"]
    assert failed == ["logits"], "the base is not the merged model"
    tuned.merge_and_unload().save_pretrained(run / "export" / "merged")
    assert validate.main([str(run), "--no-calls", "--json", str(out)]) == 0


def test_a_model_that_calls_nothing_fails_and_the_exit_codes_tell(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert validate.main([str(model), "--max-new-tokens", "8"]) == 1
    assert "0 of 3 cases of smoke get a well-formed call" in capsys.readouterr().out
    assert validate.main([str(model), "--no-calls"]) == 0
    assert validate.main([str(tmp_path / "none")]) == 2
    assert validate.main([str(model), "--like", "no/such"]) == 2
    assert validate.main([str(model), "--suite", "no_such"]) == 2
