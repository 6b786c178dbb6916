"""The real hub client against a local hub server: access checks, downloads and uploads."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.apps.push.upload import plan_upload
from fctune.data.chosen_template import ChosenTemplate
from fctune.models.export import Prompting, copy_companions, write_model_config
from tests.apps.hub_server import COMMIT, HubServer, serve_hub
from tests.conftest import ROOT, TINY_BASE
from tests.warm_interpreter import warm_python

ROWS = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(3)]
WEIGHTS = os.urandom(3_000_000)

PRELUDE = """
import json, os, sys
from pathlib import Path
from fctune.config.schema import RunConfig
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.model import ModelConfig
from fctune.apps.preflight.checks import check_hub
from fctune.apps.preflight.downloads import download
model, *sources = json.loads(sys.argv[1])
data = DataConfig(sources=[SourceConfig(path=path) for path in sources])
config = RunConfig(output_dir="runs/x", model=ModelConfig(path=model), data=data)
"""
CHECK = PRELUDE + "print(json.dumps([str(problem) for problem in check_hub(config, os.environ)]))"
DOWNLOAD = PRELUDE + "print(json.dumps(download(config, Path(os.environ['HF_HOME']) / 'downloads')))"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    card = b"---\nconfigs:\n- config_name: small\n  data_files: rows.jsonl\n---\n"
    with serve_hub(HubServer()) as server:
        server.repositories["models/some/model"] = {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "evil.py": b"raise SystemExit",
            "pytorch_model.bin": b"pickle",
        }
        server.repositories["datasets/some/rows"] = {"README.md": card, "rows.jsonl": rows, "loader.py": b"1/0"}
        yield server


def start(
    code: str, named: list[Any], home: Path, url: str, arguments: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    clean |= {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [warm_python(), "-c", code, json.dumps(named), *arguments],
        cwd=ROOT,
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ask(code: str, named: list[str], home: Path, url: str, **environment: str) -> Any:
    process = start(code, named, home, url, **environment)
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def test_a_repository_that_cannot_be_downloaded_is_reported_with_its_remedy(hub: HubServer, tmp_path: Path) -> None:
    assert ask(CHECK, ["hf:some/model", "hf:some/rows:small"], tmp_path, hub.url) == []
    hub.gated.add("models/some/model")
    (fault,) = ask(CHECK, ["hf:some/model"], tmp_path, hub.url)
    assert "model.path: some/model is gated and HF_TOKEN is empty" in fault
    assert "https://huggingface.co/some/model" in fault
    assert "--secret HF_TOKEN" in fault
    (fault,) = ask(CHECK, ["hf:some/model"], tmp_path, hub.url, HF_TOKEN="of-another")
    assert "the account of HF_TOKEN has no access" in fault
    assert "of-another" not in fault
    assert ask(CHECK, ["hf:some/model"], tmp_path, hub.url, HF_TOKEN="may-read") == []
    model, rows = ask(CHECK, ["hf:some/modle", "hf:some/row@main"], tmp_path, hub.url)
    assert "model.path: the hub has no model some/modle" in model
    assert "data.sources.0.path: the hub has no dataset some/row" in rows
    (fault,) = ask(CHECK, ["hf:some/model"], tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert "is not downloaded, and HF_HUB_OFFLINE is set" in fault
    (fault,) = ask(CHECK, ["hf:some/model"], tmp_path, "http://127.0.0.1:9")
    assert "cannot reach the hub for some/model (ConnectError" in fault


def test_concurrent_runs_download_once_and_pin_the_same_commit(hub: HubServer, tmp_path: Path) -> None:
    named = ["hf:some/model", "hf:some/rows:small"]
    runs = [start(DOWNLOAD, named, tmp_path, hub.url) for _ in range(2)]
    outputs = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    model, rows = first
    assert model == f"model.path=hf:some/model@{COMMIT}"
    assert rows.startswith(f"data.sources.0.path=hf:{tmp_path}")
    assert rows.endswith(f"{COMMIT}:small")
    assert hub.sent["model.safetensors"] == len(WEIGHTS)
    assert not hub.sent["evil.py"] + hub.sent["pytorch_model.bin"] + hub.sent["loader.py"]
    record = json.loads((tmp_path / "downloads" / "models--some--model.json").read_text())
    assert record["commit"] == COMMIT
    assert record["bytes"] == len(WEIGHTS) + len(b"{}")
    read = PRELUDE + (
        "from fctune.data.sources.arrow import iter_hub\n"
        "from fctune.data.sources.row_json import RowJsonReader\n"
        "print(json.dumps([row for _, row in iter_hub(os.environ['ROWS'], RowJsonReader())]))"
    )
    path = rows.partition("=")[2]
    offline = ask(read, ["x"], tmp_path, "http://127.0.0.1:9", ROWS=path, HF_HUB_OFFLINE="1")
    assert [row["messages"] for row in offline] == [row["messages"] for row in ROWS]
    assert ask(CHECK, named, tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1") == [], "already downloaded"


def test_a_resumed_run_keeps_the_commit_it_started_with(hub: HubServer, tmp_path: Path) -> None:
    (first,) = ask(DOWNLOAD, ["hf:some/model"], tmp_path, hub.url)
    hub.commit = "f" * 40
    hub.repositories["models/some/model"]["model.safetensors"] = b"newer"
    assert ask(DOWNLOAD, ["hf:some/model"], tmp_path, hub.url) == [first]
    (tmp_path / "downloads" / "models--some--model.json").unlink()
    assert ask(DOWNLOAD, ["hf:some/model"], tmp_path, hub.url) == [f"model.path=hf:some/model@{hub.commit}"]
    named = ask(DOWNLOAD, [f"hf:some/model@{COMMIT}"], tmp_path, hub.url)
    assert named == [first]


def test_an_interrupted_download_resumes_where_it_stopped(hub: HubServer, tmp_path: Path) -> None:
    weights = os.urandom(30_000_000)  # the client writes to disk in chunks of 10 MB
    hub.repositories["models/some/model"]["model.safetensors"] = weights
    hub.cut.add("model.safetensors")
    (model,) = ask(DOWNLOAD, ["hf:some/model"], tmp_path, hub.url)
    assert model.endswith(COMMIT)
    (file,) = tmp_path.rglob(f"snapshots/{COMMIT}/model.safetensors")
    assert file.read_bytes() == weights
    assert hub.sent["model.safetensors"] < 1.2 * len(weights), "the first half was downloaded twice"


FIND_BASE = """
import json, sys
from pathlib import Path
from fctune.base.errors import ConfigError
from fctune.engines.model_files import find_model
for i, config in enumerate(json.loads(sys.argv[1])):
    folder = Path(f"{sys.argv[2]}/{i}")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
def find(folder):
    try:
        return str(find_model(str(folder)).model_dir)
    except ConfigError as error:
        return str(error)
print(json.dumps([find(folder) for folder in sorted(Path(sys.argv[2]).iterdir())]))
"""


def test_an_adapters_base_is_found_on_the_hub_by_its_name_and_revision(hub: HubServer, tmp_path: Path) -> None:
    pinned = "f" * 40
    configs: list[dict[str, Any]] = [
        {"base_model_name_or_path": "some/model"},
        {"base_model_name_or_path": "some/model", "revision": pinned},
        {"base_model_name_or_path": f"hf:some/model@{pinned}"},
        {"base_model_name_or_path": "some/other"},
    ]
    (tmp_path / "adapters").mkdir()
    process = start(FIND_BASE, configs, tmp_path / "home", hub.url, arguments=[str(tmp_path / "adapters")])
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    newest, *revisions, missing = json.loads(out)
    assert newest.endswith(f"/snapshots/{COMMIT}")
    assert [path.rpartition("/")[2] for path in revisions] == [pinned, pinned]
    assert "adapters/3: its base model: model.path=hf:some/other: cannot be downloaded" in missing
    assert "set base_model_name_or_path in" in missing


def push(
    hub: HubServer,
    *arguments: str,
    token: str = "may-write",
    confirm: Sequence[str] = ("--yes",),
    stdin: int | None = None,
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = clean | {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [warm_python(), "-m", "fctune.cli", "push", *arguments, *confirm]
    stdin = subprocess.DEVNULL if stdin is None else stdin
    return subprocess.run(command, cwd=ROOT, env=environment, stdin=stdin, capture_output=True, text=True, timeout=100)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Write a run with a merged export, next to which lie files that are nobody's business."""
    folder = tmp_path / "run" / "export" / "merged"
    folder.mkdir(parents=True)
    for name, data in EXPORT.items():
        (folder / name).write_bytes(data)
    return folder


EXPORT = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"weights",
    "model-00002-of-00002.safetensors": b"more",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {name: f"model-0000{name}-of-00002.safetensors" for name in "12"}}
    ).encode(),
    "chat_template.jinja": b"{{ messages }}",
    "chat_template_kwargs.json": b'{"enable_thinking": false}',
    "tokenizer.json": b"{}",
    "LICENSE.txt": b"MIT",
}


def test_nothing_but_the_files_of_an_export_is_uploaded(hub: HubServer, export: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("secret")
    for name in (".env", ".secret", "notes.md", "rows.jsonl", "optimizer.safetensors", "model.safetensors", "train.py"):
        (export / name).write_text("secret")
    for name in ("generation_config.json", "vocab.json", "LICENSE"):
        (export / name).symlink_to(secret)
    (export / "checkpoint-10").mkdir()
    (export / "checkpoint-10" / "config.json").write_text("secret")
    (export / "tokenizer.model").mkdir()
    done = push(hub, str(tmp_path / "run"), "me/tuned")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.url}/me/tuned/commit/{COMMIT}"
    card = hub.commits["me/tuned"].pop("README.md").decode()
    assert "function-calling" in card
    assert hub.commits["me/tuned"] == EXPORT
    assert hub.created[0]["visibility"] == "private"
    assert "may-write" not in done.stdout + done.stderr
    listed, _, skipped = done.stderr.partition("not uploaded: ")
    assert all(f"  {name} " in listed for name in (*EXPORT, "README.md"))
    assert "model-00001-of-00002.safetensors     7 bytes" in listed
    assert ".env, .secret, LICENSE, checkpoint-10/," in skipped
    assert "and 2 more" in skipped


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ("new", [], "me/tuned will be created as a private repository."),
        ("new", ["--public"], "me/tuned will be created as a PUBLIC repository."),
        ("private", [], "me/tuned is an existing private repository."),
        ("public", [], "me/tuned is an existing PUBLIC repository: anyone can download what is uploaded."),
    ],
)
def test_without_a_terminal_or_yes_an_upload_is_listed_and_refused(
    state: str, options: list[str], words: str, hub: HubServer, export: Path
) -> None:
    if state != "new":
        hub.repositories["models/me/tuned"] = {}
    if state == "private":
        hub.private.add("models/me/tuned")
    done = push(hub, str(export), "me/tuned", *options, confirm=())
    assert done.returncode == 2
    assert done.stderr.index(words) < done.stderr.index("  config.json ") < done.stderr.index("with --yes")
    assert not hub.created
    assert not hub.commits
    assert not (export / "README.md").exists()


@pytest.mark.parametrize(("reply", "is_uploaded"), [("y", True), ("YES", True), ("", False), ("n", False)])
def test_an_upload_is_confirmed_at_the_terminal(reply: str, is_uploaded: bool, hub: HubServer, export: Path) -> None:
    keyboard, terminal = pty.openpty()
    os.write(keyboard, f"{reply}\n".encode())
    done = push(hub, str(export), "me/tuned", confirm=(), stdin=terminal)
    os.close(keyboard)
    os.close(terminal)
    assert "Upload? [y/N]" in done.stderr
    assert done.returncode == (0 if is_uploaded else 1), done.stderr
    assert bool(hub.commits) == is_uploaded


def test_an_export_with_missing_or_linked_weights_is_refused(hub: HubServer, export: Path, tmp_path: Path) -> None:
    shard = export / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / shard.name)
    done = push(hub, str(export), "me/tuned")
    assert done.returncode == 2
    assert "model-00002-of-00002.safetensors, which the model needs, is missing" in done.stderr
    shard.symlink_to(tmp_path / shard.name)
    done = push(hub, str(export), "me/tuned")
    assert done.returncode == 2
    assert "links to a file outside of it. Replace the link by the file." in done.stderr
    assert not hub.commits


def test_every_file_that_an_export_writes_is_uploaded(tmp_path: Path) -> None:
    base = shutil.copytree(TINY_BASE, tmp_path / "base")
    for name in ("vocab.json", "merges.txt", "added_tokens.json", "preprocessor_config.json", "USE_POLICY.md"):
        (base / name).write_text("{}")
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    write_model_config(folder, base, torch.float32)
    template = ChosenTemplate("given", json.loads((base / "tokenizer_config.json").read_text())["chat_template"])
    copy_companions(base, folder, Prompting(template, {"enable_thinking": False}))
    upload = plan_upload(folder, "card")
    assert upload.skipped == ()
    assert set(upload.files) == {path.name for path in folder.iterdir()} | {"README.md"}
    assert {"USE_POLICY.md", "vocab.json", "chat_template_kwargs.json", "server_parsers.json"} < set(upload.files)


def test_a_failed_upload_is_reported_without_showing_the_token(hub: HubServer, tmp_path: Path) -> None:
    nothing = push(hub, str(tmp_path), "me/tuned")
    assert nothing.returncode == 2
    assert "nothing to upload" in nothing.stderr
    (tmp_path / "config.json").write_text("{}")
    empty = push(hub, str(tmp_path), "me/tuned")
    assert empty.returncode == 2
    assert "contains no .safetensors" in empty.stderr
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    refused = push(hub, str(tmp_path), "me/tuned", token="of-another")
    assert refused.returncode == 2
    assert "me/tuned: upload failed" in refused.stderr
    assert "Use a token with write access" in refused.stderr
    assert "of-another" not in refused.stdout + refused.stderr
    assert not hub.commits


def write_adapter(folder: Path, base: str) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    return folder


@pytest.mark.parametrize(
    ("refusal", "words", "is_about_the_token"),
    [
        ((403, "", "You have read access only"), "You have read access only", True),
        ((404, "RepoNotFound", "Repository not found"), "RepositoryNotFoundError", True),
        ((404, "RevisionNotFound", "Invalid rev id: next"), "Invalid rev id: next", False),
        ((507, "", "The repository is full"), "The repository is full", False),
    ],
    ids=["no-access", "no-repository", "no-branch", "full"],
)
def test_a_token_is_advised_only_where_access_is_missing(
    refusal: tuple[int, str, str], words: str, is_about_the_token: bool, hub: HubServer, tmp_path: Path
) -> None:
    hub.refusal = refusal
    done = push(hub, str(write_adapter(tmp_path / "adapter", "some/model")), "me/tuned")
    assert done.returncode == 2
    assert words in done.stderr
    assert ("Use a token with write access" in done.stderr) == is_about_the_token


@pytest.mark.parametrize(
    ("base", "published", "is_told"),
    [
        ("hf:some/model@abc", {"base_model_name_or_path": "some/model", "revision": "abc"}, False),
        ("/private/models/Mine-1B", {"base_model_name_or_path": "Mine-1B", "revision": None}, True),
    ],
    ids=["on-the-hub", "local"],
)
def test_an_adapter_is_published_with_its_bases_name_and_no_local_path(
    base: str, published: dict[str, Any], is_told: bool, hub: HubServer, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", base)
    before = (folder / "adapter_config.json").read_bytes()
    done = push(hub, str(folder), "me/tuned")
    assert done.returncode == 0, done.stderr
    files = hub.commits["me/tuned"]
    assert json.loads(files["adapter_config.json"]) == {**published, "r": 4}
    assert files["adapter_model.safetensors"] == b"weights"
    assert not any(b"/private" in data for data in files.values())
    assert (folder / "adapter_config.json").read_bytes() == before
    assert ("The base is published as Mine-1B, without its path." in done.stderr) == is_told
