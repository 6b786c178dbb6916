"""Multiple choice in a real vLLM on the CPU: log-likelihoods of the choices as in process, up to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fctune.cli import main
from tests.conftest import TINY_BASE
from tests.ranks import find_port
from tests.serving.measuring import read_rows
from tests.serving.servers import serve_vllm
from tests.tasks.benchmarks.when2call.when2call_rows import ROWS, make_row, write_rows

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def address(vllm_python: str) -> Iterator[str]:
    with serve_vllm(TINY_BASE, vllm_python, find_port()) as address:
        yield address


def test_choices_have_the_likelihoods_that_they_have_in_process(address: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "cases.jsonl")
    found = []
    for model in (str(TINY_BASE), address):
        out = tmp_path / f"{len(found)}.jsonl"
        words = ["eval", "--model", model, "--suite", "when2call", "--when2call-data", str(data), "--out", str(out)]
        assert main(words) == 0
        found.append(read_rows(out))
    here, served = found
    assert here.keys() == served.keys()
    for id_, row in here.items():
        for own, other in zip(row["choices"], served[id_]["choices"], strict=True):
            assert (other["num_tokens"], other["num_characters"]) == (own["num_tokens"], own["num_characters"])
            assert other["logprob"] == pytest.approx(own["logprob"], abs=0.02, rel=1e-3)
        assert served[id_]["when2call"] == row["when2call"]


def test_a_choice_beyond_the_servers_context_is_an_error_of_its_case_alone(address: str, tmp_path: Path) -> None:
    long = make_row(7, "direct", "Say much about Köln.", direct="Köln is a city. " * 1000)
    data, out = write_rows(tmp_path / "cases.jsonl", (ROWS[0], long)), tmp_path / "out.jsonl"
    words = ["eval", "--model", address, "--suite", "when2call", "--when2call-data", str(data), "--out", str(out)]
    assert main(words) == 1
    rows = read_rows(out)
    assert "error" not in rows["when2call-0000-1"]
    assert "context length" in rows["when2call-0000-7"]["error"]
    assert "--max-model-len" in rows["when2call-0000-7"]["error"]
