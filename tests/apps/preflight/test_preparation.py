"""Runs that are not prepared: how much GPUs may wait for, and the disk that preparation needs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fctune.apps.preflight import checks, downloads, preparation
from fctune.apps.preflight.downloads import is_being_downloaded
from fctune.apps.preflight.preparation import check_prepared, measure_unprepared, prepare_run
from fctune.base.exit_codes import DONE, FAILED
from fctune.base.files import hold_lock
from fctune.config.cache import prepared_root
from fctune.data.synthetic import iter_conversations
from fctune.models.run_config import load_run_config
from fctune.training.env_overrides import LaunchSpec, resolve_launch
from tests.apps.hub_server import HubServer, serve_hub
from tests.apps.preflight.preflight_nodes import OVERRIDES, TINY, NodeSpec, run_nodes
from tests.apps.test_hub import ask
from tests.conftest import ROOT, TINY_BASE

LIMITED = "import fctune.apps.preflight.preparation as p\np._MAX_ROW_BYTES, p._MAX_DOWNLOAD_BYTES = 10_000, 1_000_000\n"
CHECK = f"""
import json, os, sys
from pathlib import Path
from fctune.training.env_overrides import resolve_launch
{LIMITED}
shared = Path(os.environ["HF_HOME"]).parent
arguments = [f"model.path={{sys.argv[2]}}", f"data.sources.0.path={{sys.argv[3]}}"]
launch = resolve_launch(Path("configs/tiny_lora.yaml"), {{}}, arguments, shared)
if sys.argv[4] == "prepare":
    assert p.prepare_run(launch, {{}}, lambda line: print(line, file=sys.stderr)) == 0
print(json.dumps([str(problem) for problem in p.check_prepared(launch, 16, os.environ)]))
"""


def write_rows(path: Path, count: int = 80) -> Path:
    path.write_text("".join(json.dumps(row.to_openai()) + "\n" for row in iter_conversations("train", count, 1)))
    return path


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchSpec:
    """A run of the tiny base on a file of rows that is larger than GPUs may wait for."""
    monkeypatch.setattr(preparation, "_MAX_ROW_BYTES", 10_000)
    rows = write_rows(tmp_path / "rows.jsonl")
    return resolve_launch(TINY, {}, [OVERRIDES[0], f"data.sources.0.path={rows}"], tmp_path)


def test_many_rows_that_are_not_prepared_are_a_wrong_request_until_they_are(launch: LaunchSpec) -> None:
    (problem,) = check_prepared(launch, 16, {})
    assert problem.severity == "usage"
    size = Path(launch.config.data.sources[0].path).stat().st_size / 2**20
    assert problem.message == (
        f"the run is not prepared: {size:.1f} MiB of rows to read and tokenise while 16 GPUs wait"
    )
    assert "sky/prepare.yaml" in problem.remedy
    assert problem.remedy.endswith("or set PREPARE_ON_GPUS=1")
    for name in ("sky/prepare.yaml", "sky/slurm/prepare.sbatch", "sky/k8s/prepare-job.yaml"):
        assert name in problem.remedy
        assert (ROOT / name).is_file()
    assert check_prepared(launch, 16, {"PREPARE_ON_GPUS": "1"}) == []
    assert prepare_run(launch, {}, print) == DONE
    assert check_prepared(launch, 16, {}) == []


def test_other_rows_or_other_settings_are_not_prepared(launch: LaunchSpec, tmp_path: Path) -> None:
    assert prepare_run(launch, {}, print) == DONE
    longer = resolve_launch(TINY, {"OVERRIDES": "data.seq_len=512"}, launch.arguments[:2], tmp_path)
    assert check_prepared(longer, 8, {}) != []
    write_rows(tmp_path / "rows.jsonl", 81)
    assert check_prepared(launch, 8, {}) != []


def test_rows_that_are_missing_are_a_wrong_request_and_those_that_cannot_be_read_a_fault(
    launch: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(launch.config.data.sources[0].path).unlink()
    (problem,) = check_prepared(launch, 8, {})
    assert problem.severity == "usage"

    def refuse(launch: LaunchSpec) -> None:
        raise PermissionError(13, "Permission denied", "rows.jsonl")

    monkeypatch.setattr(preparation, "measure_unprepared", refuse)
    (problem,) = check_prepared(launch, 8, {})
    assert problem.severity == "fault"
    assert "Permission denied" in problem.message


def test_a_data_set_in_the_cache_is_measured_without_the_hub(
    launch: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "rows.jsonl").write_bytes(b"x" * 300)
    monkeypatch.setattr(preparation, "list_hub_repositories", lambda config: [("dataset", "org/rows", None, "key")])
    monkeypatch.setattr(preparation, "find_snapshot", lambda kind, name, revision: snapshot)
    monkeypatch.setattr(preparation, "measure_repository", lambda *_: pytest.fail("the hub was asked"))
    left = preparation.measure_unprepared(launch)
    assert (left.downloads, left.rows > 300) == ({}, True)


def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda *_, **__: time.sleep(30))
    monkeypatch.setattr(downloads, "_HUB_S", 0.1)
    assert downloads.measure_repository("dataset", "org/rows", None, tmp_path) is None


def test_gpus_may_wait_for_few_rows(launch: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = resolve_launch(TINY, {"MAX_SAMPLES": "50"}, launch.arguments[:2], tmp_path)
    assert check_prepared(few, 8, {}) == []
    monkeypatch.undo()
    assert check_prepared(launch, 8, {}) == [], "a file of kilobytes"
    synthetic = resolve_launch(TINY, {}, OVERRIDES, tmp_path)
    assert check_prepared(synthetic, 8, {}) == []


def test_a_run_that_starts_while_its_rows_are_prepared_is_told_by_whom(launch: LaunchSpec) -> None:
    root = prepared_root(launch.config)
    root.mkdir(parents=True)
    path = launch.config.data.sources[0].path
    for sources, is_told in (([path], True), (["other.jsonl"], False)):
        with hold_lock(root / ".a.lock", json.dumps({"host": "cpu-0", "pid": 1, "sources": sources}), print):
            (problem,) = check_prepared(launch, 16, {})
        assert ("cpu-0 is preparing rows of the same sources now" in problem.message) == is_told
        assert ("Wait until that has ended" in problem.remedy) == is_told
    (root / ".a.lock").write_text(json.dumps({"host": "cpu-0", "pid": 1, "sources": [path]}))
    (problem,) = check_prepared(launch, 16, {})
    assert "cpu-0" not in problem.message, "it was killed"


def test_the_nodes_of_an_unprepared_run_stop_with_the_code_of_a_wrong_request(
    launch: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_MAX_ROW_BYTES", 2**30)
    rows = Path(launch.config.data.sources[0].path)
    with open(rows, "ab") as file:
        file.truncate(2**30 + 1)  # a hole takes no space
    for gpus, code in ((1, 1), (0, 0)):
        (outcome,) = run_nodes(tmp_path, NodeSpec(tmp_path, overrides=tuple(launch.arguments[:2]), num_gpus=gpus))
        assert outcome.code == code, outcome.lines  # 1: this machine has no GPU
        told = [line for line in outcome.lines if "1.0 GiB of rows to read and tokenise while 1 GPU waits" in line]
        assert len(told) == gpus


def test_a_download_by_another_process_is_seen(tmp_path: Path) -> None:
    launch = resolve_launch(TINY, {"DATASET": "some/rows", "MODEL": "hf:some/model"}, [], tmp_path)
    lock = tmp_path / "datasets--some--rows.lock"
    assert not is_being_downloaded(launch.config, tmp_path)
    with hold_lock(lock, "", print):
        assert is_being_downloaded(launch.config, tmp_path)


def test_sources_that_are_parts_of_one_repository_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "find_snapshot", lambda *_: None)
    monkeypatch.setattr(preparation, "measure_repository", lambda *_: 600)
    monkeypatch.setattr(preparation, "count_partial_download", lambda *_: 100)
    parts = "data.sources=[{path: 'hf:some/rows:a'}, {path: 'hf:some/rows:b'}]"
    left = measure_unprepared(resolve_launch(TINY, {}, [OVERRIDES[0], parts], tmp_path))
    assert (left.downloads, left.rows, left.partial) == ({"hf:some/rows": 600}, 600, 100)


def test_all_rows_of_the_hub_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {name: digit * 40 for name, digit in (("rows", "a"), ("general", "b"), ("dialogs", "c"))}
    for name, commit in commits.items():
        (tmp_path / f"datasets--some--{name}.json").write_text(json.dumps({"commit": commit}))
    monkeypatch.setattr(downloads, "find_snapshot", lambda kind, name, commit: tmp_path / commit)
    rows = ["data.sources=[{path: 'hf:some/rows:small'}]", "data.replay.sources=[{path: x}, {path: 'hf:some/general'}]"]
    (tmp_path / "x").write_text("{}")
    monkeypatch.chdir(tmp_path)
    lora = load_run_config(TINY, [OVERRIDES[0], *rows])
    grpo = ROOT / "configs" / "tiny_grpo.yaml"
    rollouts = load_run_config(grpo, [OVERRIDES[0], "grpo.cases=recorded:hf:some/dialogs:small:train@main"])
    assert downloads.find_downloads(lora, tmp_path) == [
        f"data.sources.0.path=hf:{tmp_path}/{commits['rows']}:small",
        f"data.replay.sources.1.path=hf:{tmp_path}/{commits['general']}",
    ]
    assert downloads.find_downloads(rollouts, tmp_path) is None, "another revision"
    (tmp_path / "datasets--some--dialogs@main.json").write_text(json.dumps({"commit": commits["dialogs"]}))
    pinned = [f"grpo.cases=recorded:hf:{tmp_path}/{commits['dialogs']}:small:train"]
    assert downloads.find_downloads(rollouts, tmp_path) == pinned
    assert load_run_config(grpo, [OVERRIDES[0], *pinned]).grpo is not None


@pytest.fixture
def hub(tmp_path: Path) -> Any:
    with serve_hub(HubServer()) as server:
        server.repositories["models/some/model"] = {file.name: file.read_bytes() for file in TINY_BASE.iterdir()}
        rows = write_rows(tmp_path / "rows.jsonl").read_bytes()
        server.repositories["datasets/some/rows"] = {"rows.jsonl": rows, "images.zip": bytes(9_000_000)}
        yield server


def test_downloads_count_by_the_files_that_are_used_until_they_are_there(hub: HubServer, tmp_path: Path) -> None:
    home, named = tmp_path / "shared" / "huggingface", ["hf:some/model", "hf:some/rows"]

    def check(what: str, url: str = hub.url) -> list[str]:
        code = CHECK.replace("sys.argv[2]", repr(named[0])).replace("sys.argv[3]", repr(named[1]))
        found: list[str] = ask(code.replace("sys.argv[4]", repr(what)), named, home, url)
        return found

    home.mkdir(parents=True)
    (problem,) = check("check")
    sizes = {name: sum(map(len, files.values())) for name, files in hub.repositories.items()}
    assert f"{sizes['models/some/model'] / 2**20:.1f} MiB of hf:some/model to download" in problem
    size = len(hub.repositories["datasets/some/rows"]["rows.jsonl"]) / 2**20
    assert f"{size:.1f} MiB of hf:some/rows to download, {size:.1f} MiB of rows to read and tokenise" in problem
    assert "while 16 GPUs wait" in problem
    blobs = home / "hub" / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "a.incomplete").write_bytes(bytes(sizes["models/some/model"] - 10_000))
    (problem,) = check("check")
    assert "to download" not in problem, "the rest of an interrupted download is small"
    assert check("prepare") == []
    assert check("check", "http://127.0.0.1:9") == [], "known without the hub"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_room_for_the_run_or_its_rows_is_reported_before_downloads(
    launch: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 9, 1))
    assert prepare_run(launch, {}, lines.append) == FAILED
    (fault,) = lines
    assert fault.startswith(f"fault: {launch.shared}: 0 MiB free, but the run needs") or "0.0 MiB free" in fault
    assert not (launch.shared / "downloads").exists()
    monkeypatch.setattr(checks, "check_space", lambda *_: [])
    lines.clear()
    assert prepare_run(launch, {}, lines.append) == FAILED
    (fault,) = lines
    assert "and the prepared rows about" in fault
