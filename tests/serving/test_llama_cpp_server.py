"""The demo in llama.cpp's own server: exported to GGUF, it makes the calls that it makes in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fctune.cli import main
from fctune.launch.gguf_export import GgufExport, export_gguf
from tests.ranks import find_port
from tests.serving.servers import complete, read_calls, serve_llama_cpp, stream

pytestmark = [pytest.mark.serving, pytest.mark.usefixtures("llama_cpp")]


@pytest.fixture(scope="module")
def exported(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> GgufExport:
    return export_gguf(str(demo / "run"), tmp_path_factory.mktemp("gguf"), "q8_0")


@pytest.fixture(scope="module")
def address(exported: GgufExport) -> Any:
    with serve_llama_cpp(exported.path, find_port()) as address:
        yield address


def test_prompts_are_tokenised_as_in_training(exported: GgufExport) -> None:
    assert exported.num_checked == 100
    assert exported.unserved is None


def test_the_accuracy_in_q8_0_is_within_two_points_of_that_in_process(
    demo: Path, judged: dict[str, dict[str, Any]], address: str, tmp_path: Path
) -> None:
    out = tmp_path / "served.jsonl"
    words = ["eval", "--model", address, "--cases", str(demo / "cases.jsonl"), "--out", str(out), "--concurrency", "1"]
    assert main(words) == 0
    served = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert served.keys() == judged.keys()
    accuracies = [sum(r["verdict"] == "correct" for r in rows.values()) / len(rows) for rows in (judged, served)]
    print(f"in process {accuracies[0]:.1%}, llama.cpp in q8_0 {accuracies[1]:.1%}")
    for id_, row in served.items():
        if row["verdict"] != judged[id_]["verdict"]:
            print(f"{id_}: {judged[id_]['verdict']} -> {row['verdict']}: {judged[id_]['answer']!r} -> {row['calls']}")
    assert abs(accuracies[0] - accuracies[1]) <= 0.02


def test_streamed_and_parallel_calls_are_those_in_process(judged: dict[str, dict[str, Any]], address: str) -> None:
    cases = [row for row in judged.values() if row["verdict"] == "correct" and len(row["calls"]) > 1][:5]
    for row in cases:
        expected = [(call["name"], call["arguments"]) for call in row["calls"]]
        assert read_calls(complete(address, row["messages"], row["tools"])) == expected
        assert read_calls(stream(address, row["messages"], row["tools"])) == expected


def test_tool_choice_none_makes_no_calls(judged: dict[str, dict[str, Any]], address: str) -> None:
    row = next(row for row in judged.values() if row["verdict"] == "correct" and row["calls"])
    assert not read_calls(complete(address, row["messages"], row["tools"], tool_choice="none"))


def test_quantising_to_q4_k_m_makes_the_file_smaller(exported: GgufExport, demo: Path, tmp_path: Path) -> None:
    small = export_gguf(str(demo / "run"), tmp_path, "q4_k_m")
    assert small.path.stat().st_size < exported.path.stat().st_size
    assert small.num_checked == 100


def test_a_model_that_llama_cpp_cannot_read_is_refused_in_a_sentence(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from shutil import copytree

    model = Path(copytree(demo / "run" / "export" / "merged", tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, model / "model.safetensors")
    words = ["export", str(model), "--to", "gguf", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "llama.cpp's converter failed (" in said
    assert said.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())
