"""The demo in llama.cpp's own server: exported to GGUF, it makes the calls that it makes in process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
from safetensors.torch import load_file, save_file

from fctune.apps.serve.gguf_export import GgufExport, export_gguf
from fctune.cli import main
from tests.ranks import find_port
from tests.serving.measuring import Record, Rows, count_correct, count_same, measure
from tests.serving.servers import complete, read_calls, serve_llama_cpp, stream

pytestmark = [pytest.mark.serving, pytest.mark.usefixtures("llama_cpp")]


# Share of all cases by which the accuracy of a type may differ from that in process.
ACCURACY_LIMITS = {"q8_0": 0.02, "q4_k_m": 0.05}


@pytest.fixture(scope="module")
def exports(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufExport]:
    folder = tmp_path_factory.mktemp("gguf")
    return {name: export_gguf(str(demo / "run"), folder, name) for name in ACCURACY_LIMITS}


@pytest.fixture(scope="module")
def address(exports: dict[str, GgufExport]) -> Iterator[str]:
    with serve_llama_cpp(exports["q8_0"].path, find_port()) as address:
        yield address


@pytest.mark.parametrize("name", ACCURACY_LIMITS)
def test_prompts_are_tokenised_as_in_training(exports: dict[str, GgufExport], name: str) -> None:
    assert exports[name].num_checked == 100
    assert exports[name].unserved is None


@pytest.mark.parametrize("name", ACCURACY_LIMITS)
def test_the_accuracy_is_close_to_that_in_process(
    demo: Path,
    judged: Rows,
    exports: dict[str, GgufExport],
    name: str,
    tmp_path: Path,
    record_property: Record,
) -> None:
    with serve_llama_cpp(exports[name].path, find_port()) as address:
        served = measure(demo / "cases.jsonl", address, None, tmp_path / "served.jsonl", "--concurrency", "1")
    for id_ in count_same(judged, served, record_property):
        here, there = judged[id_], served[id_]
        print(f"{id_}: {here['verdict']} -> {there['verdict']}: {here['answer']!r} -> {there['calls']}")
    accuracies = [count_correct(rows) / len(rows) for rows in (judged, served)]
    assert abs(accuracies[0] - accuracies[1]) <= ACCURACY_LIMITS[name]


def test_streamed_and_parallel_calls_are_those_in_process(judged: Rows, address: str) -> None:
    cases = [row for row in judged.values() if row["verdict"] == "correct" and len(row["calls"]) > 1][:5]
    for row in cases:
        expected = [(call["name"], call["arguments"]) for call in row["calls"]]
        assert read_calls(complete(address, row["messages"], row["tools"])) == expected
        assert read_calls(stream(address, row["messages"], row["tools"])) == expected


def test_tool_choice_none_makes_no_calls(judged: Rows, address: str) -> None:
    row = next(row for row in judged.values() if row["verdict"] == "correct" and row["calls"])
    assert not read_calls(complete(address, row["messages"], row["tools"], tool_choice="none"))


def test_quantising_to_q4_k_m_makes_the_file_smaller(exports: dict[str, GgufExport]) -> None:
    assert exports["q4_k_m"].path.stat().st_size < 0.8 * exports["q8_0"].path.stat().st_size


def test_a_model_that_llama_cpp_cannot_read_is_refused_in_a_sentence(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(copytree(demo / "run" / "export" / "merged", tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, model / "model.safetensors")
    words = ["export", str(model), "--to", "gguf", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "llama.cpp's converter failed (" in said
    assert said.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())
